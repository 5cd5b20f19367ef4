"""Graph captures that are active in this process, how an accelerator begins and ends them, and its events.

Events belong here because an active capture forbids most calls on them.

[Note: workspaces]
torch keeps cuBLAS's workspace per stream, and a graph keeps the workspace's address. All captures of a device are on
one stream, so all its graphs and eager code on that stream would share a workspace of the warm-up. Replays on two
streams would then overwrite each other's sums, and in torch 2.13 the first graph that dies frees the workspace of the
others. So torch is made to forget its workspaces before a capture, which then allocates one in the graph's memory, and
again after the capture.
"""

from __future__ import annotations

import enum
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch

from eager_offload.errors import (
    CaptureInvalidatedError,
    CaptureStateError,
    GraphError,
    StaleEventError,
    UnjoinedStreamError,
)
from eager_offload.tiers.forking import FinalizerRecord
from eager_offload.torch_private import captures
from eager_offload.torch_private.calls import sanitizer

#: torch's id of a pool of device memory that graphs share.
MemoryPool = tuple[int, int]


class CaptureMode(enum.Enum):
    """The threads whose unsafe calls (waits, event queries, pinning) the driver refuses during a capture."""

    GLOBAL = "global"
    """Every thread of the process. torch's default."""
    THREAD_LOCAL = "thread_local"
    """The capturing thread. The default of this library: other threads need not know of the capture."""
    RELAXED = "relaxed"
    """No thread, except for calls on captured streams."""


class Capture:
    """One capture, which belongs to the thread that began it.

    Args:
        graph: torch's graph.
        stream: the stream on which the capture begins and ends.
        memory: the memory of other graphs to share; ``None`` for new memory.
    """

    def __init__(self, graph: Any, stream: torch.Stream, mode: CaptureMode, memory: MemoryPool | None) -> None:
        self.graph = graph
        self.stream = stream
        self.mode = mode
        self.memory = memory
        self.thread = threading.get_ident()
        #: The streams known to be captured. Others join the capture when they wait for an event of these.
        self.streams = {stream}
        self.is_over = False


class Captures:
    """The active captures that this library began. A capture by the program shows when the stream is queried."""

    def __init__(self) -> None:
        #: Replaced, never mutated: every operation on an event reads it, without a lock.
        self.under_way: tuple[Capture, ...] = ()

    def begin(self, capture: Capture) -> None:
        self.under_way = (*self.under_way, capture)

    def end(self, capture: Capture) -> None:
        capture.is_over = True
        self.under_way = tuple(one for one in self.under_way if one is not capture)

    def own(self) -> Capture | None:
        thread = threading.get_ident()
        return next((one for one in self.under_way if one.thread == thread), None)

    def forbid_queries(self) -> bool:
        """Returns whether the calling thread would invalidate a capture by querying an event, waiting or pinning."""
        thread = threading.get_ident()
        return any(one.thread == thread or one.mode is CaptureMode.GLOBAL for one in self.under_way)

    def of(self, stream: torch.Stream) -> Capture | None:
        for one in self.under_way:
            if stream in one.streams:
                return one
        for one in self.under_way:  # at most one per device
            if one.stream.device == stream.device and captures.stream_is_capturing(stream):
                one.streams.add(stream)
                return one
        return None


CAPTURES = Captures()


