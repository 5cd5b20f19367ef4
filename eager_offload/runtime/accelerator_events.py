"""Events of an accelerator, and the pool that their torch events come from."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from eager_offload.errors import CaptureStateError, StaleEventError
from eager_offload.runtime.captures import CAPTURES, Capture
from eager_offload.tiers.forking import FinalizerRecord
from eager_offload.torch_private.calls import sanitizer


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
        #: Before the copy that this one stands behind; both tell the time. ``None`` where the copy is not timed.
        self.began: AcceleratorEvent | None = None
        #: Which names its device too.
        self.recorded_on = stream

    def wait_on(self, stream: torch.Stream) -> None:
        """Makes what is enqueued on ``stream`` from here on come after this event."""
        # A stream is in order by itself, and what is enqueued now comes after what is already over.
        if not self._done and stream != self.recorded_on:
            if CAPTURES.under_way and CAPTURES.of(stream) is not None:
                raise CaptureStateError(
                    "in a capture, a stream was told to wait for an event that was recorded outside of it after it had "
                    "begun: no replay could. What came before the capture is over"
                )
            stream.wait_event(self._event)

    def seconds_until(self, other: AcceleratorEvent) -> float:
        """Device time from here to ``other``, both over, of one device, and made to tell the time; 0 if they do not."""
        try:
            return self._event.elapsed_time(other._event) / 1e3
        except RuntimeError:
            return 0.0

    def tells_time(self) -> bool:
        """Whether events of this kind of device, of which this one is over, tell the time if they are made to."""
        try:
            self._event.elapsed_time(self._event)
        except RuntimeError:
            return False
        return True

    def query(self) -> bool:
        """Whether it is over, as far as is known where a capture forbids to ask the driver; never blocks."""
        if not self._done and not (CAPTURES.under_way and CAPTURES.forbid_queries()) and self._event.query():
            self._done = True
            if sanitizer() is not None:  # torch tells it what the host has waited for, and not what it was told
                self._event.synchronize()
        return self._done

    def synchronize(self) -> None:
        """Makes the host wait until it is over."""
        if not self._done:
            if CAPTURES.under_way and CAPTURES.forbid_queries():
                raise _no_wait()
            self._event.synchronize()
            self._done = True

    def note_over(self) -> None:
        """The host has waited for the whole device since this was recorded."""
        self._done = True


class CapturedEvent(AcceleratorEvent):
    """A point on a stream that is being captured: a place in the graph, to which no moment belongs."""

    __slots__ = ("_capture",)

    def __init__(self, event: torch.Event, stream: torch.Stream, capture: Capture) -> None:
        super().__init__(event, stream)
        self._capture = capture

    def wait_on(self, stream: torch.Stream) -> None:
        self._check("a stream was told to wait for")
        if stream == self.recorded_on:
            return
        if CAPTURES.of(stream) not in (self._capture, None):
            raise StaleEventError("a stream that is captured was told to wait for an event of another capture")
        stream.wait_event(self._event)
        self._capture.streams.add(stream)

    def query(self) -> bool:
        self._check("the host asked about")
        return False

    def synchronize(self) -> None:
        self._check("the host waited for")
        raise _no_wait()

    def _check(self, what: str) -> None:
        if self._capture.is_over:
            raise StaleEventError(f"{what} an event that was recorded in a capture, which is over")


def _no_wait() -> CaptureStateError:
    if CAPTURES.own() is None:
        return CaptureStateError(
            "the host was to wait for a device while another thread captures in mode 'global', in which no thread may: "
            "with 'thread_local', the default, others may"
        )
    return CaptureStateError("the host was to wait for a device in a capture, where nothing runs before a replay")


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

    def __init__(self) -> None:
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
            event = torch.Event(device=stream.device, enable_timing=timed)
        capture = CAPTURES.of(stream) if CAPTURES.under_way else None
        recorded = AcceleratorEvent(event, stream) if capture is None else CapturedEvent(event, stream, capture)
        record = _EventRecord(recorded, kind.free.append)
        record.event = event
        kind.in_use.add(record)
        return recorded

    def of(self, index: int) -> list[AcceleratorEvent]:
        """Returns those of a device that are in use now."""
        kinds = [kind for kind in (self._plain.get(index), self._timed.get(index)) if kind is not None]
        found = [record() for kind in kinds for record in list(kind.in_use)]
        return [event for event in found if event is not None]

    @contextmanager
    def waiting(self, index: int) -> Iterator[None]:
        """Is around a wait for a whole device: events of before, and no others, are known to be over afterwards."""
        before = self.of(index)
        yield
        for event in before:
            event.note_over()
