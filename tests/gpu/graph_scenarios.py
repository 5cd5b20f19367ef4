"""What ``eager_offload.graphs`` has to do on a device that captures. As ``scenarios.py``, they need torch alone."""

from __future__ import annotations

import gc
import itertools
import tempfile
import threading
from collections.abc import Callable
from contextlib import nullcontext, suppress
from pathlib import Path

import torch
from torch import Tensor, nn

from eager_offload.graphs import (
    CapturedGraph,
    CaptureMode,
    CapturePool,
    CaptureStateError,
    CaptureStatus,
    DeviceScalar,
    GraphCaptureGuard,
    StaticInputs,
    capture_status,
    make_graphed_callable,
)
from tests.gpu.machine import Machine
from tests.gpu.scenarios import Around, scenarios_in

REPLAYS = 100
#: How a dumped graph calls nodes that copy out and in, in small letters; on the virtual device, and elsewhere.
COPIES = {True: ("copy out", "copy in"), False: ("dtoh", "htod")}


class TrainingStep:
    """Forward, backward and a fused AdamW of a few layers.

    Args:
        during: called in the midst of each forward, with the number of the step.
    """

    def __init__(self, machine: Machine, during: Callable[[int], object] = lambda number: None) -> None:
        torch.manual_seed(0)
        width, device = machine.width, machine.device
        layers = [layer for _ in range(4) for layer in (nn.Linear(width, width), nn.GELU())]
        self.first, self.rest = layers[0].to(device), nn.Sequential(*layers[1:]).to(device)
        self.rate = DeviceScalar(1e-3)
        self.parameters = [*self.first.parameters(), *self.rest.parameters()]
        kind = {"capturable": True} if device.type in ("cuda", "xpu") else {}  # other devices are refused it
        self.optimizer = torch.optim.AdamW(self.parameters, fused=True, **kind)
        self.optimizer.param_groups[0]["lr"] = self.rate.tensor  # the constructor would compute with it
        self.calls, self._during = 0, during

    def __call__(self, x: Tensor, y: Tensor) -> Tensor:
        self.optimizer.zero_grad()
        h = self.first(x)
        self.calls += 1
        self._during(self.calls - 1)
        loss = (self.rest(h) - y).square().mean()
        loss.backward()
        self.optimizer.step()
        return loss.detach()