class AcceleratorCaptures:
    """Begins and ends captures, without torch's context managers: these leave the wrong stream current on an error.

    Args:
        waiting: a context around a wait for a device (by index), which marks the earlier events as completed.
        poll: releases objects of completed work (e.g. a graph that was dropped while it ran).
    """

    def __init__(self, waiting: Callable[[int], AbstractContextManager[None]], poll: Callable[[], None]) -> None:
        self._waiting, self._poll = waiting, poll
        self._lock = threading.Lock()
        #: The streams to restore: the current stream of the capture's device, and that of the current device.
        self._before: dict[Capture, tuple[torch.Stream, torch.Stream]] = {}

    def begin(self, stream: torch.Stream, mode: CaptureMode, memory: MemoryPool | None, *, keep: bool) -> Capture:
        """Begins to capture the work on ``stream`` into a graph, and makes ``stream`` current.

        The host waits for the device first. So during the capture, every earlier event is known to have completed
        without a query of the driver; an event recorded inside has not, and only streams may wait for it.

        Args:
            stream: not the default stream.
            memory: the memory of other graphs to share.
            keep: whether the graph will be inspected.

        Raises:
            CaptureStateError: the calling thread captures already, or another capture would be disturbed.
        """
        accelerator, device = torch.accelerator, stream.device
        with self._lock:
            if CAPTURES.own() is not None or captures.is_capturing(None) or captures.is_capturing(stream.device_index):
                raise CaptureStateError("a capture was begun inside of another one: end that first")
            for other in CAPTURES.under_way:
                if other.mode is CaptureMode.GLOBAL or other.stream.device == device:
                    raise CaptureStateError(
                        f"a capture was begun on {device} while another thread captures on {other.stream.device}, mode "
                        f"{other.mode.value!r}: the host waits for the device first, which would invalidate that one"
                    )
            # All earlier events have completed then, and need no query during the capture.
            with self._waiting(device.index):
                accelerator.synchronize(device.index)
            self._poll()  # before the capture, which forbids it; and freed memory serves the capture
            captures.forget_workspaces()
            accelerator.empty_cache()  # the graph allocates in its own pool
            graph, memory = captures.new_graph(keep), captures.graph_memory_pool() if memory is None else memory
            before = accelerator.current_stream(device.index), accelerator.current_stream()
            accelerator.set_stream(stream)
            try:
                captures.begin_graph(graph, memory, mode.value)
            except BaseException as error:
                captures.release_failed_graph(graph, device.index, memory, ended=False)
                self._select(before)
                if isinstance(error, RuntimeError):
                    raise CaptureStateError(f"no capture can begin on {stream}: {error}") from error
                raise
            capture = Capture(graph, stream, mode, memory)
            self._before[capture] = before
            CAPTURES.begin(capture)
            return capture

    def end(self, capture: Capture) -> None:
        """Ends ``capture``, whose graph can be replayed from here on, and restores the current stream.

        Raises:
            CaptureInvalidatedError, UnjoinedStreamError: there is no graph. Its memory was freed.
            CaptureStateError: the capture is over, or another thread's.
        """
        self._check_may_end(capture)
        try:
            self._end_graph(capture)
        except RuntimeError as error:
            self._drop(capture)
            raise _named(error) from error
        finally:
            self._finish(capture)
        if capture.memory is None:
            capture.memory = capture.graph.pool()

    def abandon(self, capture: Capture) -> None:
        """Ends ``capture`` after an error, without a graph, and suppresses the driver's error."""
        self._check_may_end(capture)
        try:
            self._end_graph(capture)
        except RuntimeError:  # follows from the error that the caller has
            self._drop(capture)
        else:
            capture.graph.reset()
        finally:
            self._finish(capture)

    def _check_may_end(self, capture: Capture) -> None:
        if capture.is_over:
            raise CaptureStateError("a capture was ended that is over")
        if capture.thread != threading.get_ident():
            raise CaptureStateError("a capture was ended by another thread than has begun it")

    def _end_graph(self, capture: Capture) -> None:
        # See [Note: workspaces]: forget before the graph frees its memory, which may contain workspaces.
        torch.accelerator.set_stream(capture.stream)
        try:
            capture.graph.capture_end()
        finally:
            captures.forget_workspaces()

    def _drop(self, capture: Capture) -> None:
        # No further capture may use this memory: up to 2.12, torch's allocator of pinned memory takes it for the
        # memory of an active capture, and refuses to share it.
        captures.release_failed_graph(capture.graph, capture.stream.device_index, capture.memory, ended=True)
        capture.memory = None

    def _finish(self, capture: Capture) -> None:
        CAPTURES.end(capture)
        self._select(self._before.pop(capture))

    def _select(self, streams: tuple[torch.Stream, torch.Stream]) -> None:
        of_capture, selected = streams
        torch.accelerator.set_stream(of_capture)
        if selected.device != of_capture.device:
            torch.accelerator.set_stream(selected)


