"""What ``capture_step`` has to do on a device that captures: whole training steps, whose saved tensors cross the link.

As ``scenarios.py``, they need torch alone.
"""

from __future__ import annotations

import gc
import tempfile
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from eager_offload import Offload
from eager_offload.graphs import (
    CaptureMode,
    CaptureStatus,
    HostAllocationUnderCaptureError,
    capture_status,
    capture_step,
)
from tests.gpu.graph_scenarios import COPIES, REPLAYS, TrainingStep, batch
from tests.gpu.machine import Machine
from tests.gpu.scenarios import scenarios_in

WARMUP = 3


def captured(machine: Machine, step: TrainingStep, offload: Offload | None = None, **arguments: Any) -> Any:
    """``step`` after ``WARMUP`` real ones, captured; with an offload that moves all that can move."""
    offload = machine.offload(max_inflight_bytes=1) if offload is None else offload
    moved = offload.stats(synchronize=True).bytes_out
    found = capture_step(
        step, batch(machine, REPLAYS), offload=offload, scalars=(step.rate,), warmup=WARMUP, **arguments
    )
    assert offload.stats(synchronize=True).bytes_out > moved, "the warm-ups have moved nothing"
    assert found.plan.slots, f"a replay moves nothing\n{found.plan}"
    return found


def assert_replays_are_eager_steps(machine: Machine, step: TrainingStep, replay: Any, replays: int) -> None:
    """Of a step that was captured just now: beside another one, which begins with the same real steps."""
    eager = TrainingStep(machine)
    for _ in range(WARMUP):
        eager(*batch(machine, REPLAYS))
    losses = set()
    for number in range(replays):
        for one in (eager, step):
            one.rate.update(1e-3 / (1 + number))
        values = batch(machine, number)
        expected, actual = eager(*values), replay(*values)
        assert actual is replay.result
        assert torch.equal(expected, actual) or not machine.computes, f"replay {number}"
        losses.add(actual.item())
    assert len(losses) == replays or not machine.computes, "each batch has a loss of its own"
    machine.finish()
    for one, other in zip(eager.parameters, step.parameters, strict=True):
        assert torch.equal(one, other) or not machine.computes


def replays_of_a_step_with_offload_are_eager_steps(machine: Machine) -> None:
    machine.require_graphs()
    step = TrainingStep(machine)
    with captured(machine, step) as replay:
        assert step.calls == WARMUP + 1
        assert_replays_are_eager_steps(machine, step, replay, REPLAYS)
        assert step.calls == WARMUP + 1, "a replay calls no Python"
        assert replay.graph.num_replays == REPLAYS


def a_replay_on_another_stream_is_in_order(machine: Machine) -> None:
    machine.require_graphs()
    step, side = TrainingStep(machine), machine.side_stream()
    with captured(machine, step) as replay:

        def elsewhere(*values: Tensor) -> Tensor:
            with machine.computing_on(side):
                side.wait_stream(home)
                machine.doze()
                result: Tensor = replay(*values)
            home.wait_stream(side)
            return result

        home, elsewhere.result = machine.current, replay.result
        assert_replays_are_eager_steps(machine, step, elsewhere, 10)


def copies_of_an_offload_are_nodes_of_the_graph(machine: Machine) -> None:
    machine.require_graphs()
    step = TrainingStep(machine)
    with captured(machine, step, debug=True) as replay, tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "graph"
        replay.graph.dump(path)
        text = path.read_text().lower()
        for name in COPIES[machine.device.type == "virtual"]:
            assert text.count(name) >= len(replay.plan.slots), text[:4000]
        assert_replays_are_eager_steps(machine, step, replay, 3)


def a_step_that_goes_takes_nothing_from_another(machine: Machine) -> None:
    """Their captures were on one stream, for which torch keeps what matrix products work in."""
    machine.require_graphs()
    step = TrainingStep(machine)
    with captured(machine, step) as replay:
        with captured(machine, TrainingStep(machine)) as other:
            other.launch()
        del other
        gc.collect()
        machine.finish()
        torch.accelerator.empty_cache()
        filled = [torch.full((1 << 20,), torch.nan, device=machine.device) for _ in range(32)]
        assert_replays_are_eager_steps(machine, step, replay, 3)
        assert all(one.isnan().all() for one in filled) or not machine.computes


