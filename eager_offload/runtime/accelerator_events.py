"""Events of an accelerator, and the pool that their torch events come from."""

from __future__ import annotations

from collections import deque

import torch

from eager_offload.runtime.accelerator_api import AcceleratorApi
from eager_offload.tiers.finalizers import FinalizerRecord

__all__ = ["AcceleratorEvent", "EventPool"]


class AcceleratorEvent:
    """A point on a stream; equal to itself only. ``EventPool.record`` makes it.

    [Note: an event that was never recorded]
    To CUDA such an event is complete: waiting for it is a silent no-op and querying it says yes, so a missing record
    would pass for a finished copy. So there is none: an event comes into being by being recorded.
    """

    __slots__ = ("__weakref__", "_done", "_event", "began", "recorded_on")

    def __init__(self, event: torch.Event, stream: torch.Stream) -> None:
        stream.record_event(event)
        self._event = event
        self._done = False
        #: Before the copy that this one stands behind; both tell the time. ``None`` where no one asked for it.
        self.began: AcceleratorEvent | None = None
        #: Which names its device too.
        self.recorded_on = stream

    def wait_on(self, stream: torch.Stream) -> None:
        """Makes what is enqueued on ``stream`` from here on come after this event."""
        # A stream is in order by itself, and what is enqueued now comes after what is already over.
        if not self._done and stream != self.recorded_on:
            stream.wait_event(self._event)

    def seconds_until(self, other: AcceleratorEvent) -> float | None:
        """Device time from here to ``other``, both over, of one device, and made to tell the time.

        Returns:
            ``None`` where events of this kind of device do not tell it, or one is part of a graph that was captured.
        """
        try:
            return self._event.elapsed_time(other._event) / 1e3
        except RuntimeError:
            return None

    def query(self) -> bool:
        """Whether it is over; never blocks."""
        if not self._done:
            self._done = self._event.query()
        return self._done

    def synchronize(self) -> None:
        """Makes the host wait until it is over."""
        if not self._done:
            self._event.synchronize()
            self._done = True


class _EventRecord(FinalizerRecord[AcceleratorEvent]):
    """A weak reference to an event, and the event of torch's that is free when that is gone."""

    __slots__ = ("event",)
    event: torch.Event


class _Kind:
    """The events of torch's of one device that tell the time, or that do not."""

    __slots__ = ("free", "in_use")

    def __init__(self) -> None:
        self.in_use: set[_EventRecord] = set()
        #: Those whose event has gone. What waits for one already waits for the record that there was then.
        self.free: deque[_EventRecord] = deque()


class EventPool:
    """Torch's events are recorded again once the events that they stood for are gone. Thread-safe, without a lock."""

    def __init__(self, api: AcceleratorApi) -> None:
        self._api = api
        self._plain: dict[int, _Kind] = {}
        self._timed: dict[int, _Kind] = {}

    def record(self, stream: torch.Stream, *, timed: bool = False) -> AcceleratorEvent:
        """A new event behind all that is enqueued on ``stream``.

        Args:
            timed: whether it is to tell the time.
        """
        kinds, index = self._timed if timed else self._plain, stream.device_index
        kind = kinds.get(index)
        if kind is None:
            kind = kinds.setdefault(index, _Kind())
        try:
            gone = kind.free.pop()
            kind.in_use.discard(gone)
            event = gone.event
        except IndexError:
            event = self._api.event(stream.device, enable_timing=timed)
        recorded = AcceleratorEvent(event, stream)
        record = _EventRecord(recorded, kind.free.append)
        record.event = event
        kind.in_use.add(record)
        return recorded