def _named(error: RuntimeError) -> GraphError:
    text = str(error)
    if "unjoined" in text or "has not joined" in text:
        return UnjoinedStreamError(
            "a stream waited for an event of the capture, and the stream on which that began does not come after its "
            f"work: have it wait for that stream before the capture ends. The driver says: {text}"
        )
    return CaptureInvalidatedError(
        "a call that is not permitted in a capture has invalidated it (e.g. one that makes the host wait). The first "
        f"error raised inside of the capture names the call. The driver says: {text}"
    )


class AcceleratorEvent:
    """A point on a stream, compared by identity. ``EventPool.record`` makes it.

    [Note: events are recorded when made]
    CUDA reports an event that was never recorded as complete: waiting for it is a silent no-op, so a missing record
    would look like a finished copy. So no event exists without a record.
    """

    __slots__ = ("__weakref__", "_done", "_event", "began", "recorded_on")

    def __init__(self, event: torch.Event, stream: torch.Stream) -> None:
        stream.record_event(event)
        self._event = event
        self._done = False
        #: Recorded before the timed copy that this event follows; ``None`` if the copy is not timed.
        self.began: AcceleratorEvent | None = None
        self.recorded_on = stream

    def wait_on(self, stream: torch.Stream) -> None:
        # A stream needs no wait for its own events, nor for completed ones.
        if not self._done and stream != self.recorded_on:
            if CAPTURES.under_way and CAPTURES.of(stream) is not None:
                raise CaptureStateError(
                    "in a capture, a stream was told to wait for an event that was recorded outside of it after it had "
                    "begun, which no replay can do. Work from before the capture needs no wait"
                )
            stream.wait_event(self._event)

    def seconds_until(self, other: AcceleratorEvent) -> float:
        """Returns the device time until ``other`` in seconds (both timed and completed); 0 if the device has none."""
        try:
            return self._event.elapsed_time(other._event) / 1e3
        except RuntimeError:
            return 0.0

    def tells_time(self) -> bool:
        """Returns whether timed events of this kind of device measure time. This event has completed."""
        try:
            self._event.elapsed_time(self._event)
        except RuntimeError:
            return False
        return True

    def query(self) -> bool:
        """Returns whether the event has completed, as far as known if a capture forbids queries; never blocks."""
        if not self._done and not (CAPTURES.under_way and CAPTURES.forbid_queries()) and self._event.query():
            self._done = True
            if sanitizer() is not None:  # torch's sanitizer learns of a host's wait, but not of a query
                self._event.synchronize()
        return self._done

    def synchronize(self) -> None:
        if not self._done:
            if CAPTURES.under_way and CAPTURES.forbid_queries():
                raise _no_wait()
            self._event.synchronize()
            self._done = True

    def note_over(self) -> None:
        """Marks the event as completed: the host has waited for the whole device since the record."""
        self._done = True


class CapturedEvent(AcceleratorEvent):
    """A point on a captured stream: a place in the graph, without a time."""

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
    return CaptureStateError("the host was to wait for a device in a capture, but nothing runs before a replay")


class _EventRecord(FinalizerRecord[AcceleratorEvent]):
    __slots__ = ("event",)
    event: torch.Event


class _Kind:
    __slots__ = ("free", "in_use")

    def __init__(self) -> None:
        self.in_use: set[_EventRecord] = set()
        #: Records whose event has died. Earlier waits for one of these are waits for its previous record.
        self.free: deque[_EventRecord] = deque()


class EventPool:
    """Reuses torch's events once the objects that stood for them have died. Thread-safe, without a lock."""

    def __init__(self) -> None:
        self._plain: dict[int, _Kind] = {}
        self._timed: dict[int, _Kind] = {}

    def record(self, stream: torch.Stream, *, timed: bool = False) -> AcceleratorEvent:
        """Returns a new event after all work enqueued on ``stream``; ``timed`` events measure time."""
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
        kinds = [kind for kind in (self._plain.get(index), self._timed.get(index)) if kind is not None]
        found = [record() for kind in kinds for record in list(kind.in_use)]
        return [event for event in found if event is not None]

    @contextmanager
    def waiting(self, index: int) -> Iterator[None]:
        """Marks the events that existed before a wait for a whole device as completed after the wait."""
        before = self.of(index)
        yield
        for event in before:
            event.note_over()
