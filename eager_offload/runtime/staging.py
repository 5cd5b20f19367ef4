"""Between a device and a tier that no copy engine reaches, such as a disk: through pinned memory, in a pipeline.

    offload   the device's stream copies into staging | the writer's thread writes that to the tier
    reload    the reader's thread reads into staging  | and enqueues the copy to the device on its stream

[Note: stages overlap]
Each storage that travels has staging room of its own, so while one is written, the next ones are copied off the device,
and while one is copied back, the next is read: the room that was read into last is held, or the next read would be
given that one again and wait for its copy. Room is bounded for each way, for all disks together. A storage that is
larger than the bound has all of it alone.

[Note: no room]
The caller holds a lock, so it does not wait for room. Without room the copy off the device is left to the writer, which
waits, like the reader, until another thread has done with some. From then on all copies are left to it, until it has
come to the last of these: room that is taken for a later write would be waited for in vain.

[Note: where the bytes are safe]
An offload is over when its bytes are in the tier, not when they are in staging: until then the source lives, and a
write that fails costs nothing but the attempt. It is the window that bounds what is held on the device meanwhile.

[Note: what orders the stages]
The writer waits, as a host does, for the copy into staging; room goes back after the write. The reader waits for the
last copy out of the room it was given, which goes back once the next copy is enqueued, and the stream of that copy for
whatever the caller said. A stream that is to
wait for a reload can do so once the reader has enqueued the copy: until then the host waits. Nothing waits for the
threads' other transfers of the same slot: a thread holds the slot that it writes or reads, so that no slot is given
anew before.
"""

from __future__ import annotations

import errno
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NoReturn, cast

import torch
from torch import Tensor

from eager_offload.errors import TransferError
from eager_offload.runtime.accelerator_events import AcceleratorEvent
from eager_offload.runtime.base import Event, Runtime, Span
from eager_offload.runtime.host import carry
from eager_offload.runtime.transfer_threads import HostEvent, TransferThread
from eager_offload.tiers.base import Fence, Slot
from eager_offload.tiers.forking import ForkSafeLock, tell_after_fork
from eager_offload.tiers.pool import Pool
from eager_offload.tiers.slabs import HostSlot

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


