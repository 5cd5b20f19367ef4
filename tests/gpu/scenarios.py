"""Hazards that streams matter to, with slow links: a missing edge shows as wrong bytes. They need torch alone.

Each is a function of a machine that raises ``AssertionError`` where something is wrong, or ``Skipped`` with a reason.
"""

from __future__ import annotations

import gc
import itertools
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from inspect import isfunction, signature
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor

from eager_offload import SavedTensorModifiedError
from eager_offload.kernels import CapabilityError, Kernel, LaunchSpec, Scalar, Signature, TensorSpec, as_torch_kernel
from eager_offload.runtime.base import Layout
from eager_offload.trace_file import SliceKind, read_trace
from tests.gpu.machine import Machine, Skipped
from tests.hazards.backends import assert_settled, hooks_are_gone, wait_until_nothing_is_held
from tests.hazards.programs import (
    REGIMES,
    Around,
    Program,
    Regime,
    Settled,
    assert_moved,
    copies_given_at_once,
)

Scenario: TypeAlias = Callable[[Machine], None]


def scenarios_in(module: Mapping[str, Any]) -> list[Scenario]:
    """The functions of a module, given as its names, that are called with a machine alone; in their order."""
    return [
        one
        for one in module.values()
        if isfunction(one) and one.__module__ == module["__name__"] and [*signature(one).parameters] == ["machine"]
    ]


