"""The recording double as a machine for scenarios, and small helpers for the tests that use it."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import torch
from torch import Tensor

from eager_offload.runtime.accelerator import AcceleratorRuntime
from eager_offload.simulation.checker import Checker
from eager_offload.simulation.log import LoggedRuntime
from eager_offload.tiers.arena import Arena, HostSlot
from eager_offload.tiers.host import HostTier
from tests.doubles.recording_accelerator import RecordingAccelerator
from tests.runtime.accelerator_scenarios import Machine

DEVICE = torch.device("cuda", 0)
SECOND = torch.device("cuda", 1)
#: Small enough for torch to use one thread.
NBYTES = 1 << 14


class LoggedAccelerator(LoggedRuntime, AcceleratorRuntime):
    """The runtime, with a log of what it is asked to do."""


class DoubleMachine(Machine):
    """The double as a machine for scenarios, watched by the checker.

    Args:
        order: which of the orders in which streams may overtake each other.
    """

    nbytes = NBYTES

    def __init__(self, order: int = 0) -> None:
        self.double = RecordingAccelerator()
        self.checker = Checker()
        runtime = LoggedAccelerator(self.double)
        runtime.attach(self.checker, self.double)
        self.double.log = self.checker
        super().__init__(runtime, DEVICE, self.double)
        self._order = order
        self._streams = [self.compute, self.out, self.back]

    def side_stream(self) -> torch.Stream:
        stream = self.double.stream(DEVICE)
        self._streams.append(stream)
        return stream

    def empty(self, nbytes: int, stream: torch.Stream) -> Tensor:
        with self.selected(stream):
            tensor = self.double.empty(nbytes, DEVICE)
        self.double.allocated(tensor, stream, "the user's tensor")
        return tensor

    def launch(self, stream: torch.Stream, kernel: Callable[..., object], *args: Tensor, what: str) -> None:
        self.double.launch(stream, kernel, *args, what=what)

    def delay(self, stream: torch.Stream) -> None:
        """Nothing: whichever stream ``order`` puts last is late."""

    def finish(self) -> None:
        orders = list(itertools.permutations(self._streams))
        self.double.run_all(first=orders[self._order % len(orders)])


def host_slot(runtime: AcceleratorRuntime, nbytes: int) -> HostSlot:
    slot = HostTier(Arena(runtime.host_buffer), budget=1 << 30).reserve(nbytes)
    assert slot is not None
    return slot


def selection(double: RecordingAccelerator) -> list[object]:
    """What the calling thread has selected."""
    streams = [double.current_stream(device) for device in (DEVICE, SECOND)]
    return [double.current_device_index(), *streams]
