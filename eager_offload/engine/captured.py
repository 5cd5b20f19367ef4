"""Transfers of a captured step, and of the real warm-up steps before the capture.

    pack         the window has room      -> queue the copy out in this object, ordered by an event recorded at once
                 the window is full       -> enqueue the oldest copy, make compute wait for it, release its source
    unpack       the source is held       -> return the source; its copy is never enqueued
                 the source was released  -> copy back, as in any step
                 in both cases            -> enqueue the oldest copy not needed soon, release its source
    end of step  both copy streams join the compute stream

[Note: copies of a graph]
An event of a captured graph never completes during the capture, so a source is released once compute waits for its
copy. When a copy runs in a replay depends on the events that it waits for, and not on when the host enqueues it.
A copy is therefore enqueued only when its source has to be released, behind the event that was recorded when its bytes
were final, and has all the time in between to run. If backward needs the bytes earlier, the graph has no such copy.

The last real step before the capture follows the same rules, with the host waiting in place of compute: which bytes
leave, and when, depends on the saves and the settings alone, and on no measurement. That step logs its copies, and the
capture has to match the log. The layout of the graph's slots in one slab is computed from the log before the capture.
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
    key: int
    is_back: bool
    nbytes: int


@dataclass
class CopyLog:
    copies: list[CapturedCopy] = field(default_factory=list)
    #: For each storage that was due to leave, whether a tier had room.
    found: list[bool] = field(default_factory=list)


class _InAGraph:
    """Compares fences by number of copy: no use of a slot is over while the graph is laid out."""

    def query(self, event: object) -> bool:
        return False


def lay_out(copies: Sequence[CapturedCopy]) -> tuple[dict[int, tuple[int, int]], int]:
    """Returns a layout in which storages share a place if one is copied back before the other is copied out.

    A storage occupies its place from its copy out to its last copy back. Places are cut from the slab as a tier cuts
    slots: see [Note: choosing a range].

    Returns:
        For each key: the start in the slab, and the number of the last copy back of earlier users of the place (-1 if
        there are none). Then the size of the slab in bytes.
    """
    last_back = {one.key: number for number, one in enumerate(copies) if one.is_back}
    ends, judge = set(last_back.values()), _InAGraph()
    slab, ranges, places = Slab(0), Ranges[Slab](), dict[int, tuple[int, int]]()
    ending: list[tuple[int, int, Range[Slab]]] = []  # a heap, ordered by the copy after which the range is free
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
    """``nbytes`` bytes of a graph's slab. ``start`` and ``tensor`` are set when the copy is enqueued."""

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
    """The log that a capture has to match, and the pinned memory of its slots (``None`` if nothing leaves)."""

    log: CopyLog
    places: dict[int, tuple[int, int]]
    memory: Tensor | None