def memory_is_flat_over_recaptures(machine: Machine) -> None:
    """Of the device after each capture, and of pinned memory once the offload is closed."""
    machine.require_graphs()

    def held() -> int:
        gc.collect()
        machine.finish()
        machine.runtime.poll()
        torch.accelerator.empty_cache()
        return torch.accelerator.memory_reserved(machine.device)

    def pinned() -> int:
        return len(machine.runtime._pinned._records)

    held()
    slabs, step, offload = pinned(), TrainingStep(machine), machine.offload(max_inflight_bytes=1)

    def recapture(number: int) -> None:
        with captured(machine, step, offload) as replay:
            assert replay(*batch(machine, number)).isfinite() or not machine.computes
        step.optimizer.zero_grad()  # a gradient is memory of the graph, and keeps whatever was allocated beside it

    for number in range(2):
        recapture(number)
    before = held()
    for number in range(20):
        recapture(number)
        assert held() == before, f"capture {number}"
    assert pinned() > slabs
    offload.close()
    held()
    assert pinned() == slabs


def after_a_capture_of_a_step_that_failed_the_next_is_good(machine: Machine) -> None:
    machine.require_graphs()

    class Fault(Exception):
        pass

    def fail(number: int) -> None:
        if number == WARMUP:
            raise Fault

    def invalidate(number: int) -> None:
        if number == WARMUP:
            torch.ones(1, device=machine.device).item()

    offload, before = machine.offload(max_inflight_bytes=1), machine.current
    for during, kind in ((fail, Fault), (invalidate, RuntimeError)):
        raised: BaseException | None = None
        try:
            captured(machine, TrainingStep(machine, during), offload)
        except (Fault, RuntimeError) as error:
            raised = error
        assert isinstance(raised, kind), raised
        assert machine.current == before
        assert capture_status() is CaptureStatus.NONE
        gradients = [first_gradient(machine, around) for around in (offload, nullcontext())]
        assert torch.equal(*gradients) or not machine.computes
        step = TrainingStep(machine)
        with captured(machine, step, offload) as replay:
            assert_replays_are_eager_steps(machine, step, replay, 3)


def first_gradient(machine: Machine, around: AbstractContextManager[Any]) -> Tensor:
    step, (x, y) = TrainingStep(machine), batch(machine, 1)
    with around:
        loss = (step.rest(step.first(x)) - y).square().mean()
    (gradient,) = torch.autograd.grad(loss, step.parameters[:1])
    return gradient


def a_thread_pins_while_a_step_is_captured_in_each_mode(machine: Machine) -> None:
    machine.require_graphs()
    found: list[str] = []

    def pin() -> None:
        try:
            found.append("pinned" if machine.runtime.host_buffer(1 << 20).is_pinned() else "not pinned")
        except HostAllocationUnderCaptureError:
            found.append("refused")

    def during(number: int) -> None:
        if number == WARMUP:
            machine.in_thread(pin)

    for mode in CaptureMode:
        step = TrainingStep(machine, during)
        with captured(machine, step, mode=mode) as replay:
            assert found.pop() == ("refused" if mode is CaptureMode.GLOBAL else "pinned"), mode
            assert_replays_are_eager_steps(machine, step, replay, 3)


def a_step_that_rounds_replays_the_same_numbers(machine: Machine) -> None:
    machine.require_graphs()
    x, factor = batch(machine, 0)
    weights = [machine.leaf(seed) for seed in range(1, 7)]

    def step(given: Tensor) -> Tensor:
        first, second, *rest = weights
        loss = ((nn.functional.gelu(given @ first) + 0.0) @ second * factor).sum()
        z = given
        for weight in rest:  # so that what was saved before leaves
            z = nn.functional.gelu(z @ weight)
        return torch.autograd.grad(loss + z.sum(), [second, *weights])[0]

    exact = step(x).cpu()
    offload = machine.offload(codec="int8", max_inflight_bytes=1)
    with capture_step(step, (x,), offload=offload, warmup=WARMUP) as replay:
        assert any(save.coded is not None for save in replay.plan.saves), f"nothing is rounded\n{replay.plan}"
        found = [replay(x).cpu() for _ in range(REPLAYS)]
    machine.finish()
    assert all(torch.equal(one, found[0]) for one in found) or not machine.computes
    assert 0 < float((found[0] - exact).norm() / exact.norm()) < 0.03 or not machine.computes


STEP_SCENARIOS = scenarios_in(globals())
