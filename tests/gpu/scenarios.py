"""What the accelerator of this machine has to show: the corpus, and what a device alone has. They need torch alone.

Each is a function of a machine that raises ``AssertionError`` where something is wrong, or ``Skipped`` with a reason.
"""

from __future__ import annotations

import gc
import itertools
import tempfile
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

import eager_offload as eo
from eager_offload.errors import HostAllocationUnderCaptureError
from eager_offload.graphs import CaptureMode, CaptureStatus, DeviceScalar, capture_status, capture_step
from eager_offload.kernels import CapabilityError, Kernel, LaunchSpec, Scalar, Signature, TensorSpec, as_torch_kernel
from eager_offload.runtime.base import ALIGNMENT, Direction, Layout
from eager_offload.tiers.host import HostTier
from eager_offload.tiers.pool import Pool
from tests.gpu.machine import Machine, Skipped
from tests.hazards.backends import assert_settled, wait_until_nothing_is_held
from tests.hazards.programs import REGIMES, Around, Body, Settled, assert_moved
from tests.programs import Flag, Program, Run, corpus
from tests.threads import on_a_thread

Scenario: TypeAlias = Callable[[Machine], None]
SCENARIOS: list[Scenario] = []

MIB = 1 << 20


def scenario(function: Scenario) -> Scenario:
    """Adds a scenario that has no program."""
    SCENARIOS.append(function)
    return function


def same(machine: Machine, program: Body, *, least: float = 0.9, reloads: bool = True, **fields: Any) -> None:
    """Asserts that ``program`` gives the same bits with offload in every regime, and that its bytes did move.

    Once with copies that come late, and once with compute that does.

    Args:
        least: the part of the bytes that has to move.
        reloads: whether bytes have to come back when everything has left before backward begins.
        fields: of the ``Offload``.
    """
    torch.manual_seed(0)
    expected = program(nullcontext())
    machine.finish()
    for slow, regime in itertools.product((machine.slow_links, machine.slow_compute), REGIMES):
        offload = machine.offload(**{**regime.fields, **fields})
        torch.manual_seed(0)
        with slow():
            actual = program(regime.around(offload))
        machine.finish()
        machine.identical(expected, actual, str(regime))
        del actual
        wait_until_nothing_is_held(offload)  # of programs whose backward fails
        stats = assert_settled(offload)
        if regime.settled:
            assert_moved(stats, held=True, least=least)
            assert stats.bytes_in > 0 or not reloads, f"{regime}: nothing was brought back\n{stats}"
        offload.close()


def scenario_of(program: Program) -> Scenario:
    """The scenario that runs a program of the corpus."""

    def run(machine: Machine) -> None:
        def body(around: Around) -> object:
            with machine.device:
                return program(Run(around))

        torch.manual_seed(0)
        first = body(nullcontext())
        torch.manual_seed(0)
        second = body(nullcontext())
        try:
            machine.identical(first, second)
        except AssertionError as error:
            raise Skipped("this device does not compute it twice to the same bits") from error
        del first, second
        reloads = Flag.NOTHING_BACK not in program.flags
        same(machine, body, least=program.moved, reloads=reloads, **program.fields)

    run.__name__ = program.name
    return run


_SHOWN = [one for one in corpus() if not one.flags & {Flag.HOST, Flag.COMPILED}]
PROGRAMS = [scenario_of(one) for one in _SHOWN]
#: Those that a device alone can run.
OF_DEVICES = [one for one, shown in zip(PROGRAMS, _SHOWN, strict=True) if Flag.DEVICE in shown.flags]


def gradients(machine: Machine, around: Around, seed: int = 1) -> tuple[Tensor, ...]:
    """Those of a leaf and of a weight."""
    x, w = machine.leaf(seed), machine.leaf(seed + 100)
    with around:
        h = (x * 2).tanh()
        loss = ((h @ w).exp() * h).sin().sum()
    del h
    return torch.autograd.grad(loss, [x, w])


# -- memory, disk and times -------------------------------------------------------------------------------------------


@scenario
def the_host_goes_on_while_a_copy_waits_for_compute(machine: Machine) -> None:
    runtime, compute = machine.runtime, machine.current
    out = runtime.transfer_stream(machine.device, Direction.OUT)
    source = torch.empty(MIB, dtype=torch.uint8, device=machine.device)
    slot = HostTier(Pool(runtime.host_buffer), budget=1 << 30).reserve(MIB)
    assert slot is not None
    runtime.synchronize(runtime.copy(slot, source, out, [runtime.record(compute)]))
    machine.doze()
    source.fill_(7)
    ready = runtime.record(compute)
    copied = runtime.copy(slot, source, out, [ready])
    runtime.wait(compute, copied)
    assert not runtime.query(ready), "the device is still busy, so that no call above waited for it"
    assert not runtime.query(copied)
    runtime.synchronize(copied)
    machine.holds(slot.tensor.eq(7).all())