class CapturedTransfers(DeviceOffloader):
    """The transfers of a step that is captured on ``stream``, or of a warm-up step: see [Note: copies of a graph].

    Args:
        slab: the slab of the capture; ``None`` for a warm-up step.
        arguments, named: the arguments of ``Transfers`` after the device.
    """

    is_captured = True
    runtime: AcceleratorRuntime

    def __init__(self, stream: torch.Stream, slab: GraphSlab | None, *arguments: Any, **named: Any) -> None:
        super().__init__(stream.device, *arguments, **named)
        self._compute, self._slab = stream, slab
        self.log = CopyLog()
        self._events: list[Event] = []
        #: While a source is being packed: the event after packing, and the packed tensor's inputs.
        self._packing: tuple[Event, object] | None = None
        #: Why the capture failed. Only copies of this error are raised: a raised error refers to the frames that it
        #: passed through, and those refer to this object.
        self._failure: OffloadError | None = None
        self._is_over = False

    def _stream(self, direction: Direction) -> Stream:
        # A capture has its own streams, since other threads use the process's streams at the same time.
        if self._slab is None:
            return super()._stream(direction)
        streams = self.runtime.capture_streams(self.device)
        return streams.outward if direction is Direction.OUT else streams.inward

    def refuses_saves(self) -> bool:
        # Bytes that another stream computes stay: waiting on `stream` does not make their memory safe to release.
        return self._is_over or self.runtime.current_stream(self.device) != self._compute

    def refuse_call(self, what: str) -> None:
        if self.lock._is_owned():
            raise reentered()
        if self._is_over:
            raise CaptureStateError(
                "backward needed a saved tensor of a captured step after the capture: the tensor exists only in the "
                "graph. Run backward inside of the step"
            )

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
        """Copies out as ``DeviceOffloader`` does; ``keepalive`` is released before any other transfer begins.

        In a capture ``keepalive`` is released at once: its memory belongs to the compute stream.
        """
        if keepalive is not None:
            self._packing = (None, None) if self._slab is not None else (self.runtime.record(self._compute), keepalive)
        super().offload(*arguments, **named)

    def _start_queued(self) -> None:
        """Does nothing: a copy is enqueued only when its source has to be released."""

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
        """Enqueues the oldest copy out except those that ``stays`` selects. A warm-up step then waits for the copy."""
        with self.lock:
            self.poll()
            found = (transfer for transfer in self._queued if not stays(cast(CountedBytes, transfer.record)))
            transfer = next(found, None)
            if transfer is not None:
                self._send(transfer)
        if transfer is not None and self._slab is None:
            if transfer.event is not None:  # else enqueueing failed
                with suppress(OffloadError):  # `poll` handles the failure
                    self.wait(transfer, None, "window is full", fills_window=True)
            with self.lock:
                self.poll()

    def _send(self, transfer: Transfer) -> None:
        queued = self._queued[transfer]
        key, slot = queued.key, queued.slot
        assert key is not None
        self._note(CapturedCopy(key, False, slot.nbytes))
        del self._queued[transfer]
        self._queued_bytes -= transfer.moved
        if self._slab is not None:
            assert isinstance(slot, GraphSlot)
            assert self._slab.memory is not None
            start, behind = self._slab.places[key]
            slot.start, slot.tensor = start, self._slab.memory[start : start + slot.nbytes]
            slot.record.fences = () if behind < 0 else (Fence(self.runtime, self._events[behind]),)
        self._enqueue(transfer, slot, queued.source, slot, queued.after, "offload", key)
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
        """Logs a copy.

        Raises:
            ScheduleMismatchError: the capture differs from the step before at this copy.
        """
        number = len(self.log.copies)
        if self._slab is not None and self._slab.log.copies[number : number + 1] != [copied]:
            self._failure = ScheduleMismatchError(
                f"a captured step must do the same in every warm-up and in the capture, and differs first at copy "
                f"{number}, of {copied.nbytes:,} bytes. It must not leave its graphs to the garbage collector"
            )
            raise copy(self._failure)
        self.log.copies.append(copied)

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
        # Compute has waited for the copy out. Any other stream has not, and has to wait for compute.
        others = () if stream == self._compute else (self.runtime.record(self._compute),)
        try:
            target, transfer = super().reload(
                slot, layout, stream, what, after=(*others, *after), held_after=held_after, key=key
            )
        except BaseException:
            self.log.copies.pop()  # the target could not be allocated
            raise
        self._events.append(transfer.event)
        return target, transfer

    def drop_resident(self, transfer: Transfer) -> None:
        # Compute waits for the copy back before its unused target is released.
        super().drop_resident(transfer)
        if transfer in self._in:
            self.runtime.wait(self._compute, transfer.event)
            self.mark_consumed(transfer)

    def join(self) -> None:
        """Ends the step: in a capture, the compute stream waits for both copy streams.

        Raises:
            OffloadError: a copy failed or differed from the step before, even if the step caught that error and
                continued.
        """
        if self._failure is not None:
            raise copy(self._failure)
        for direction in (False, True):
            if any(copied.is_back is direction for copied in self.log.copies):
                stream = self._stream_in if direction else self._stream_out
                self.runtime.wait(self._compute, self.runtime.record(stream))
        self._in.clear()

    def close(self) -> None:
        with self.lock:
            for transfer in list(self._queued):
                self.cancel(transfer)
                assert transfer.record is not None
                transfer.record.stay(KeepReason.NEWEST)
            self._is_over = self._slab is not None

    def forget(self) -> None:
        """Releases the slab and the events after the capture. Copies of a failed capture never run."""
        assert self._slab is not None
        self._in.clear()
        self._slab, self._events = self._slab._replace(memory=None), []
