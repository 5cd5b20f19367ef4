"""Copies between a device and a tier that copy engines cannot reach (e.g. a disk): a pipeline through pinned memory.

    offload   the device's stream copies into staging memory | the writer thread writes to the tier
    reload    the reader thread reads into staging memory    | and enqueues the copy to the device

[Note: stages overlap]
Each storage has its own staging memory: while one storage is written, the next are copied off the device, and while one
is copied back, the next is read. To that end the memory of the latest read is held: otherwise the next read would get
the same memory, and wait for its copy. Staging memory is limited for each direction; a storage larger than the limit
is staged alone.

[Note: no room]
An offload runs under the caller's lock, so it must not wait for staging memory, nor for the system to pin some. It uses
memory that is pinned and free. If there is none:

1. The copy off the device is left to the writer, which may pin more memory, as the reader may.
2. All later copies are left to the writer too, until the last left copy has its memory. Otherwise a later write could
   hold the memory that an earlier write needs.
3. Before the writer writes a left part, it enqueues the next left copies, in order, as far as memory allows. So the
   stages still overlap.

[Note: an offload ends in the tier]
An offload is over when its bytes are in the tier, not when they are staged. Until then the source is held, so a failed
write loses nothing. The window limits the device memory held by that.

[Note: order of the stages]
The writer waits on the host for the copy into staging memory, which is freed after the write. The reader waits for the
last copy out of the memory that it gets; that memory is reused once the next copy is enqueued. The copy's stream waits
for the events of the caller. A stream can wait for a reload once the reader has enqueued the copy; until then the host
waits. Other transfers of the same slot need no wait, because a thread holds the slot that it writes or reads, so that
the slot is not reused before.
"""

from __future__ import annotations

import errno
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import NoReturn

import torch
from torch import Tensor

from eager_offload.errors import TransferError
from eager_offload.runtime.base import Event, Runtime, Span
from eager_offload.runtime.captures import AcceleratorEvent
from eager_offload.runtime.host import carry
from eager_offload.runtime.transfer_threads import HostEvent, TransferThread
from eager_offload.tiers.base import Fence, MustGrow, Shortage, Slot
from eager_offload.tiers.forking import FinalizerRecord, ForkSafeLock
from eager_offload.tiers.pool import HostSlot, Pool, Quota

#: Staging memory of the process for each direction, in bytes.
STAGING_BYTES = 256 << 20


class StagedEvent:
    """The end of a transfer that a thread takes part in; compared by identity."""

    __slots__ = ("__weakref__", "carried", "copied", "landed", "work")

    def __init__(self) -> None:
        #: The thread's operation, once submitted.
        self.work: HostEvent | None = None
        #: A reload's copy to the device, once the thread has enqueued it.
        self.landed: AcceleratorEvent | None = None
        self.copied: AcceleratorEvent | None = None
        #: The time of the tier's write or read, once known. It is the slower stage.
        self.carried: Span | None = None

    @property
    def on_device(self) -> AcceleratorEvent | None:
        return self.landed or self.copied

    def wait_on(self, stream: torch.Stream) -> None:
        """Makes ``stream`` wait; blocks the host until the thread has enqueued the copy to wait for."""
        assert self.work is not None
        self.work.result()
        if self.landed is not None:
            self.landed.wait_on(stream)

    def query(self) -> bool:
        assert self.work is not None
        return self.work.done and (self.landed is None or self.landed.query())

    def synchronize(self) -> None:
        assert self.work is not None
        self.work.result()
        if self.landed is not None:
            self.landed.synchronize()


@dataclass(eq=False)
class _Part:
    """A storage that passes through staging ``memory``, which it holds until it dies."""

    event: StagedEvent
    slot: Slot
    tensor: Tensor
    stream: torch.Stream
    after: list[Event]
    timed: bool
    memory: HostSlot | None = None


class _Room:
    """The staging memory of one direction. Its transfer thread may allocate; a packing thread uses free memory only."""

    def __init__(self, device: Runtime, limit: int) -> None:
        self._device = device
        self._limit = limit
        self._quota = Quota(limit, Shortage("all of the staging memory is in use", "wait"))
        self._pool: Pool | None = None
        self._latest: HostSlot | None = None

    def take_at_once(self, part: _Part) -> bool:
        """Gives ``part`` pinned memory that is free; returns whether there was some. Never waits."""
        with suppress(MustGrow):
            part.memory = None if self._pool is None else self._pool.take(part.slot.nbytes, self._quota)
        return part.memory is not None

    def take(self, part: _Part, *, beyond: bool = True) -> bool:
        """Gives ``part`` memory; may wait for the system. Returns whether there was some.

        Args:
            beyond: whether to exceed the limit if nothing is free, since no other transfer is active.
        """
        if part.memory is not None:  # given while an earlier part was written
            return True
        pool, quota = self._pool, self._quota
        if pool is None:
            sizes = self._device.slab_sizes()
            pool = self._pool = Pool(self._device.host_buffer, idle_bytes=self._limit, sizes=sizes)
            pool.register(quota)
        part.memory = pool.allocate(part.slot.nbytes, quota)
        if part.memory is None and self._latest is not None:
            self._latest = None
            part.memory = pool.allocate(part.slot.nbytes, quota)
        if part.memory is None and beyond:
            quota.budget = sys.maxsize
            try:
                part.memory = pool.allocate(part.slot.nbytes, quota)
            finally:
                quota.budget = self._limit
        return part.memory is not None

    def hold(self, slot: HostSlot) -> None:
        """Holds ``slot``, so that the next read gets other memory if possible; see [Note: stages overlap]."""
        self._latest = slot

    def close(self) -> None:
        self._latest = None
        pool, self._pool = self._pool, None
        if pool is not None:
            pool.unregister(self._quota)