class Late(torch.autograd.Function):
    """Keeps compute busy for a while, in forward and in backward: whatever does not wait for it overtakes it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, machine: Machine) -> Tensor:
        ctx.machine = machine
        machine.lag()
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        ctx.machine.lag()
        return gradient.clone(), None


class Step:
    """A forward and its backward, to be run in pieces."""

    def __init__(self, machine: Machine, seed: int, device: torch.device | None = None) -> None:
        self._machine = machine
        self.x, self.w = machine.leaf(seed, device=device), machine.weight(seed + 100, device)
        self.loss: Tensor | None = None

    def forward(self, around: Around) -> Step:
        with around:
            h = Late.apply(self.x * 2, self._machine).tanh()
            y = ((h @ self.w).exp() * h).sin()
            self.loss = Late.apply(y, self._machine).sum()
        return self

    def backward(self) -> Step:
        self.loss.backward()
        self.loss = None
        return self

    def both_on(self, side: torch.Stream, around: Around) -> Step:
        """Forward and backward while the program computes on ``side``."""
        with self._machine.computing_on(side):
            self.forward(around)
        return self.backward()

    @property
    def result(self) -> object:
        return self.x.grad.clone(), self.w.grad.clone()


def same(
    machine: Machine, program: Program, *, regimes: Sequence[Regime] = REGIMES, least: float = 0.9, **fields: Any
) -> None:
    """Asserts that ``program`` gives the same bits with offload in every regime, and that its bytes did move.

    Once with copies that come late, and once with compute that does. ``least`` is the part of the bytes that has to.
    """
    expected = program(nullcontext())
    machine.finish()
    for slow in (machine.slow_links, machine.slow_compute):
        for regime in regimes:
            with slow():
                _same_in(regime, expected, machine, program, least, fields)


def _same_in(
    regime: Regime, expected: object, machine: Machine, program: Program, least: float, fields: dict[str, Any]
) -> None:
    offload = machine.offload(**{**regime.fields, **fields})
    actual = program(regime.around(offload))
    machine.finish()
    machine.assert_identical(expected, actual, str(regime))
    del actual
    wait_until_nothing_is_held(offload)  # of programs whose backward fails
    stats = assert_settled(offload)
    assert_moved(stats, held=True, least=least)
    assert stats.bytes_in > 0 or not regime.settled, f"{regime}: nothing was brought back\n{stats}"
    offload.close()


# -- saved tensors and graphs -----------------------------------------------------------------------------------------


def h01_a_change_after_the_save_is_an_error_even_while_the_copy_runs(machine: Machine) -> None:
    for settled in (False, True):
        offload = machine.offload()
        with machine.slow_links():
            w, x = machine.leaf(1), machine.leaf(2).detach() * 1
            with Settled(offload) if settled else offload:
                y = (w * x).sum()
            x.mul_(10)
            said = ""
            try:
                y.backward()
            except SavedTensorModifiedError as error:
                said = str(error)
            assert "modified by an inplace operation" in said, "a changed tensor was served"
            del y
        machine.finish()
        wait_until_nothing_is_held(offload)
        stats = assert_settled(offload)
        assert stats.offloaded_bytes + stats.kept_bytes.get("newest", 0) > 0


def h02_graphs_that_live_together(machine: Machine) -> None:
    def program(around: Around) -> object:
        steps = [Step(machine, seed).forward(around) for seed in range(3)]
        for index in (0, 2, 1):
            steps[index].backward()
        last = Step(machine, 4).forward(around)
        with around:
            steps[1].forward(nullcontext())
            last.backward()
        steps[1].backward()
        return [step.result for step in (*steps, last)]

    same(machine, program)


def h03_buffers_are_reused_while_an_earlier_graph_lives(machine: Machine) -> None:
    def program(around: Around) -> object:
        a, b = Step(machine, 1).forward(around), Step(machine, 2).forward(around)
        b.backward()
        c = Step(machine, 3).forward(around)
        a.backward()
        d = Step(machine, 4).forward(around)
        d.backward()
        c.backward()
        return [step.result for step in (a, b, c, d)]

    same(machine, program)


def h07_one_tensor_for_three_consumers_is_copied_once(machine: Machine) -> None:
    x, weights = machine.leaf(1), [machine.weight(seed) for seed in (2, 3, 4)]

    def gradients(around: Around) -> object:
        with around:
            h = x.tanh()
            loss = sum(((h @ w).sin() for w in weights), torch.zeros((), device=machine.device)).sum()
        del h
        return torch.autograd.grad(loss, [x, *weights])

    expected = gradients(nullcontext())
    for regime in REGIMES:
        offload = machine.offload(**regime.fields)
        with machine.slow_links(), copies_given_at_once(machine):  # or backward comes first to `h`, and it stays
            for _ in range(2):  # the first step shows which save of `h` is its last
                offload.reset_stats()
                machine.assert_identical(expected, gradients(regime.around(offload)))
                machine.finish()
        stats = assert_settled(offload)
        assert_moved(stats, held=True)
        # A window that is smaller than `h` lets it wait for no later save: then it is copied for each.
        saves = 1 if stats.max_inflight_bytes >= x.nbytes else 3
        assert stats.bytes_out <= (saves + 3) * x.nbytes, f"{regime}: h, and what each sine saves\n{stats}"
        assert stats.shared_bytes >= (4 - saves) * x.nbytes


def h08_saved_tensors_are_asked_for_again(machine: Machine) -> None:
    def program(around: Around) -> object:
        step = Step(machine, 1).forward(around)
        first = torch.autograd.grad(step.loss, [step.x, step.w], retain_graph=True)
        second = torch.autograd.grad(step.loss, [step.x, step.w], retain_graph=True)
        with around:
            (third,) = torch.autograd.grad(step.loss, step.x, create_graph=True)
        fourth = torch.autograd.grad(third.square().sum(), step.x)
        return first, second, third.detach(), fourth

    # Autograd has a thread for each device, and of what is saved there, in `create_graph`, the newest stays.
    same(machine, program, least=0.7)


def h10_after_an_exception_the_next_step_is_exact(machine: Machine) -> None:
    """Of the user's, in forward or in backward, or of a full device: a smaller batch comes next, then."""

    class Fault(Exception):
        pass

    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            raise Fault

    def fail(error: type[Exception] | None) -> None:
        if error is not None:
            raise error("on purpose")

    ways = [
        partial(fail, Fault),
        partial(fail, torch.OutOfMemoryError),
        partial(torch.empty, 1 << 50, dtype=torch.uint8, device=machine.device),
        partial(fail, None),  # it is backward that does
    ]

    def program(around: Around) -> object:
        results = []
        for seed, way in enumerate(ways):
            victim = Step(machine, 100 + seed)
            try:
                with around:
                    h = (victim.x * 2).tanh().exp()
                    way()
                    loss = Fails.apply(h).sin().sum()
                loss.backward()
            except (Fault, RuntimeError):
                assert hooks_are_gone()
            del victim, h
            results.append(Step(machine, seed).forward(around).backward().result)
        return results

    same(machine, program, least=0.7)  # what was saved last before an error stays: the context does not end well


# -- streams ----------------------------------------------------------------------------------------------------------


def h14_forward_and_backward_on_streams_of_their_own(machine: Machine) -> None:
    home, sides = machine.current, [machine.side_stream(), machine.side_stream()]

    def program(around: Around) -> object:
        results = []
        for index in range(6):
            side, step = sides[index % 2], Step(machine, index)
            machine.meet(home, side)
            step.both_on(side, around)
            machine.meet(home, side)
            results.append(step.result)
            machine.meet(home, side)
        return results

    same(machine, program)