@scenario
def memory_is_pinned_and_aligned_and_a_link_has_the_bandwidth_of_a_bus(machine: Machine) -> None:
    runtime = machine.runtime
    pinned, pageable = runtime.host_buffer(MIB), runtime.host_buffer(MIB, pin_memory=False)
    assert (pinned.is_pinned(), pageable.is_pinned()) == (True, False)
    assert pinned.data_ptr() % 4096 == pageable.data_ptr() % 4096 == 0
    for nbytes, offset in itertools.product((1, 4096, MIB), (0, 1, 4, 16, 60, 63)):
        target = runtime.allocate(Layout(nbytes, offset), machine.device, machine.current)
        assert (target.data_ptr() % ALIGNMENT, tuple(target.shape)) == (offset, (nbytes,))
        assert offset or target.untyped_storage().nbytes() == nbytes
    for found in runtime.measure_link(machine.device):
        assert 1e8 < found.median < 1e13
        assert 1 <= found.spread < 100


def held(machine: Machine) -> int:
    """Bytes of the device, once all that has gone is given back."""
    gc.collect()
    machine.finish()
    machine.runtime.poll()
    torch.accelerator.empty_cache()
    return torch.accelerator.memory_reserved(machine.device)


@scenario
def pageable_memory_and_the_disk_behind_the_device_are_exact(machine: Machine) -> None:
    with tempfile.TemporaryDirectory(dir=".") as directory:  # a temporary directory in memory would be refused
        for fields in ({"pin_memory": False}, {"tier": "disk", "disk_path": directory, "verify": True}):
            same(machine, lambda around: [gradients(machine, around, seed) for seed in range(3)], **fields)


# -- kernels ----------------------------------------------------------------------------------------------------------

TURNED = """
template <int factor>
__global__ void turned(const float* x, const long long* number, float* y) {
  extern __shared__ float staged[];
  long long at = blockIdx.x * (long long)blockDim.x + threadIdx.x;
  staged[threadIdx.x] = x[at] * factor * *number;
  __syncthreads();
  y[at] = staged[blockDim.x - 1 - threadIdx.x];
}
"""


@scenario
def a_kernel_in_cuda_runs_on_the_current_stream(machine: Machine) -> None:
    """With its grid, its block, its shared memory, and a number that takes more than 32 bits."""
    if machine.device.type != "cuda":
        raise Skipped("a kernel in CUDA C++ needs CUDA")
    rows = TensorSpec((machine.width, 256), torch.float32)
    kernel = Kernel(
        "turned<4>",
        Signature((rows, Scalar(torch.int64)), (rows,)),
        LaunchSpec((machine.width, 1, 1), (256, 1, 1), shared=64 << 10),
        {"torch": lambda x, number, y: y.copy_(x.flip(1) * 4 * number), "cuda": TURNED},
    )
    turned, reference = as_torch_kernel(kernel, "cuda"), as_torch_kernel(kernel, "torch")
    x = torch.randn(rows.shape, device=machine.device)
    try:
        turned(x, 1)  # compiles
    except CapabilityError as reason:
        if "needs NVRTC" not in str(reason):
            raise
        raise Skipped(str(reason)) from reason
    side = machine.side_stream()
    machine.meet(machine.current, side)
    with side:
        machine.doze()
        y = turned(x * 3, 1 << 33)
    machine.meet(machine.current, side)
    machine.holds(torch.equal(y, reference(x * 3, 1 << 33)))


# -- captures ---------------------------------------------------------------------------------------------------------

WARM_UP = 3


class Training:
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
    x, y = (machine.leaf(seed).detach() * 8 for seed in (2 * number, 2 * number + 1))
    return x, y


def captured(machine: Machine, step: Training, offload: eo.Offload | None = None, **arguments: Any) -> Any:
    """``step`` after ``WARM_UP`` real ones, captured; with an offload that moves all that can move."""
    machine.require_graphs()
    offload = machine.offload(max_inflight_bytes=1) if offload is None else offload
    moved = offload.stats(synchronize=True).bytes_out
    found = capture_step(step, batch(machine, 99), offload=offload, scalars=(step.rate,), warmup=WARM_UP, **arguments)
    assert offload.stats(synchronize=True).bytes_out > moved, "the warm-ups have moved nothing"
    return found


def assert_replays_are_steps(machine: Machine, step: Training, replay: Any, replays: int = 3) -> None:
    """Of a step that was captured just now: beside another one, which begins with the same real steps."""
    eager, losses = Training(machine), set()
    for _ in range(WARM_UP):
        eager(*batch(machine, 99))
    for number in range(replays):
        for one in (eager, step):
            one.rate.update(1e-3 / (1 + number))
        values = batch(machine, number)
        expected, actual = eager(*values), replay(*values)
        machine.holds(torch.equal(expected, actual))
        losses.add(actual.item())
    machine.holds(len(losses) == replays)
    machine.finish()
    for one, other in zip(eager.parameters, step.parameters, strict=True):
        machine.holds(torch.equal(one, other))