class Staging:
    """The threads of a runtime that write to disks and read from them, and their staging memory.

    Args:
        enqueue: enqueues a copy on a stream, after events of the device.
        limit: bytes of staging memory for each direction.
    """

    def __init__(self, device: Runtime, enqueue: Callable[..., AcceleratorEvent], limit: int = STAGING_BYTES) -> None:
        self._device = device
        self._enqueue = enqueue
        self._writer = TransferThread("eager_offload-write")
        self._reader = TransferThread("eager_offload-read")
        self._out, self._in = _Room(device, limit), _Room(device, limit)
        #: Held from the choice of memory until the write is queued, so that writes are queued in order.
        self._order = ForkSafeLock()
        #: Parts left to the writer that have no memory yet, in order: see [Note: no room].
        self._left: deque[FinalizerRecord[_Part]] = deque()
        #: Guards the removal of parts from `_left`.
        self._looking = ForkSafeLock()

    def offload(
        self, slot: Slot, source: Tensor, stream: torch.Stream, after: Sequence[Event], *, timed: bool
    ) -> StagedEvent:
        """Copies ``source`` into staging memory and has it written to ``slot``; see ``Runtime.copy``."""
        event, is_left = StagedEvent(), False
        part = _Part(event, slot, source, stream, _of_device(after), timed)
        with self._order.lock:
            try:
                if self._first_left() is None and self._out.take_at_once(part):
                    self._copy_off(part)
                    event.work = self._writer.submit(partial(self._write, part))
                else:
                    is_left = True
                    self._left.append(FinalizerRecord(part))
                    event.work = self._writer.submit(partial(self._write_left, part))
            except BaseException:
                if not is_left:  # else the writer may have the part, and needs it unchanged
                    self._keep(part)
                    part.memory = None
                del part  # or the traceback would hold its memory
                raise
        return event

    def _first_left(self) -> _Part | None:
        with self._looking.lock:
            while self._left:
                part = self._left[0]()
                if part is not None and part.memory is None:
                    return part
                self._left.popleft()
        return None

    def _copy_off(self, part: _Part) -> None:
        assert part.memory is not None
        try:
            part.event.copied = self._enqueue(
                part.memory.tensor, part.tensor, part.stream, part.after, timed=part.timed
            )
        except BaseException:
            self._keep(part)
            raise

    def _keep(self, part: _Part) -> None:
        """Keeps the memory of ``part`` until the stream is past a copy that may have been enqueued before the error."""
        if part.memory is not None:
            self._device.keep_until(self._device.record(part.stream), part.memory)

    def reload(
        self, target: Tensor, slot: Slot, stream: torch.Stream, after: Sequence[Event], *, timed: bool
    ) -> StagedEvent:
        """Has ``slot`` read into staging memory and copied into ``target``; see ``Runtime.copy``."""
        event = StagedEvent()
        part = _Part(event, slot, target, stream, _of_device(after), timed)
        event.work = self._reader.submit(partial(self._read, part))
        return event

    # [Note: no closures] Threads are given methods with arguments: the traceback of a failure would keep the variables
    # of a closure alive, including the slot, as long as the event lives.

    def _write_left(self, part: _Part) -> None:
        """Copies and writes ``part``; before the write, enqueues the copies of following parts as memory allows."""
        if not self._out.take(part):
            _refuse(part.slot)
        if part.event.copied is None:
            self._copy_off(part)
        with suppress(Exception):  # a following part keeps its memory, and the writer tries again at its turn
            while (following := self._first_left()) is not None and self._out.take(following, beyond=False):
                self._copy_off(following)
        self._write(part)

    def _write(self, part: _Part) -> None:
        memory, copied = part.memory, part.event.copied
        if memory is not None and copied is not None:  # else the packing thread was interrupted, and nobody waits
            self._device.synchronize(copied)
            part.event.carried = _carry(part.slot.write, memory.tensor, part.slot)

    def _read(self, part: _Part) -> None:
        # The reader's part of a reload: it ends once the copy to the device is enqueued.
        device, slot = self._device, part.slot
        if not self._in.take(part):
            _refuse(slot)
        memory = part.memory
        assert memory is not None
        for fence in memory.record.fences:
            device.synchronize(fence.event)
        part.event.carried = _carry(slot.read, memory.tensor, slot)
        landed = self._enqueue(part.tensor, memory.tensor, part.stream, part.after, timed=part.timed)
        memory.record.fences = (Fence(device, landed),)
        self._in.hold(memory)
        # If the caller was interrupted, nothing else holds the target of the copy.
        device.keep_until(landed, part.tensor)
        part.event.landed = landed

    def close(self) -> None:
        self._writer.close()
        self._reader.close()
        self._out.close()
        self._in.close()


def _of_device(after: Sequence[Event]) -> list[Event]:
    return [event for event in after if not isinstance(event, StagedEvent)]


def _carry(call: Callable[[Tensor], None], tensor: Tensor, slot: Slot) -> Span:
    began = time.perf_counter()
    with torch.inference_mode(False):
        carry(call, tensor, slot)
    return Span(slot.tier, began, time.perf_counter())


def _refuse(slot: Slot) -> NoReturn:
    raise TransferError(
        f"the system has no {slot.nbytes} bytes of memory left through which the {slot.tier} tier could be reached",
        errno=errno.ENOMEM,
        tier=slot.tier,
        nbytes=slot.nbytes,
    )
