"""Captures of graphs that are under way in this process, what they forbid meanwhile, and how an accelerator captures:
begin, end, and what is put right after a capture that failed. And the events of an accelerator, which have to know.

[Note: workspaces]
torch keeps the memory that cuBLAS works in, for each stream, and a graph keeps its address. Captures of a device are on
one stream, so a workspace of the warm-up would be that of all its graphs and of eager code there: replays on two
streams would write over each other's sums, and in torch 2.13 the first graph that goes takes it from the others. So
torch forgets workspaces before a capture, which then has its own in the memory of the graph, and behind it.
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

#: How torch names device memory that graphs share.
MemoryPool = tuple[int, int]


class CaptureMode(enum.Enum):
    """Whose calls a driver refuses that it calls unsafe (to wait, to ask about an event, to pin) during a capture."""

    GLOBAL = "global"
    """Every thread of the process. torch's default."""
    THREAD_LOCAL = "thread_local"
    """The thread that captures. The default here: other threads need not know of the capture."""
    RELAXED = "relaxed"
    """No thread, but for calls about the streams that are captured."""


class Capture:
    """A capture, from its begin on; it is of the thread that has begun it.

    Args:
        graph: torch's, which it ends in.
        stream: on which it begins and ends.
        memory: of other graphs, which it is to share; ``None`` for its own.
    """

    def __init__(self, graph: Any, stream: torch.Stream, mode: CaptureMode, memory: MemoryPool | None) -> None:
        self.graph = graph
        self.stream = stream
        self.mode = mode
        self.memory = memory
        self.thread = threading.get_ident()
        #: The streams that are known to be captured: others come in by waiting for an event of these.
        self.streams = {stream}
        self.is_over = False


class Captures:
    """Those that this library has begun. One of the program's own is noticed by asking the stream."""

    def __init__(self) -> None:
        #: Replaced, never changed: read without a lock, and by everything that is about an event.
        self.under_way: tuple[Capture, ...] = ()

    def begin(self, capture: Capture) -> None:
        self.under_way = (*self.under_way, capture)

    def end(self, capture: Capture) -> None:
        capture.is_over = True
        self.under_way = tuple(one for one in self.under_way if one is not capture)

    def own(self) -> Capture | None:
        """That of the calling thread."""
        thread = threading.get_ident()
        return next((one for one in self.under_way if one.thread == thread), None)

    def forbid_queries(self) -> bool:
        """Whether the calling thread would invalidate a capture by asking the driver about an event.

        By waiting for one, pinning or unpinning it would as well.
        """
        thread = threading.get_ident()
        return any(one.thread == thread or one.mode is CaptureMode.GLOBAL for one in self.under_way)

    def of(self, stream: torch.Stream) -> Capture | None:
        """That which ``stream`` is captured in."""
        for one in self.under_way:
            if stream in one.streams:
                return one
        for one in self.under_way:  # there is one for each device at most
            if one.stream.device == stream.device and captures.stream_is_capturing(stream):
                one.streams.add(stream)
                return one
        return None


#: Of this process, as drivers see it.
CAPTURES = Captures()


class AcceleratorCaptures:
    """Begins and ends captures. torch's own context managers are left alone: where the end of a capture raises, their
    exit leaves the stream of the capture selected.

    Args:
        waiting: with the index of a device, is around a wait for it: its events of before are over afterwards.
        poll: lets go of what is over, such as a graph that has gone while it ran.
    """

    def __init__(self, waiting: Callable[[int], AbstractContextManager[None]], poll: Callable[[], None]) -> None:
        self._waiting, self._poll = waiting, poll
        self._lock = threading.Lock()
        #: What the capturing thread had selected: the stream of the capture's device, and that of the selected device.
        self._before: dict[Capture, tuple[torch.Stream, torch.Stream]] = {}

    def begin(self, stream: torch.Stream, mode: CaptureMode, memory: MemoryPool | None, *, keep: bool) -> Capture:
        """What is enqueued on ``stream`` becomes a part of a graph, until the capture ends; the stream is selected.

        The host waits for the device first. So, during the capture, an event of before is over, and no driver is asked
        about it; an event that is recorded inside of it is not over, and may be waited for by streams only.

        Args:
            stream: not the default one.
            memory: of other graphs, which this one is to share.
            keep: whether the graph is to be looked at.

        Raises:
            CaptureStateError: the calling thread captures, or another one in whose way this would be.
        """
        accelerator, device = torch.accelerator, stream.device
        with self._lock:
            if CAPTURES.own() is not None or captures.is_capturing(None) or captures.is_capturing(stream.device_index):
                raise CaptureStateError("a capture was begun inside of another one: what would a replay of it begin?")
            for other in CAPTURES.under_way:
                if other.mode is CaptureMode.GLOBAL or other.stream.device == device:
                    raise CaptureStateError(
                        f"a capture was begun on {device} while another thread captures on {other.stream.device}, mode "
                        f"{other.mode.value!r}: the host waits for the device first, which would invalidate that one"
                    )
            # Every event that there is is over then, and need not be queried during the capture.
            with self._waiting(device.index):
                accelerator.synchronize(device.index)
            self._poll()  # not in the capture; and the memory that this gives back is for it
            captures.forget_workspaces()
            accelerator.empty_cache()  # a graph allocates its own
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
        """The graph of ``capture`` can be replayed from here on. The stream that was selected is selected again.

        Raises:
            CaptureInvalidatedError, UnjoinedStreamError: there is no graph. What it had is given back.
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
        """Ends ``capture`` after an error, without a graph, and hides what the driver has to say of that."""
        self._check_may_end(capture)
        try:
            self._end_graph(capture)
        except RuntimeError:  # the caller has an error of its own, which is what this one comes of
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
        """See [Note: workspaces]; before the graph gives its memory back, of which they may be."""
        torch.accelerator.set_stream(capture.stream)
        try:
            capture.graph.capture_end()
        finally:
            captures.forget_workspaces()

    def _drop(self, capture: Capture) -> None:
        """Nothing is captured into the memory of ``capture`` any more: to 2.12 torch refuses to share it from here on,
        since its allocator of pinned memory goes on to take it for that of a capture that is under way."""
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
        "a call that is not permitted in a capture has invalidated it, such as one that has the host wait. What raised "
        f"first, inside of the capture, says which. The driver says: {text}"
    )


# -- events -----------------------------------------------------------------------------------------------------------


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
