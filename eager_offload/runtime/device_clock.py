"""When something ran on an accelerator, on the host's clock: by events that tell the time."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import NamedTuple, TypeAlias

import torch

from eager_offload.runtime.accelerator_events import AcceleratorEvent

#: Makes an event that tells the time, records it on a stream, and gives it back.
_Record: TypeAlias = Callable[[torch.Stream], AcceleratorEvent]


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
    """The clocks of all devices of a runtime, while a caller wants to know times.

    Args:
        record: see ``_Record``.
    """

    def __init__(self, record: _Record) -> None:
        self._record = record
        self._lock = threading.Lock()
        #: How many want to know times, by device.
        self.users: dict[torch.device, int] = {}
        self._origins: dict[torch.device, _Origin] = {}

    def is_running(self, device: torch.device) -> bool:
        """Whether a caller wants to know times of ``device``, and its events tell them."""
        return device in self.users and device in self._origins

    def start(self, stream: torch.Stream) -> None:
        """Reads both clocks of the device of ``stream``; the host waits for that stream. Pairs with ``stop``."""
        device = stream.device
        with self._lock:
            self.users[device] = self.users.get(device, 0) + 1
            if self.users[device] > 1:
                return
            self._origins.pop(device, None)
            event = self._record(stream)
            event.synchronize()
            now = time.perf_counter()
            if event.seconds_until(event) is not None:  # else its events have no times
                self._origins[device] = _Origin(event, now)

    def stop(self, device: torch.device) -> None:
        """The caller of ``start`` wants to know no more, but for what was measured already."""
        with self._lock:
            self.users[device] -= 1
            if not self.users[device]:
                del self.users[device]

    def mark(self, stream: torch.Stream) -> DeviceMark:
        """This moment of ``stream``."""
        enqueued = time.perf_counter()
        return DeviceMark(self._record(stream) if self.is_running(stream.device) else None, enqueued)

    def time_of(self, mark: DeviceMark) -> float:
        """Seconds on the host's clock; the host waits until the moment has come."""
        seconds = None if mark.event is None else self.seconds_of(mark.event)
        return mark.enqueued if seconds is None else seconds

    def seconds_of(self, event: AcceleratorEvent) -> float | None:
        """When ``event`` was over, on the host's clock; ``None`` where that cannot be told. The host waits for it."""
        assert event.recorded_on is not None
        origin = self._origins.get(event.recorded_on.device)
        if origin is None:
            return None
        try:
            event.synchronize()
        except RuntimeError:  # it was recorded into a graph that is captured, and is no moment
            return None
        since = origin.event.seconds_until(event)
        return None if since is None else origin.seconds + since
