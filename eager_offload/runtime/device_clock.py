"""When something ran on an accelerator, on the host's clock: by events that tell the time."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import NamedTuple, TypeAlias

import torch

from eager_offload.runtime.accelerator_streams import AcceleratorEvent, AcceleratorStream

__all__ = ["DeviceClocks", "DeviceMark"]

#: Makes an event that tells the time, records it on a stream, and gives it back.
_Record: TypeAlias = Callable[[AcceleratorStream], AcceleratorEvent]


class DeviceMark(NamedTuple):
    """A moment of a stream, and when the host enqueued it, for devices whose events do not tell the time."""

    event: AcceleratorEvent | None
    enqueued: float


class _Origin(NamedTuple):
    """One moment on both clocks."""

    event: AcceleratorEvent
    #: Of the host's clock.
    seconds: float


class DeviceClocks:
    """The clocks of all devices of a runtime, while somebody wants to know times.

    Args:
        record: see ``_Record``.
    """

    def __init__(self, record: _Record) -> None:
        self._record = record
        self._lock = threading.Lock()
        self._users: dict[torch.device, int] = {}
        self._origins: dict[torch.device, _Origin] = {}

    def is_running(self, device: torch.device) -> bool:
        """Whether anybody wants to know times of ``device``, and its events tell them."""
        return device in self._users and device in self._origins

    def start(self, stream: AcceleratorStream) -> None:
        """Reads both clocks of the device of ``stream``; the host waits for that stream. Pairs with ``stop``."""
        device = stream.device
        with self._lock:
            self._users[device] = self._users.get(device, 0) + 1
            if self._users[device] > 1:
                return
            self._origins.pop(device, None)
            try:
                first, second = self._record(stream), self._record(stream)
                second.synchronize()
                now = time.perf_counter()
                first.seconds_until(second)
            except RuntimeError:  # events of this kind of device do not tell the time
                return
            self._origins[device] = _Origin(second, now)

    def stop(self, device: torch.device) -> None:
        """Nobody wants to know any more, but for what was measured already."""
        with self._lock:
            self._users[device] -= 1
            if not self._users[device]:
                del self._users[device]

    def mark(self, stream: AcceleratorStream) -> DeviceMark:
        """This moment of ``stream``."""
        enqueued = time.perf_counter()
        return DeviceMark(self._record(stream) if self.is_running(stream.device) else None, enqueued)

    def time_of(self, mark: DeviceMark) -> float:
        """Seconds on the host's clock; the host waits until the moment has come."""
        seconds = None if mark.event is None else self.seconds_of(mark.event)
        return mark.enqueued if seconds is None else seconds

    def seconds_of(self, event: AcceleratorEvent) -> float | None:
        """When ``event`` was over, on the host's clock; ``None`` where nobody can tell. The host waits for it."""
        assert event.recorded_on is not None
        origin = self._origins.get(event.recorded_on.device)
        if origin is None:
            return None
        try:
            event.synchronize()
            return origin.seconds + origin.event.seconds_until(event)
        except RuntimeError:  # it was recorded into a graph that is captured, and is no moment
            return None