def batch(machine: Machine, number: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(number)
    x, y = (torch.randn(machine.width, machine.width, generator=generator) for _ in range(2))
    return x.to(machine.device), y.to(machine.device)


def replays_are_eager_steps(machine: Machine) -> None:
    machine.require_graphs()
    steps, inputs = (TrainingStep(machine), TrainingStep(machine)), StaticInputs(batch(machine, 0))
    eager, captured = steps
    stream = machine.side_stream()
    with machine.computing_on(stream):
        for number, step in itertools.product(range(3), steps):
            step(*batch(machine, REPLAYS + number))
        graph = make_graphed_callable(lambda: captured(*inputs.values), stream)
        graph.upload()
        for number in range(REPLAYS):
            values = batch(machine, number)
            inputs.update(values)
            for step in steps:
                step.rate.update(1e-3 / (1 + number))
            graph.launch()
            assert torch.equal(eager(*values), graph.result) or not machine.computes, f"replay {number}"
    machine.finish()
    for one, other in zip(eager.parameters, captured.parameters, strict=True):
        assert torch.equal(one, other) or not machine.computes


def copies_both_ways_are_nodes_of_the_graph(machine: Machine) -> None:
    machine.require_graphs()
    x, pool = torch.ones(machine.width, device=machine.device), CapturePool("1MiB")
    host = pool.host_buffer(x.nbytes).view(torch.float32)
    back = torch.zeros_like(x)
    with GraphCaptureGuard(pool=pool, debug=True) as guard:
        host.copy_(x * 2, non_blocking=True)
        back.copy_(host, non_blocking=True)
    graph = guard.finish()
    for number in (1.0, 5.0):
        x.fill_(number)
        graph.launch()
        assert back.tolist() == [2 * number] * len(back) or not machine.computes
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "graph"
        graph.dump(path)
        text = path.read_text()
    assert all(name in text.lower() for name in COPIES[machine.device.type == "virtual"]), text[:4000]


def captures_that_fail_leave_nothing_and_the_next_is_good(machine: Machine) -> None:
    machine.require_graphs()
    x = torch.ones(1 << 16, device=machine.device)

    def reserved() -> int:
        gc.collect()
        machine.finish()
        machine.runtime.poll()
        torch.accelerator.empty_cache()
        return torch.accelerator.memory_reserved(machine.device)

    def capture(fails: bool) -> None:
        before = machine.current
        try:
            with GraphCaptureGuard() as guard:
                y = x + torch.rand_like(x)
                if fails:
                    y.sum().item()
            guard.finish().launch()
        except RuntimeError:
            assert fails
        else:
            assert not fails
            assert bool((y >= 1).all()) or not machine.computes
        assert machine.current == before
        assert capture_status() is CaptureStatus.NONE

    def begin_where_nothing_can() -> None:
        try:
            with GraphCaptureGuard(stream=machine.current):
                raise AssertionError("a capture has begun on the default stream")
        except CaptureStateError:
            assert capture_status() is CaptureStatus.NONE

    for fails in (False, True):  # of the first that fails torch keeps the random state for good, to 2.12
        capture(fails)
    held = reserved()
    for number in range(20):
        capture(number % 2 == 0)
        assert reserved() == held, f"capture {number}"
        assert bool((torch.rand_like(x) >= 0).all()) or not machine.computes
    begin_where_nothing_can()
    assert reserved() == held
    assert bool((torch.rand_like(x) >= 0).all()) or not machine.computes


def a_pool_goes_on_after_a_capture_that_failed(machine: Machine) -> None:
    """With the graphs that it has."""
    machine.require_graphs()
    x, pool = torch.ones(1 << 16, device=machine.device), CapturePool()

    def capture(fails: bool = False) -> CapturedGraph:
        pool.unseal()
        with GraphCaptureGuard(pool=pool) as guard:
            y = x * 2
            if fails:
                y.sum().item()
        graph = guard.finish()
        graph.result = y
        return graph

    first = capture()
    for _ in range(3):
        with suppress(RuntimeError):
            capture(fails=True)
            raise AssertionError("a capture in which the host waits has ended with a graph")
        second = capture()
        for number in (1.0, 5.0):
            x.fill_(number)
            for graph in (first, second):
                graph.launch()
                assert bool((graph.result == 2 * number).all()) or not machine.computes


def another_thread_pins_and_trains_meanwhile(machine: Machine) -> None:
    machine.require_graphs()

    def gradient(x: Tensor, around: Around) -> Tensor:
        with around:
            loss = (x @ x).tanh().exp().sum()
        return torch.autograd.grad(loss, x)[0]

    def train() -> None:
        offload, x = machine.offload(), machine.leaf()
        expected, found = (gradient(x, around) for around in (nullcontext(), offload))
        assert torch.equal(found, expected) or not machine.computes
        assert offload.stats().bytes_out > 0

    machine.in_thread(train)  # what a thread's first product creates, the next thread takes over
    x = torch.zeros(8, device=machine.device)
    for mode in (CaptureMode.THREAD_LOCAL, CaptureMode.RELAXED):
        with GraphCaptureGuard(mode=mode) as guard:
            x += 1
            machine.in_thread(train)
        guard.finish().launch()
    assert x.tolist() == [2.0] * 8 or not machine.computes


def events_are_not_asked_about_while_another_thread_captures_globally(machine: Machine) -> None:
    machine.require_graphs()
    begun, ended, found = threading.Event(), threading.Event(), []
    stream = machine.side_stream()

    def ask() -> None:
        begun.wait()
        with suppress(Exception):
            found.append(machine.runtime.query(machine.runtime.record(stream)))
        ended.set()

    thread = threading.Thread(target=ask)
    thread.start()
    x = torch.zeros(8, device=machine.device)
    with GraphCaptureGuard(mode=CaptureMode.GLOBAL) as guard:
        begun.set()
        ended.wait()
        x += 1
    thread.join()
    assert found == [False]
    guard.finish().launch()
    assert x.tolist() == [1.0] * 8 or not machine.computes


GRAPH_SCENARIOS = scenarios_in(globals())
