"""The transfers of a step of which a graph is captured, and of the real steps before that.

    pack      the window has room          -> the copy out waits here, behind an event that is recorded at once
              it has none                  -> the oldest copy is enqueued, compute waits for it, and its source goes
    unpack    the source is still there    -> it is served, and its copy is never enqueued
              it has gone                  -> a copy back, as in any step
    and       the oldest copy that backward does not expect soon is enqueued, and its source goes: one for each unpack
    the end   both streams of copies join

[Note: copies of a graph]
In a graph no event is ever over, so a source goes once compute has waited for its copy. When the host enqueues a copy
says nothing of when that runs in a replay: the events that it waits for do. So a copy is enqueued where its source has
to go, behind the event that was recorded when it was due, and has all the time in between; one whose bytes are asked
for before is left out of the graph.

The last real step before the capture does the same, with the host in place of compute: which bytes leave, and when,
follows from the saves and the settings, and from nothing that is measured. It writes down each copy, and the capture is
held to that. So the slots of the graph are parts of one slab, which is laid out beforehand.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from contextlib import suppress
from copy import copy
from dataclasses import dataclass, field
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from eager_offload.engine.offloader import DeviceOffloader
from eager_offload.engine.transfer import CountedBytes, Transfer
from eager_offload.engine.transfers import ReservedSlot, Shortage
from eager_offload.errors import CaptureStateError, OffloadError, ScheduleMismatchError, reentered
from eager_offload.runtime.accelerator import AcceleratorRuntime
from eager_offload.runtime.base import ALIGNMENT, Direction, Event, Layout, Stream
from eager_offload.stats import KeepReason
from eager_offload.tiers.base import Fence, Range, Ranges, Slab, Slot
from eager_offload.tiers.memory import view_of


class CapturedCopy(NamedTuple):
    """One copy, by the key of the storage whose bytes it moves."""

    key: int
    is_back: bool
    nbytes: int


@dataclass
class CopyLog:
    """The copies of one step, in the order in which they were enqueued, and what was found for what was to leave."""

    copies: list[CapturedCopy] = field(default_factory=list)
    #: Of each storage that was to leave, whether a tier had room.
    found: list[bool] = field(default_factory=list)


class _InAGraph:
    """Judges uses of places by number of copy: of a graph nothing is over while it is laid out."""

    def query(self, event: object) -> bool:
        return False


def lay_out(copies: Sequence[CapturedCopy]) -> tuple[dict[int, tuple[int, int]], int]:
    """Returns a layout in which storages share a place whose copies back and out come one after the other.

    By key of storage: where it is in the slab, and the last copy back of those that had the place before, by number of
    copy, -1 for none; and the bytes of the slab.

    Each storage has its place from its copy out to its last copy back. Places are cut as any tier's slots are: see
    [Note: which bytes a request gets].
    """
    last_back = {one.key: number for number, one in enumerate(copies) if one.is_back}
    ends, judge = set(last_back.values()), _InAGraph()
    slab, ranges, places = Slab(0), Ranges[Slab](), dict[int, tuple[int, int]]()
    ending: list[tuple[int, int, Range[Slab]]] = []  # a heap: by the copy after which each is free
    for number, one in enumerate(copies):
        while ending and ending[0][0] < number:
            last, _, free = heapq.heappop(ending)
            free.fences = (*free.fences, Fence(judge, last)) if last in ends else free.fences
            ranges.back[free.nbytes].append(free)
        if one.is_back:
            continue
        nbytes = -(-one.nbytes // ALIGNMENT) * ALIGNMENT
        if not (same := ranges.back.get(nbytes) or ranges.fit(nbytes)):
            grown = nbytes - ranges.free_before(slab.nbytes)
            ranges.back[grown].append(Range(slab, slab.nbytes, grown))
            slab.nbytes += grown
            same = ranges.fit(nbytes)
        place = same.pop()
        places[one.key] = place.start, max([cast(int, fence.event) for fence in place.fences], default=-1)
        heapq.heappush(ending, (max(last_back.get(one.key, -1), number), number, place))
    return places, slab.nbytes


class GraphSlot(Slot):
    """``nbytes`` bytes in the slab of a graph, from when their copy is enqueued."""

    tier = "host"
    __slots__ = ("start", "tensor")
    start: int
    tensor: Tensor

    def __init__(self, nbytes: int) -> None:
        super().__init__(nbytes, ())

    def write(self, source: Tensor) -> None:
        self.tensor.copy_(source)

    def read(self, target: Tensor) -> None:
        target.copy_(self.tensor)

    def memory(self) -> memoryview:
        return view_of(self.tensor.data_ptr(), self.nbytes, self)


class GraphSlab(NamedTuple):
    """What a capture is held to, and the pinned memory that its slots are parts of; ``None`` where nothing leaves."""

    log: CopyLog
    #: As ``lay_out`` returns them.
    places: dict[int, tuple[int, int]]
    memory: Tensor | None


class CapturedTransfers(DeviceOffloader):
    """The transfers of one step that is captured on ``stream``, or that comes before: see [Note: copies of a graph].

    Args:
        slab: of the capture; ``None`` for a real step.
        arguments, named: those of ``Transfers`` behind the device.
    """

    is_captured = True
    runtime: AcceleratorRuntime

    def __init__(self, stream: torch.Stream, slab: GraphSlab | None, *arguments: Any, **named: Any) -> None:
        super().__init__(stream.device, *arguments, **named)
        self._compute, self._slab = stream, slab
        #: What the step has copied so far.
        self.log = CopyLog()
        #: Behind each copy of a capture.
        self._events: list[Event] = []
        #: What a source that goes is being packed from, with the event behind that; ``None`` where nothing is.
        self._packing: tuple[Event, object] | None = None
        #: Why there is no graph: a copy of a capture that differs from the step before, or that failed. Copies of it
        #: are raised: an error that is raised holds the frames that it has come through, and they hold this.
        self._failure: OffloadError | None = None
        self._is_over = False

    def _stream(self, direction: Direction) -> Stream:
        """A capture has streams of its own: the process's stay free for other threads meanwhile."""
        if self._slab is None:
            return super()._stream(direction)
        streams = self.runtime.capture_streams(self.device)
        return streams.outward if direction is Direction.OUT else streams.inward

    def refuses_saves(self) -> bool:
        """What another stream computes stays: memory that is its own must not go when ``stream`` has waited."""
        return self._is_over or self.runtime.current_stream(self.device) != self._compute

    def refuse_call(self, what: str) -> None:
        if self.lock._is_owned():
            raise reentered()
        if self._is_over:
            raise CaptureStateError(
                "backward asked for a tensor that a captured step has saved, after the capture: the tensor is in the "
                "graph alone. Run backward inside of the step"
            )

    # -- out --------------------------------------------------------------------------------------------------------

    def slot_for(self, nbytes: int, found: ReservedSlot | None) -> Slot | Shortage | None:
        is_full = self.inflight_bytes + nbytes > self.windows.inflight
        if self._packing is not None or (is_full and (self._out or self._queued)):
            return Shortage(0)
        if self._slab is None:
            slot = super().slot_for(nbytes, found)
            if isinstance(slot, Shortage):
                return slot
        else:
            number, expected = len(self.log.found), self._slab.log.found
            slot = GraphSlot(nbytes) if number >= len(expected) or expected[number] else None
        self.log.found.append(slot is not None)
        return slot

    def offload(self, *arguments: Any, keepalive: object = None, **named: Any) -> None:
        """As in any step, but that ``keepalive`` goes before anything else leaves or is asked for.

        In a capture it goes at once: what it holds is the stream's that computes.
        """
        if keepalive is not None:
            self._packing = (None, None) if self._slab is not None else (self.runtime.record(self._compute), keepalive)
        super().offload(*arguments, **named)

    def _start_held_back(self) -> None:
        """A copy is enqueued where its source has to go, and not before."""

    def wait_for_room(self) -> bool:
        if self._packing is None:
            self._send_first(lambda record: False)
        else:
            self._await_packing()
        return True

    def send_one(self, stays: Callable[[CountedBytes], bool]) -> None:
        self._await_packing()
        self._send_first(stays)

    def _await_packing(self) -> None:
        if self._packing is not None and self._slab is None:
            with self._counting_wait(None):
                self.runtime.synchronize(self._packing[0])
        self._packing = None

    def _send_first(self, stays: Callable[[CountedBytes], bool]) -> None:
        """Sends the oldest copy out, but for those that ``stays`` names, and in a real step waits for it."""
        with self.lock:
            self.poll()
            found = (transfer for transfer in self._queued if not stays(cast(CountedBytes, transfer.record)))
            transfer = next(found, None)
            if transfer is not None:
                self._send(transfer)
        if transfer is not None and self._slab is None:
            if transfer.event is not None:  # else it could not be enqueued
                with suppress(OffloadError):  # `poll` sees to that
                    self.wait(transfer, None, "window is full", fills_window=True)
            with self.lock:
                self.poll()

    def _send(self, transfer: Transfer) -> None:
        """Enqueues a copy out; in a capture compute waits for it, and its source goes."""
        held_back = self._queued[transfer]
        key, slot = held_back.key, held_back.slot
        assert key is not None
        self._note(CapturedCopy(key, False, slot.nbytes))
        del self._queued[transfer]
        self._held_back_bytes -= transfer.moved
        if self._slab is not None:
            assert isinstance(slot, GraphSlot)
            assert self._slab.memory is not None
            start, behind = self._slab.places[key]
            slot.start, slot.tensor = start, self._slab.memory[start : start + slot.nbytes]
            slot.fences = () if behind < 0 else (Fence(self.runtime, self._events[behind]),)
        self._enqueue(transfer, slot, held_back.source, slot, held_back.after, "offload", key)
        self._events.append(transfer.event)
        if self._slab is not None:
            self.runtime.wait(self._compute, transfer.event)
            self.complete(transfer, None)

    def _fail(self, transfer: Transfer, failure: OffloadError) -> None:
        super()._fail(transfer, failure)
        if self._slab is not None:
            self._failure = failure
            raise copy(failure)

    def _note(self, copied: CapturedCopy) -> None:
        """Writes a copy down.

        Raises:
            ScheduleMismatchError: a capture has another one here than the step before.
        """
        number = len(self.log.copies)
        if self._slab is not None and self._slab.log.copies[number : number + 1] != [copied]:
            self._failure = ScheduleMismatchError(
                f"a step has to do the same in its warm-ups and in the capture, and differs first at copy {number}, of "
                f"{copied.nbytes:,} bytes. What holds graphs alive until the garbage collector comes cannot be captured"
            )
            raise copy(self._failure)
        self.log.copies.append(copied)

    # -- back -------------------------------------------------------------------------------------------------------

    def reload(
        self,
        slot: Slot,
        layout: Layout,
        stream: Stream,
        what: str,
        *,
        after: Sequence[Event] = (),
        held_after: bool = True,
        key: int | None = None,
    ) -> tuple[Tensor, Transfer]:
        assert key is not None
        self._note(CapturedCopy(key, True, slot.nbytes))
        # Compute has waited for the copy out; another stream has not.
        others = () if stream == self._compute else (self.runtime.record(self._compute),)
        try:
            target, transfer = super().reload(
                slot, layout, stream, what, after=(*others, *after), held_after=held_after, key=key
            )
        except BaseException:
            self.log.copies.pop()  # there was no memory for its target
            raise
        self._events.append(transfer.event)
        return target, transfer

    def drop_resident(self, transfer: Transfer) -> None:
        """Compute waits for a copy back whose target is not needed any more, before that goes."""
        super().drop_resident(transfer)
        if transfer in self._in:
            self.runtime.wait(self._compute, transfer.event)
            self.mark_consumed(transfer)

    # -- the end ----------------------------------------------------------------------------------------------------

    def join(self) -> None:
        """The step is over: both streams of copies of a capture join that which computes.

        Raises:
            OffloadError: a copy was not as in the step before, or has failed, be it that the step was told so and has
                gone on.
        """
        if self._failure is not None:
            raise copy(self._failure)
        for direction in (False, True):
            if any(copied.is_back is direction for copied in self.log.copies):
                stream = self._stream_in if direction else self._stream_out
                self.runtime.wait(self._compute, self.runtime.record(stream))
        self._in.clear()

    def close(self) -> None:
        """Nothing more is copied."""
        with self.lock:
            for transfer in list(self._queued):
                self.cancel(transfer)
                assert transfer.record is not None
                transfer.record.stay(KeepReason.NEWEST)
            self._is_over = self._slab is not None

    def forget(self) -> None:
        """The capture has ended. What is on its way in one that has failed never runs."""
        assert self._slab is not None
        self._in.clear()
        self._slab, self._events = self._slab._replace(memory=None), []
