"""The recording double with a runtime that computes on it, and small helpers for the tests that use it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from eager_offload.runtime.accelerator import AcceleratorRuntime
from eager_offload.tiers.arena import Arena, HostSlot
from eager_offload.tiers.host import HostTier
from tests.doubles.recording_accelerator import RecordingAccelerator

DEVICE = torch.device("cuda", 0)
SECOND = torch.device("cuda", 1)
#: Small enough for torch to use one thread.
NBYTES = 1 << 14


class DoubleMachine:
    """The double, its runtime, and a user who computes on it."""

    def __init__(self) -> None:
        self.double = RecordingAccelerator()
        self.runtime = AcceleratorRuntime(self.double)

    @property
    def compute(self) -> torch.Stream:
        return self.runtime.current_stream(DEVICE)

    @contextmanager
    def selected(self, stream: torch.Stream) -> Iterator[None]:
        """The user computes on ``stream`` inside."""
        before = self.double.current_stream(stream.device)
        self.double.set_stream(stream)
        try:
            yield
        finally:
            self.double.set_stream(before)

    def empty(self, nbytes: int, stream: torch.Stream) -> Tensor:
        """The user allocates on ``stream``."""
        with self.selected(stream):
            return self.double.empty(nbytes, DEVICE)

    def launch(self, stream: torch.Stream, kernel: Callable[..., object], *args: Tensor, what: str) -> None:
        """The user enqueues a kernel that writes its first argument and reads the others."""
        self.double.launch(stream, kernel, *args, what=what)

    def finish(self) -> None:
        """The host waits for everything."""
        self.double.run_all()


def pattern(nbytes: int, seed: int) -> Tensor:
    return ((torch.arange(nbytes) * (2 * seed + 1) + seed) % 251).to(torch.uint8)


def host_slot(runtime: AcceleratorRuntime, nbytes: int) -> HostSlot:
    slot = HostTier(Arena(runtime.host_buffer), budget=1 << 30).reserve(nbytes)
    assert slot is not None
    return slot


def selection(double: RecordingAccelerator) -> list[object]:
    """What the calling thread has selected."""
    streams = [double.current_stream(device) for device in (DEVICE, SECOND)]
    return [double.current_device_index(), *streams]
