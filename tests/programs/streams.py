"""Streams that change between forward and backward: two of the simulated device, elsewhere two threads."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from tests.programs import Flag, Run, leaf, program
from tests.programs.parts.blocks import Step
from tests.programs.parts.functions import custom
from tests.simulation.observer import OperatorObserver
from tests.simulation.simulated import SimulatedRuntime, SimulatedStream
from tests.threads import on_a_thread

_SIDE = 32


class Streams:
    """A first and a second stream, and work that is moved from one to the other."""

    def __init__(self) -> None:
        self.simulated = simulated_device()
        self._second = SimulatedStream("side")

    @property
    def are_threads(self) -> bool:
        return self.simulated is None

    def run(self, work: Callable[[], object], *, aside: bool) -> None:
        """Runs ``work`` on the first or on the second stream, in order with everything before and after it."""
        if aside and self.are_threads:
            in_a_thread(work)
        else:
            with self.aside() if aside else nullcontext():
                work()

    @contextmanager
    def aside(self) -> Any:
        """The second stream of a simulated device is current."""
        assert self.simulated is not None
        self.meet()
        with self.simulated.stream(self._second):
            yield
        self.meet()

    def meet(self) -> None:
        """What a program does that changes streams: each waits for the other."""
        if self.simulated is not None:
            first, second = self.simulated.default_stream, self._second
            done = self.simulated.record(first), self.simulated.record(second)
            self.simulated.wait(first, done[1])
            self.simulated.wait(second, done[0])


def simulated_device() -> SimulatedRuntime | None:
    """The device that is simulated here, if one is: its observer sees every operator of this thread."""
    modes = _get_current_dispatch_mode_stack()  # type: ignore[no-untyped-call]
    return next((mode.runtime for mode in modes if isinstance(mode, OperatorObserver)), None)


def in_a_thread(work: Callable[[], object]) -> None:
    """Runs ``work`` on a thread of its own, which computes as this one does."""
    on_a_thread(computing_alike(work))


def computing_alike(work: Callable[[], object]) -> Callable[[], object]:
    """``work`` for another thread, with the device, the observer and the number of cores that this one has."""
    threads, device, simulated = torch.get_num_threads(), torch.get_default_device(), simulated_device()

    def run() -> object:
        # OpenMP has a number for each thread, and torch's own reaches a new one late: a first operator, such as
        # linear, may be split among all cores, and its sums have other bits.
        torch.set_num_threads(threads)
        around: AbstractContextManager[object] = nullcontext() if simulated is None else simulated.watching()
        with device if device.type != "cpu" else nullcontext(), around:
            return work()

    return run


def _moves(name: str, forward: bool, backward: bool) -> None:
    @program(name, Flag.EAGER)
    def _(run: Run) -> object:
        streams, results = Streams(), []
        for seed in range(3):
            step = Step(seed)
            streams.run(lambda step=step: step.forward(run.around), aside=forward)
            # On a device autograd runs a node on the stream of its forward, wherever backward was called.
            streams.run(step.backward, aside=backward if streams.are_threads else forward)
            results.append(step.result)
            streams.meet()
        return results


_moves("H14-all-on-another-stream", forward=True, backward=True)
_moves("H14-forward-on-another-stream", forward=True, backward=False)
_moves("H14-backward-on-another-stream", forward=False, backward=True)


def reading_on(x: Tensor, h: Tensor, streams: Streams, places: Sequence[bool]) -> Tensor:
    """A product whose backward reads what it saved once for each of ``places``: on the first stream, or aside."""

    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        read: list[Tensor] = []
        for aside in places:
            streams.run(lambda: read.append(gradient * ctx.saved_tensors[0]), aside=aside)
        for other in read[1:]:
            assert torch.equal(read[0], other)
        result = read[0].clone()
        streams.meet()
        return result

    return custom(x, backward, h, forward=lambda x: x * h)


def _reads(name: str, *steps: Sequence[bool], strides: Sequence[int] = (1, 8), flags: Sequence[Flag] = ()) -> None:
    """Adds a program of a step for each of ``steps``; a view with holes, of stride 8, is packed."""

    @program(name, Flag.EAGER, *flags)
    def _(run: Run) -> object:
        results = []
        for number, places in enumerate(steps):
            streams, x = Streams(), leaf(_SIDE, _SIDE, seed=number)
            with run.around:
                y = (x * 2).tanh()
                for seed, stride in enumerate([*strides, *strides]):
                    h = (leaf(_SIDE, _SIDE * stride, seed=seed, grad=False) * 1)[:, ::stride]
                    y = reading_on(y, h, streams, places).sin()
                    del h
            y.sum().backward()
            del y
            streams.meet()
            results.append(x.grad)
        return results


_reads("H14-read-on-another-stream", [True])
_reads("H14-read-here-and-on-another-stream", [False, True])
_reads("H14-read-on-another-stream-and-here", [True, False])
_reads("H14-read-here-and-there-in-turn", [True, True, False, True])
# What a table brings back is ordered for the stream of its forward.
_ALIKE = [[False], [False], [False], [True], [False], [False, True], [False]]
_reads("H14-steps-alike-but-for-the-stream", *_ALIKE, strides=[1])