def h14_two_models_on_two_streams_share_nothing_but_slots(machine: Machine) -> None:
    home, sides = machine.current, [machine.side_stream(), machine.side_stream()]

    def program(around: Around) -> object:
        steps = [Step(machine, seed) for seed in range(2)]
        machine.meet(home, *sides)
        for round in range(6):
            steps[round % 2].both_on(sides[round % 2], around)
        machine.meet(home, *sides)
        results = [step.result for step in steps]
        machine.meet(home, *sides)
        return results

    same(machine, program)


def h15_what_was_selected_stays_selected(machine: Machine) -> None:
    side = machine.side_stream()

    def program(around: Around) -> object:
        results = []
        home = machine.current
        for seed in range(4):  # from the second step on memory is used again, which is when it shows
            machine.meet(home, side)
            step = Step(machine, seed)
            machine.meet(home, side)
            with machine.computing_on(side):
                step.forward(around)
                assert machine.current == side
                step.backward()
                assert machine.current == side
            assert machine.current == home
            machine.meet(home, side)
            results.append(step.result)
            machine.meet(home, side)
        return results

    same(machine, program)


def h16_the_source_is_dropped_and_its_memory_painted_over(machine: Machine) -> None:
    def program(around: Around) -> object:
        step = Step(machine, 1).forward(around)
        for _ in range(4):
            noise = [torch.full((machine.width, machine.width), float("nan"), device=machine.device) for _ in range(8)]
            for tensor in noise:
                tensor.mul_(2)
            del noise
        return step.backward().result

    same(machine, program)


def h17_backward_begins_while_every_copy_out_still_runs(machine: Machine) -> None:
    expected, offload = Step(machine, 1).forward(nullcontext()).backward().result, machine.offload()
    with machine.slow_links():
        machine.assert_identical(expected, Step(machine, 1).forward(offload).backward().result)
    machine.finish()
    stats = assert_settled(offload)
    assert_moved(stats, held=True)
    # A small window lets the first ones arrive; what is asked for again right then comes back behind its own copy.
    same(machine, lambda around: Step(machine, 2).forward(around).backward().result, max_inflight_bytes=1)


def h18_slots_are_used_again_while_reloads_from_them_are_only_enqueued(machine: Machine) -> None:
    def program(around: Around) -> object:
        steps = [Step(machine, seed) for seed in range(8)]
        for step in steps:
            step.forward(around).backward()
        return [step.result for step in steps]

    same(machine, program)


def h19_what_was_not_asked_for_goes(machine: Machine) -> None:
    gc.collect()
    machine.finish()
    before = torch.accelerator.memory_allocated(machine.device)

    def program(around: Around) -> object:
        results = []
        for seed in range(4):
            x, w = machine.leaf(seed), machine.weight(seed + 50)
            with around:
                h = (x * 2).tanh().exp().sin().exp().tanh()
                loss = (h @ w).sin().sum()
            del h
            results.append(torch.autograd.grad(loss, w))  # half of the graph; the rest is dropped
            del loss, x, w
        return results

    same(machine, program)
    gc.collect()
    machine.finish()
    after = torch.accelerator.memory_allocated(machine.device)
    assert after == before, f"{after} bytes are allocated, {before} were before"


def h20_backward_asks_in_another_order(machine: Machine) -> None:
    def program(around: Around) -> object:
        x = machine.leaf(1)
        with around:
            branches = [(x * scale).tanh().exp().sin().sum() for scale in (1.0, 2.0, 3.0, 4.0)]
        return [torch.autograd.grad(branches[index], x) for index in (0, 3, 1, 2)]

    same(machine, program)


# -- more than one ----------------------------------------------------------------------------------------------------


def h29_two_threads_with_an_offload_each(machine: Machine) -> None:
    expected = [Step(machine, seed).forward(nullcontext()).backward().result for seed in range(4)]
    machine.finish()
    home = machine.current
    sides = [machine.side_stream() for _ in range(2)]
    results: list[object] = [None] * 4
    start = threading.Barrier(2)

    def work(thread: int) -> None:
        offload, side = machine.offload(), sides[thread]
        start.wait(timeout=60)
        for seed in (2 * thread, 2 * thread + 1):
            with machine.computing_on(side):
                step = Step(machine, seed)
            step.both_on(side, Settled(offload))
            with machine.computing_on(side):
                results[seed] = step.result
        machine.runtime.synchronize(machine.runtime.record(side))
        del step
        stats = assert_settled(offload)
        assert_moved(stats, held=True)
        assert stats.bytes_in > 0

    machine.meet(home, *sides)
    with machine.slow_links():
        other = threading.Thread(target=machine.in_thread, args=(lambda: work(1),))
        other.start()
        machine.in_thread(lambda: work(0))
        other.join()
    machine.meet(home, *sides)
    machine.finish()
    machine.assert_identical(expected, results)
    machine.meet(home, *sides)