@scenario
def replays_of_a_step_with_offload_are_eager_steps_and_copies_are_nodes(machine: Machine) -> None:
    step, copies = Training(machine), ("copy out", "copy in") if machine.device.type == "virtual" else ("dtoh", "htod")
    with captured(machine, step, debug=True) as replay, tempfile.TemporaryDirectory() as directory:
        replay.graph.dump(path := Path(directory) / "graph")
        assert all(name in path.read_text().lower() for name in copies)
        assert_replays_are_steps(machine, step, replay, 100)
        assert step.calls == WARM_UP + 1, "a replay calls no Python"
        assert replay.graph.num_replays == 100


@scenario
def a_replay_on_another_stream_is_in_order_and_outlives_another_step(machine: Machine) -> None:
    """Their captures were on one stream, for which torch keeps what matrix products work in."""
    step, side, home = Training(machine), machine.side_stream(), machine.current
    with captured(machine, step) as replay:
        with captured(machine, Training(machine)) as other:
            other.launch()
        del other
        held(machine)
        filled = [torch.full((MIB,), torch.nan, device=machine.device) for _ in range(32)]

        def elsewhere(*values: Tensor) -> Tensor:
            with side:
                side.wait_stream(home)
                machine.doze()
                result: Tensor = replay(*values)
            home.wait_stream(side)
            return result

        assert_replays_are_steps(machine, step, elsewhere, 10)
        machine.holds(all(one.isnan().all() for one in filled))


@scenario
def memory_is_flat_over_captures_and_pinned_memory_goes_with_the_offload(machine: Machine) -> None:
    held(machine)
    slabs, step = len(machine.runtime._pinned._records), Training(machine)
    offload, before = machine.offload(max_inflight_bytes=1), 0
    for number in range(7):
        with captured(machine, step, offload) as replay:
            machine.holds(replay(*batch(machine, number)).isfinite())
        step.optimizer.zero_grad()  # a gradient is memory of the graph, and keeps whatever was allocated beside it
        if number == 1:
            before = held(machine)
        assert number < 1 or held(machine) == before, f"capture {number}"
    assert len(machine.runtime._pinned._records) > slabs
    offload.close()
    held(machine)
    assert len(machine.runtime._pinned._records) == slabs


@scenario
def after_a_capture_that_failed_the_next_is_good_and_nothing_is_held(machine: Machine) -> None:
    class Fault(RuntimeError):
        pass

    def fail(number: int) -> None:
        if number == WARM_UP:
            raise Fault

    def invalidate(number: int) -> None:
        if number == WARM_UP:
            torch.ones(1, device=machine.device).item()

    offload, current, expected = (
        machine.offload(max_inflight_bytes=1),
        machine.current,
        gradients(machine, nullcontext()),
    )
    for during in (fail, invalidate):
        before = 0
        for number in range(4):  # of the first that fails torch keeps the random state for good, to 2.12
            with suppress(RuntimeError):
                captured(machine, Training(machine, during), offload)
                raise AssertionError("a capture that cannot be has ended with a graph")
            assert (machine.current, capture_status()) == (current, CaptureStatus.NONE)
            machine.identical(expected, gradients(machine, offload))
            if number == 1:
                before = held(machine)
            assert number < 1 or held(machine) == before
        step = Training(machine)
        with captured(machine, step, offload) as replay:
            assert_replays_are_steps(machine, step, replay)


@scenario
def another_thread_trains_pins_and_asks_about_events_while_a_step_is_captured(machine: Machine) -> None:
    """In mode ``global`` it pins nothing, and is told that no event is over."""
    found: list[object] = []

    def work() -> None:
        try:
            found.append(machine.runtime.host_buffer(MIB).is_pinned())
        except HostAllocationUnderCaptureError:
            found.append(None)
        found.append(machine.runtime.query(machine.runtime.record(other)))
        if found[0]:  # what a thread's first product creates, the next thread takes over
            around: AbstractContextManager[object]
            for around in (nullcontext(), Settled(machine.offload())):
                found.append(gradients(machine, around))

    def during(number: int) -> None:
        if number == WARM_UP:
            on_a_thread(work)

    other = machine.side_stream()
    on_a_thread(work)
    for mode in CaptureMode:
        found.clear()
        step = Training(machine, during)
        with captured(machine, step, mode=mode) as replay:
            is_global = mode is CaptureMode.GLOBAL
            assert found[:1] == [None if is_global else True]
            assert not (is_global and found[1])
            assert len(found) == (2 if is_global else 4)
            machine.identical(*([0, 0] if is_global else found[2:]))
            assert_replays_are_steps(machine, step, replay)