class _Room:
    """Staging memory of one way."""

    def __init__(self, device: Runtime, limit: int) -> None:
        self._device = device
        self._limit = limit
        self._lock = ForkSafeLock()
        self._pool: Pool | None = None
        self._latest: HostSlot | None = None
        self.after_fork()
        tell_after_fork(self)

    def after_fork(self) -> None:
        self._lock.after_fork()
        self._given_back = threading.Condition(cast(Any, self._lock.lock))
        #: How many parts are taken, and how many ``take_later`` is still to take.
        self._taken = self._left = 0

    def take_at_once(self, nbytes: int) -> HostSlot | None:
        """Takes room if it is there; ``None`` where it is left to ``take_later``: see [Note: no room]."""
        with self._given_back:
            slot = None if self._left else self.take(nbytes, waits=False)
            self._left += slot is None
            return slot

    def take_later(self, nbytes: int) -> HostSlot | None:
        """Does ``take`` for what was left to it."""
        slot = self.take(nbytes)
        with self._given_back:
            self._left -= 1
        return slot

    def take(self, nbytes: int, *, waits: bool = True) -> HostSlot | None:
        """Takes room for ``nbytes``, until ``give_back``; may wait while others have too much.

        Returns:
            ``None`` where the system has no memory, or where it would have to wait.
        """
        with self._given_back:
            pool = self._pool
            if pool is None:
                sizes = self._device.slab_sizes()
                pool = self._pool = Pool(self._device.host_buffer, idle_bytes=self._limit, sizes=sizes)
            while (slot := pool.allocate(nbytes, limit=self._limit)) is None:
                if self._latest is not None:
                    self._latest = None
                elif self._taken and not waits:
                    return None
                elif self._taken:
                    self._given_back.wait()
                else:
                    slot = pool.allocate(nbytes)
                    break
            self._taken += slot is not None
            return slot

    def give_back(self) -> None:
        """A part that was taken is free, and nothing but ``hold`` keeps it."""
        with self._given_back:
            self._taken -= 1
            self._given_back.notify_all()

    def hold(self, slot: HostSlot) -> None:
        """Has the next room lie beside ``slot``, where both fit; see [Note: stages overlap]."""
        with self._given_back:
            self._latest = slot

    def close(self) -> None:
        with self._given_back:
            self._latest = None
            pool, self._pool = self._pool, None
        if pool is not None:
            pool.close()


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

    def offload(
        self, slot: Slot, source: Tensor, stream: torch.Stream, after: Sequence[Event], *, timed: bool
    ) -> StagedEvent:
        """Has ``source`` copied into staging and written to ``slot``; see ``Runtime.copy``."""
        event, writer, events = StagedEvent(), self._writer.lane(slot.lane), _of_device(after)
        with self._order.lock:
            room = self._out.take_at_once(slot.nbytes)
            if room is None:
                event.work = writer.submit(partial(self._copy_and_write, event, slot, source, stream, events, timed))
                return event
            rooms = [room]  # the writer takes it out, so that it is free when the writer gives it back
            del room
            with self._keeping(rooms, stream):
                copied = event.copied = self._enqueue(rooms[0].tensor, source, stream, events, timed=timed)
                event.work = writer.submit(partial(self._write, event, slot, rooms, copied))
        return event

    @contextmanager
    def _keeping(self, rooms: list[HostSlot], stream: torch.Stream) -> Iterator[None]:
        """Around what enqueues a copy into a room: what has failed may come after it, and its event is lost then."""
        try:
            yield
        except BaseException:
            if rooms:
                self._device.keep_until(self._device.record(stream), rooms.pop())
                self._out.give_back()
            raise

    def reload(
        self, target: Tensor, slot: Slot, stream: torch.Stream, after: Sequence[Event], *, timed: bool
    ) -> StagedEvent:
        """Has ``slot`` read into staging and copied from there into ``target``; see ``Runtime.copy``."""
        event = StagedEvent()
        event.work = self._reader.lane(slot.lane).submit(
            partial(self._read, event, target, slot, stream, _of_device(after), timed)
        )
        return event

    # [Note: no closures] What a thread is given to do are methods with their arguments: the traceback of a failure
    # keeps the variables of a closure alive, and with them the slot, for as long as the event is.

    def _copy_and_write(
        self, event: StagedEvent, slot: Slot, source: Tensor, stream: torch.Stream, after: Sequence[Event], timed: bool
    ) -> None:
        room = self._out.take_later(slot.nbytes)
        if room is None:
            _refuse(slot)
        rooms = [room]
        del room
        with self._keeping(rooms, stream):
            copied = event.copied = self._enqueue(rooms[0].tensor, source, stream, after, timed=timed)
        self._write(event, slot, rooms, copied)

    def _write(self, event: StagedEvent, slot: Slot, rooms: list[HostSlot], copied: AcceleratorEvent) -> None:
        room = rooms.pop()
        try:
            self._device.synchronize(copied)
            event.carried = _carry(slot.write, room.tensor, slot)
        finally:
            del room
            self._out.give_back()

    def _read(
        self, event: StagedEvent, target: Tensor, slot: Slot, stream: torch.Stream, after: Sequence[Event], timed: bool
    ) -> None:
        """The reader's part of a reload: ends with the copy to the device enqueued."""
        device, room = self._device, self._in.take(slot.nbytes)
        if room is None:
            _refuse(slot)
        try:
            for fence in room.fences:
                device.synchronize(fence.event)
            event.carried = _carry(slot.read, room.tensor, slot)
            landed = self._enqueue(target, room.tensor, stream, after, timed=timed)
            room.fences = (Fence(device, landed),)
            self._in.hold(room)
        finally:
            del room
            self._in.give_back()
        # The caller may have been interrupted, and then nothing else holds what is being written.
        device.keep_until(landed, target)
        event.landed = landed

    def close(self) -> None:
        """Has the threads carry out what they were given and end, and gives the staging memory back."""
        self._writer.close()
        self._reader.close()
        self._out.close()
        self._in.close()


def _of_device(after: Sequence[Event]) -> list[Event]:
    return [event for event in after if not isinstance(event, StagedEvent)]


def _carry(call: Callable[[Tensor], None], tensor: Tensor, slot: Slot) -> Span:
    """Moves bytes between staging and a tier; returns when it did."""
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
