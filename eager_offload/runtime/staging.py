"""Between a device and a tier that no copy engine reaches, such as a disk: through pinned memory, in a pipeline.

    offload   the device's stream copies into staging | the writer's thread writes that to the tier
    reload    the reader's thread reads into staging  | and enqueues the copy to the device on its stream

[Note: stages overlap]
Each storage that travels has staging room of its own, so while one is written, the next ones are copied off the device,
and while one is copied back, the next is read: the room that was read into last is held, or the next read would be
given that one again and wait for its copy. Room is bounded for each way. A storage that is
larger than the bound has all of it alone.

[Note: no room]
The caller holds a lock, so it waits neither for room nor for the system, which takes long to pin memory: it takes what
is pinned and free. Otherwise the copy off the device is left to the writer, which pins more, like the reader. From then
on all copies are left to it, until the last of these has its room: else a later write would have the room of an earlier
one. Before the writer writes what was left to it, it has
the next ones copied, in order, as far as there is room, so that the stages overlap here too.

[Note: where the bytes are safe]
An offload is over when its bytes are in the tier, not when they are in staging: until then the source lives, and a
write that fails costs nothing but the attempt. It is the window that bounds what is held on the device meanwhile.

[Note: what orders the stages]
The writer waits, as a host does, for the copy into staging; room goes back after the write. The reader waits for the
last copy out of the room it was given, which goes back once the next copy is enqueued, and the stream of that copy for
whatever the caller said. A stream that is to wait for a reload can do so once the reader has enqueued the copy: until
then the host waits. Nothing waits for the threads' other transfers of the same slot: a thread holds the slot that it
writes or reads, so that no slot is given anew before.
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

#: Bytes of staging memory for each way, for the whole process.
STAGING_BYTES = 256 << 20


class StagedEvent:
    """The end of a transfer that a thread has a part in; equal to itself only."""

    __slots__ = ("__weakref__", "carried", "copied", "landed", "work")

    def __init__(self) -> None:
        #: The thread's part, once it was given it.
        self.work: HostEvent | None = None
        #: The copy to the device that the thread has enqueued, if this is a reload that came so far.
        self.landed: AcceleratorEvent | None = None
        #: The copy from the device, if this is an offload.
        self.copied: AcceleratorEvent | None = None
        #: When the tier wrote or read, once it has; the device is faster.
        self.carried: Span | None = None

    @property
    def on_device(self) -> AcceleratorEvent | None:
        """The part of it that ran on the device, if it came so far."""
        return self.landed or self.copied

    def wait_on(self, stream: torch.Stream) -> None:
        """Makes ``stream`` wait; the host waits until the thread has enqueued what there is to wait for."""
        assert self.work is not None
        self.work.result()
        if self.landed is not None:
            self.landed.wait_on(stream)

    def query(self) -> bool:
        """Whether it is over, by success or by failure; never blocks."""
        assert self.work is not None
        return self.work.done and (self.landed is None or self.landed.query())

    def synchronize(self) -> None:
        """Makes the host wait until it is over."""
        assert self.work is not None
        self.work.result()
        if self.landed is not None:
            self.landed.synchronize()


@dataclass(eq=False)
class _Part:
    """A storage on its way through staging memory, part of which it takes once there is ``memory``, until it dies."""

    event: StagedEvent
    slot: Slot
    #: On the device.
    tensor: Tensor
    stream: torch.Stream
    after: list[Event]
    timed: bool
    memory: HostSlot | None = None


class _Room:
    """Staging memory of one way. One transfer thread takes it; a thread that packs takes what is here and free."""

    def __init__(self, device: Runtime, limit: int) -> None:
        self._device = device
        self._limit = limit
        self._quota = Quota(limit, Shortage("all of the staging memory is in use", "wait"))
        self._pool: Pool | None = None
        self._latest: HostSlot | None = None

    def take_at_once(self, part: _Part) -> bool:
        """Gives ``part`` memory that is here and free; returns whether there was some. Waits for nothing."""
        with suppress(MustGrow):
            part.memory = None if self._pool is None else self._pool.take(part.slot.nbytes, self._quota)
        return part.memory is not None

    def take(self, part: _Part, *, beyond: bool = True) -> bool:
        """Gives ``part`` memory; may wait for the system.

        Args:
            beyond: whether it goes beyond the bound where that has no room, since nothing else is on its way.

        Returns:
            ``False`` where there is none.
        """
        if part.memory is not None:  # a write before this one has had it copied
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
        """Has the next room lie beside ``slot``, where both fit; see [Note: stages overlap]."""
        self._latest = slot

    def close(self) -> None:
        self._latest = None
        pool, self._pool = self._pool, None
        if pool is not None:
            pool.unregister(self._quota)


class Staging:
    """The threads of a runtime that write to disks and read from them, and their staging memory.

    Args:
        device: the runtime that it belongs to.
        enqueue: puts a copy of bytes on a stream, behind events of the device.
        limit: bytes of staging memory for each way.
    """

    def __init__(self, device: Runtime, enqueue: Callable[..., AcceleratorEvent], limit: int = STAGING_BYTES) -> None:
        self._device = device
        self._enqueue = enqueue
        self._writer = TransferThread("eager_offload-write")
        self._reader = TransferThread("eager_offload-read")
        self._out, self._in = _Room(device, limit), _Room(device, limit)
        #: Of what takes room, until its write stands in the queue.
        self._order = ForkSafeLock()
        #: What was left to the writer, in order: while it lives and has no memory. See [Note: no room].
        self._left: deque[FinalizerRecord[_Part]] = deque()
        #: Of the thread that takes out of it what is not left any more.
        self._looking = ForkSafeLock()

    def offload(
        self, slot: Slot, source: Tensor, stream: torch.Stream, after: Sequence[Event], *, timed: bool
    ) -> StagedEvent:
        """Has ``source`` copied into staging and written to ``slot``; see ``Runtime.copy``."""
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
                if not is_left:  # else the writer may have it, and has to find it as it was
                    self._keep(part)
                    part.memory = None
                del part  # or the traceback would hold it
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
        """Keeps the memory of ``part``: what has failed may come after a copy into it, whose event is lost then."""
        if part.memory is not None:
            self._device.keep_until(self._device.record(part.stream), part.memory)

    def reload(
        self, target: Tensor, slot: Slot, stream: torch.Stream, after: Sequence[Event], *, timed: bool
    ) -> StagedEvent:
        """Has ``slot`` read into staging and copied from there into ``target``; see ``Runtime.copy``."""
        event = StagedEvent()
        part = _Part(event, slot, target, stream, _of_device(after), timed)
        event.work = self._reader.submit(partial(self._read, part))
        return event

    # [Note: no closures] What a thread is given to do are methods with their arguments: the traceback of a failure
    # keeps the variables of a closure alive, and with them the slot, for as long as the event is.

    def _write_left(self, part: _Part) -> None:
        """Copies and writes ``part``; before it writes, it has the next ones copied for which there is room."""
        if not self._out.take(part):
            _refuse(part.slot)
        if part.event.copied is None:
            self._copy_off(part)
        with suppress(Exception):  # it keeps its memory, and the writer tries again when it comes to it
            while (following := self._first_left()) is not None and self._out.take(following, beyond=False):
                self._copy_off(following)
        self._write(part)

    def _write(self, part: _Part) -> None:
        memory, copied = part.memory, part.event.copied
        if memory is not None and copied is not None:  # else the thread that packs was interrupted: nobody waits
            self._device.synchronize(copied)
            part.event.carried = _carry(part.slot.write, memory.tensor, part.slot)

    def _read(self, part: _Part) -> None:
        """The reader's part of a reload: ends with the copy to the device enqueued."""
        device, slot = self._device, part.slot
        if not self._in.take(part):
            _refuse(slot)
        memory = part.memory
        assert memory is not None
        for fence in memory.fences:
            device.synchronize(fence.event)
        part.event.carried = _carry(slot.read, memory.tensor, slot)
        landed = self._enqueue(part.tensor, memory.tensor, part.stream, part.after, timed=part.timed)
        memory.fences = (Fence(device, landed),)
        self._in.hold(memory)
        # The caller may have been interrupted, and then nothing else holds what is being written.
        device.keep_until(landed, part.tensor)
        part.event.landed = landed

    def close(self) -> None:
        """Has the threads carry out what they were given and end, and gives the staging memory back."""
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