def h30_two_devices_in_one_model(machine: Machine) -> None:
    if torch.accelerator.device_count() < 2 or machine.device.type == "cpu":
        raise Skipped("needs two devices")
    second = torch.device(machine.device.type, 1 - machine.device.index)

    def program(around: Around) -> object:
        x, w = machine.leaf(1), machine.weight(2, second)
        with around:
            h = (x * 2).tanh().exp().to(second)
            loss = ((h @ w).exp() * h).sin().to(machine.device).tanh().sum()
        del h
        gradients = torch.autograd.grad(loss, [x, w])
        assert [gradient.device for gradient in gradients] == [machine.device, second]
        return [gradient.cpu() for gradient in gradients]

    same(machine, program)


# -- memory and disk --------------------------------------------------------------------------------------------------


def out_of_memory_for_a_reload_is_absorbed_once(machine: Machine) -> None:
    expected, offload = Step(machine, 1).forward(nullcontext()).backward().result, machine.offload()
    allocate, calls = machine.runtime.allocate, 0

    def refusing(layout: Layout, device: torch.device, stream: Any) -> Tensor:
        nonlocal calls
        calls += 1
        if calls % 2 == 1:
            raise torch.OutOfMemoryError("no room, on purpose")
        return allocate(layout, device, stream)

    step = Step(machine, 1).forward(Settled(offload))
    machine.runtime.allocate = refusing
    try:
        with machine.slow_links():
            machine.assert_identical(expected, step.backward().result)
    finally:
        del machine.runtime.allocate
    assert calls > 1
    del step
    machine.finish()
    stats = assert_settled(offload)
    assert_moved(stats, held=True)
    assert stats.bytes_in > 0


def the_disk_behind_the_device(machine: Machine) -> None:
    def program(around: Around) -> object:
        steps = [Step(machine, seed) for seed in range(3)]
        for step in steps:
            step.forward(around)
        for step in reversed(steps):
            step.backward()
        return [step.result for step in steps]

    with tempfile.TemporaryDirectory(dir=".") as directory:  # a temporary directory in memory would be refused
        same(machine, program, tier="disk", disk_path=directory, verify=True)


def pageable_memory_is_exact_too(machine: Machine) -> None:
    same(machine, lambda around: Step(machine, 1).forward(around).backward().result, pin_memory=False)


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
    with machine.computing_on(side):
        machine.doze()
        y = turned(x * 3, 1 << 33)
    machine.meet(machine.current, side)
    assert torch.equal(y, reference(x * 3, 1 << 33)) or not machine.computes


def a_trace_tells_the_times_of_the_device(machine: Machine) -> None:
    offload = machine.offload()
    expected = Step(machine, 1).forward(nullcontext()).backward().result
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "step.json"
        with offload.trace(path), machine.slow_links():
            result = Step(machine, 1).forward(offload).backward().result
            machine.finish()
        trace = read_trace(path)
    machine.assert_identical(expected, result)
    stats = assert_settled(offload)
    assert_moved(stats, held=True)
    out = [one for one in trace.slices if one.kind is SliceKind.OFFLOAD]
    back = [one for one in trace.slices if one.kind in (SliceKind.RELOAD, SliceKind.PREFETCH)]
    assert sum(one.nbytes for one in out) == stats.bytes_out > 0
    assert sum(one.nbytes for one in back) == stats.bytes_in
    for slices in (out, back):  # one transfer stream each: nothing overlaps
        for first, second in itertools.pairwise(sorted(slices, key=lambda one: one.start)):
            assert first.stop <= second.start + 1e-5, "two copies of a stream at the same time"
    assert all(0 <= one.start <= one.stop <= trace.seconds for one in (*out, *back))
    assert all(one.seconds > 0 for one in out), "a copy takes time on the device"
    if back and machine.device.type != "cpu":  # the double's clock runs only in copies
        assert min(one.start for one in back) >= min(one.stop for one in out)
        link = sum(one.nbytes for one in out) / sum(one.seconds for one in out)
        assert 1e8 < link < 1e13, f"{link:.3g} bytes a second are no link"
        backward = [one for one in trace.slices if one.name == "backward"]
        assert backward, "backward is not shown"


SCENARIOS = scenarios_in(globals())
