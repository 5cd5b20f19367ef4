"""The copies of one device: queued, started, completed, counted.

[Note: keepalives]
The source and the target of a copy must outlive the copy, even if every other reference to them is dropped. So the
offloader holds both from the moment that a copy is enqueued until its event has completed. If the copies of a runtime
hold both themselves (``copies_hold_their_ends``), the two are released when the copy ends instead of at the next call
of the library. If the offloader dies first, the runtime holds them.

[Note: queued copies]
A copy cannot be cancelled once a transfer stream has it. If the stream had all copies that fit into the window, a slow
link would keep sources alive that backward has already used, and the device's peak would exceed the peak without
offload. So the offloader gives a stream only:

1. two copies (``_ALWAYS``): one that runs, and one that starts as soon as the first is over. Otherwise the link would
   be idle until the next save, at which the host hands over the next copy;
2. more copies, as many as the link carries in ``_AHEAD_SECONDS``, if their bytes are a small part (``_AHEAD_PART``) of
   the bytes that autograd would hold without offload;
3. on some runtimes, more copies as long as all copies together have no more than ``given_bytes`` bytes.

The other copies wait in the offloader, ordered by an event that is recorded at once. They are cancelled if backward
needs their bytes or their graph dies. On a CPU a transfer stream is a thread, which takes the next copies by itself
when it is idle (``poll_from_thread``).
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, NamedTuple, cast

import torch
from torch import Tensor

from eager_offload.core.schedule import Rate, Windows
from eager_offload.engine.transfer import AWAY, LEAVING, CountedBytes, Transfer
from eager_offload.engine.transfer_log import Copied, TransferLog
from eager_offload.errors import OffloadError, TransferError
from eager_offload.runtime.base import Direction, Event, Layout, Runtime, Stream
from eager_offload.stats import Accounts, KeepReason
from eager_offload.tiers.base import Fence, MustGrow, Slot, Tier
from eager_offload.tiers.forking import UnderWayAtFork, tell_after_fork
from eager_offload.torch_private.autograd import profiled, profiler_is_on

_NO_THREAD = (
    "no transfer thread could be started, so every copy blocks compute. Likely cause: a limit on threads (ulimit -u, "
    "the pids limit of a container or a job) or too little memory for stacks. Raise it, or use fewer workers"
)


#: The number of copies that a stream is always given, of any size.
_ALWAYS = 2
#: A stream is given further copies as long as the link carries them in this time, in seconds.
_AHEAD_SECONDS = 1e-3
#: Most bytes of further copies, as a part of the bytes that autograd would hold without offload. The device's peak may
#: exceed that amount by this part, or by the bytes of the ``_ALWAYS`` copies.
_AHEAD_PART = 1 / 32


class _Queued(NamedTuple):
    source: Tensor | torch.UntypedStorage
    slot: Slot
    #: Events after which ``source`` is final.
    after: tuple[Event, ...]
    key: int | None


class Shortage(NamedTuple):
    """Why a due storage cannot leave yet."""

    #: The size of the slot for which a tier has to grow; 0 if the window is full.
    nbytes: int


@dataclass(slots=True)
class ReservedSlot:
    """A slot of ``nbytes`` bytes that was reserved ahead, or ``None`` if no tier had room."""

    nbytes: int
    slot: Slot | None


class Transfers:
    """The transfers of one device, in both directions. Methods require the lock and never wait or acquire it."""

    #: Whether these are the transfers of a captured step, or of a warm-up for one: see ``captured.py``.
    is_captured: ClassVar[bool] = False

    def __init__(
        self,
        device: torch.device,
        runtime: Runtime,
        tiers: Sequence[Tier],
        accounts: Accounts,
        transfer_log: TransferLog,
        *,
        windows: Windows,
    ) -> None:
        self.device = device
        self.runtime = runtime
        self.tiers = tiers
        #: The accounts' lock guards this object.
        self.accounts, self.lock = accounts, accounts.lock
        self.transfer_log = transfer_log
        #: See [Note: interrupts] in ``offloader.py``.
        self.is_crashed = False
        self.can_capture = runtime.can_capture
        self.windows = windows
        self.inflight_bytes = 0
        #: Bytes that the library holds on the device: newest, leaving, or prefetched.
        self.resident_bytes = 0
        self.out_rate, self.in_rate = Rate(), Rate()
        #: Records of live owners, and records whose owner has died since the last poll.
        self.records: set[Any] = set()
        self.finalized: deque[Any] = deque()
        #: The bound method, kept so that records do not create one each.
        self.on_death = self.finalized.append
        # OrderedDict: to find its first entry, a `dict` walks over all entries that were deleted before it.
        self._queued: OrderedDict[Transfer, _Queued] = OrderedDict()
        self._queued_bytes = 0
        # Running copies, oldest first, each with its keepalive.
        self._out: OrderedDict[Transfer, object] = OrderedDict()
        self._in: OrderedDict[Transfer, object] = OrderedDict()
        self._leaving: dict[CountedBytes, Transfer] = {}
        if not runtime.copies_hold_their_ends:
            runtime.outlive(self, self._out)
            runtime.outlive(self, self._in)
        tell_after_fork(self)

    def after_fork(self) -> None:
        """Takes over the accounts' new lock, and drops the queued copies, which the parent makes.

        The accounts were created earlier, so their ``after_fork`` has run already.
        """
        self.lock = self.accounts.lock
        for transfer in list(self._queued):
            self.cancel(transfer)
            assert transfer.record is not None
            transfer.record.stay(KeepReason.FAILED)
            transfer.record.on_transferred(transfer, UnderWayAtFork())

    def refuses_saves(self) -> bool:
        return self.runtime.is_capturing(self.device)

    @cached_property
    def _stream_out(self) -> Stream:
        return self._stream(Direction.OUT)

    @cached_property
    def _stream_in(self) -> Stream:
        return self._stream(Direction.IN)

    def _stream(self, direction: Direction) -> Stream:
        return self.runtime.transfer_stream(self.device, direction)

    def slot_for(self, nbytes: int, found: ReservedSlot | None) -> Slot | Shortage | None:
        """Returns a slot for ``nbytes`` bytes whose copy out starts now, or the shortage that prevents the copy.

        A storage larger than the window leaves once no other copy out is queued or running. Returns ``None``, with a
        warning, if no tier has room.

        Args:
            found: a reserved slot, used if the size matches. Otherwise the storage that it was reserved for has died,
                and the slot goes back to its tier first. ``found`` is emptied, unless the window is full.
        """
        if self.inflight_bytes + nbytes > self.windows.inflight and (self._out or self._queued):
            self.poll()
            if self.inflight_bytes + nbytes > self.windows.inflight and (self._out or self._queued):
                return Shortage(0)
        if found is not None:
            slot, is_for_these = found.slot, found.nbytes == nbytes
            found.slot, found.nbytes = None, 0
            if is_for_these:
                return slot
            del slot
        try:
            for tier in self.tiers:
                if (slot := tier.at_hand(nbytes)) is not None:
                    if tier is not self.tiers[0]:
                        self._note_tier(tier)
                    return slot
        except MustGrow:
            return Shortage(nbytes)
        self._note_no_room(nbytes)
        return None

    def _note_tier(self, tier: Tier) -> None:
        first = self.tiers[0]

        def message() -> str:
            reason, remedy = first.shortage
            return (
                f"the {first.name} tier is full: saved tensors go to the {tier.name} tier as well. The reason: "
                f"{reason}. To change that, {remedy}"
            )

        self.accounts.fall_back(f"{first.name}_to_{tier.name}", message)

    def _note_no_room(self, nbytes: int, fallback: str | None = None) -> None:
        """Counts, and warns once, that no tier has room.

        Args:
            fallback: the part of the warning on what becomes of the bytes; ``None``: they stay on the device.
        """

        def message() -> str:
            names = " and ".join(tier.name for tier in self.tiers)
            shortages = [(tier.name, *tier.shortage) for tier in self.tiers]
            why = "; ".join(f"{name}: {reason}" for name, reason, _ in shortages)
            cures = [remedy for _, _, remedy in shortages]
            if all(tier.name != "disk" for tier in self.tiers):
                cures.append('let saved tensors go on to disk (tier="auto" and a disk_path)')
            cure = ", or ".join(dict.fromkeys(cures))
            return (
                f"no room for {nbytes} bytes in the {names} tier: {fallback or f'they stay on {self.device}'}. "
                f"The reason: {why}. To change that, {cure}"
            )

        self.accounts.fall_back("budget", message)

    def offload(
        self,
        source: Tensor | torch.UntypedStorage,
        slot: Slot,
        stream: Stream,
        transfer: Transfer,
        *,
        at_once: bool = False,
        keepalive: object = None,
        key: int | None = None,
    ) -> None:
        """Starts or queues a copy of ``source`` into ``slot``, ordered after the work queued on ``stream``.

        ``transfer.nbytes`` bytes already count as resident, until the copy is over.

        Args:
            source: flat ``uint8`` of the slot's size, or a storage if the runtime ``copies_storages``.
            stream: the stream that computes ``source``.
            at_once: whether the copy is waited for soon, and must not be queued: see [Note: queued copies].
            keepalive: the inputs from which ``source`` is computed, held until ``stream`` has computed it.
            key: the key of the saved storage, for traces.
        """
        runtime, counters, record = self.runtime, transfer.counters, transfer.record
        assert record is not None
        # Recorded now, because later work may write to the source. If the host computes, the source is final already.
        after = () if runtime.has_one_stream else (runtime.record(stream),)
        if keepalive is not None and after and not runtime.query(after[0]):
            runtime.keep_until(after[0], keepalive)
        counters_of_save = record.counters  # may be older than the last reset
        counters_of_save.kept_bytes[record.kept] -= record.logical_bytes
        counters_of_save.offloaded_bytes += record.logical_bytes
        counters_of_save.offloaded_tensors += 1
        record.state = LEAVING
        self._leaving[record] = transfer
        counters.bytes_out += transfer.moved
        self.inflight_bytes += transfer.moved
        if self.inflight_bytes > counters.inflight_bytes_peak:
            counters.inflight_bytes_peak = self.inflight_bytes
        is_little = not self._queued and self.inflight_bytes <= runtime.given_bytes
        if at_once or is_little or not runtime.holds_copies_back:
            self._enqueue(transfer, slot, source, slot, after, "offload", key)
        else:
            self._queued[transfer] = _Queued(source, slot, after, key)
            self._queued_bytes += transfer.moved
            self._start_queued()

    @property
    def leaving_bytes(self) -> int:
        return sum(transfer.nbytes for transfer in self._leaving.values() if transfer.is_held)

    def cancel_copy_of(self, record: CountedBytes) -> bool:
        """Cancels the copy out of ``record``'s bytes; ``False`` if there is none, or if it has started."""
        transfer = self._leaving.get(record)
        return transfer is not None and self.cancel(transfer)

    def cancel(self, transfer: Transfer) -> bool:
        """Prevents a copy out from starting, so that its bytes stay; ``False`` if the copy has started."""
        if self._queued.pop(transfer, None) is None:
            return False
        self._queued_bytes -= transfer.moved
        self._leaving.pop(cast(CountedBytes, transfer.record), None)
        self.inflight_bytes -= transfer.moved
        transfer.counters.bytes_out -= transfer.moved
        self.drop_resident(transfer)
        return True

    def _start_queued(self) -> None:
        if self.is_crashed:
            self._queued.clear()
            self._queued_bytes = 0
        while self._queued:
            transfer = next(iter(self._queued))
            if len(self._out) >= _ALWAYS:
                carried = (self.out_rate.value or 0.0) * _AHEAD_SECONDS
                ahead = min(carried, self.accounts.counters.live.without_offload * _AHEAD_PART)
                most = max(ahead, self.runtime.given_bytes)
                if self.inflight_bytes - self._queued_bytes + transfer.moved > most:
                    return
            queued = self._queued.pop(transfer)
            self._queued_bytes -= transfer.moved
            # See [Note: replaced memory].
            source = None if transfer.source is None else transfer.source()
            if source is None or (source.data_ptr() == transfer.address and source.nbytes() >= transfer.source_nbytes):
                self._enqueue(transfer, queued.slot, queued.source, queued.slot, queued.after, "offload", queued.key)
            else:
                self._fail(transfer, _replaced(transfer))

    def _fail(self, transfer: Transfer, failure: OffloadError) -> None:
        self._out[transfer] = None
        self.complete(transfer, failure)

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
        """Starts to copy ``slot`` into new device memory, which may not be read before a ``wait``.

        Args:
            layout: the layout of the new memory, which is allocated on ``stream``.
            what: ``"reload"`` or ``"prefetch"``, for traces.
            after: events that the copy waits for.
            held_after: whether the new memory counts as resident until ``drop_resident``, or only until the copy is
                over.

        Raises:
            torch.OutOfMemoryError, MemoryError: the device is full.
        """
        runtime, counters = self.runtime, self.accounts.counters
        target = runtime.allocate(layout, self.device, stream)
        # [Note: the block's last owner] An allocator hands out a block while kernels of its last owner may still be
        # queued on `stream`. The transfer stream writes to the block, so it waits for an event recorded after the
        # allocation. If the host computes, no kernels are queued.
        if not runtime.has_one_stream:
            after = (runtime.record(stream), *after)
        transfer = Transfer(slot, layout.nbytes, counters)
        transfer.held_after = held_after
        self._enqueue(transfer, target, slot, slot, after, what, key)
        counters.bytes_in += slot.nbytes
        # `add_resident` inlined, to save a call.
        live = transfer.live = counters.live
        transfer.live_nbytes = layout.nbytes
        live.on_device += layout.nbytes
        self.resident_bytes += layout.nbytes
        if self.resident_bytes > counters.resident_bytes_peak or live.on_device > counters.device_bytes_peak:
            counters.note_resident(self.resident_bytes)
        return target, transfer

    def add_resident(self, nbytes: int, transfer: Transfer | None = None) -> None:
        """Counts ``nbytes`` more bytes as held by the library on the device.

        Args:
            transfer: the transfer to count them for, if the stats do not follow their storage.
        """
        self.resident_bytes += nbytes
        counters = self.accounts.counters
        live = counters.live
        if transfer is not None:
            transfer.live, transfer.live_nbytes = live, nbytes
            live.on_device += nbytes
        if self.resident_bytes > counters.resident_bytes_peak or live.on_device > counters.device_bytes_peak:
            counters.note_resident(self.resident_bytes)

    def drop_resident(self, transfer: Transfer) -> None:
        """Stops counting the device memory of ``transfer``. May be called again."""
        if transfer.is_held:
            transfer.is_held = False
            self.resident_bytes -= transfer.nbytes
            if transfer.live is not None:
                transfer.live.on_device -= transfer.live_nbytes

    def mark_consumed(self, transfer: Transfer) -> bool:
        """Marks a reload as consumed: its event has completed, or a stream waits for it. Drops its keepalive. Returns
        whether this was the first call for the reload."""
        if transfer not in self._in:
            return False
        del self._in[transfer]
        if not transfer.held_after:
            self.drop_resident(transfer)
        runtime, counters, event = self.runtime, transfer.counters, transfer.event
        counters.in_seconds += self.in_rate.add(transfer.moved, runtime.copy_seconds(event))
        counters.processor_seconds += runtime.processor_seconds(event)
        return True

    def poll(self) -> None:
        """Handles owners that have died and transfers that are over; never blocks."""
        runtime, finalized, out, back = self.runtime, self.finalized, self._out, self._in
        log = self.transfer_log
        if not runtime.copies_hold_their_ends:
            runtime.poll()
        while finalized:
            record = finalized.popleft()
            self.records.discard(record)
            if not self.is_crashed:  # else the record may be incomplete, or the counts half updated
                record.on_finalized()
        while out and runtime.query((transfer := next(iter(out))).event):
            failure = self._failure_of(transfer.event) if runtime.may_have_failed(transfer.event) else None
            used = transfer.slot
            if failure is None and len(used.fences) == 1 and used.fences[0].event is transfer.event:
                used.fences = ()  # the host knows that the write is over, and no read followed
            self.complete(transfer, failure)
        if self._queued:
            self._start_queued()
        while back and runtime.query((transfer := next(iter(back))).event):
            self.mark_consumed(transfer)  # `wait` raises a failure; without a `wait`, the bytes are not needed
        if log.counted.position < log.end:
            log.count_stalls()

    def _enqueue(
        self, transfer: Transfer, dst: Any, src: Any, slot: Slot, after: Sequence[Event], what: str, key: int | None
    ) -> None:
        """Gives a copy to a transfer stream, as the last use of ``slot``, which is ``dst`` or ``src``.

        Holds both ends: see [Note: keepalives]. A copy out reports its failure to its record; a reload raises.
        """
        runtime, used, is_traced = self.runtime, slot.record, self.transfer_log.on_entry is not None
        keepalive = None if runtime.copies_hold_their_ends else (dst, src)
        is_out = dst is slot
        table, stream = (self._out, self._stream_out) if is_out else (self._in, self._stream_in)
        for fence in used.fences if is_out else ():
            # The next write of a slot comes after its last read. Slots of the disk tier serve several runtimes; the use
            # by another runtime needs no wait, because its thread holds the slot while it reads or writes, and the slot
            # is reused only afterwards.
            if fence.runtime is runtime and not runtime.query(fence.event):
                after = (*after, fence.event)
        try:
            if profiler_is_on():
                with profiled(what):
                    event = runtime.copy(dst, src, stream, after, timed=is_traced)
            else:
                event = runtime.copy(dst, src, stream, after, timed=is_traced)
            # This fence stands for all earlier uses: a write waits for them, a read waits for the write, and all reads
            # are on one stream.
            used.fences = (Fence(runtime, event),)
            transfer.event = event
            table[transfer] = keepalive
        except BaseException as error:  # the copy may have been enqueued: hold both ends until the stream is past it
            event = runtime.record(stream)
            used.fences = (*used.fences, Fence(runtime, event))
            runtime.keep_until(event, keepalive)
            if not (is_out and isinstance(error, OffloadError)):
                raise
            self._fail(transfer, error.with_traceback(None))
            return
        if is_traced:
            self.transfer_log.write(Copied(self.device, what, slot.nbytes, slot.tier, event, key))
        if runtime.ran_inline(event):
            self.accounts.fall_back("no_thread", _NO_THREAD)

    def _failure_of(self, event: Event) -> OffloadError | None:
        try:
            self.runtime.synchronize(event)  # does not block: the event has completed
        except OffloadError as error:
            return error.with_traceback(None)  # the traceback holds this frame, which holds the error: a cycle
        return None

    def complete(self, transfer: Transfer, failure: OffloadError | None) -> None:
        """Ends a copy out, whose event has passed or which later writers wait for; a failed copy keeps its source."""
        if self._out.pop(transfer, self) is self:
            return
        # See [Note: replaced memory].
        source = None if transfer.source is None else transfer.source()
        if source is not None and (source.data_ptr() != transfer.address or source.nbytes() < transfer.source_nbytes):
            failure = _replaced(transfer)
        del source  # so that the storage dies with the record's aliases
        counters, record = transfer.counters, transfer.record
        assert record is not None
        self._leaving.pop(record, None)
        self.inflight_bytes -= transfer.moved
        self.drop_resident(transfer)
        counters.processor_seconds += self.runtime.processor_seconds(transfer.event)
        if failure is None:
            counters.out_seconds += self.out_rate.add(transfer.moved, self.runtime.copy_seconds(transfer.event))
            record.state = AWAY
            if record.is_gone and not record.is_unpacked:
                record.counters.released_bytes += record.logical_bytes
        else:
            counters.bytes_out -= transfer.moved
            is_parents = isinstance(failure, UnderWayAtFork)  # not an error: the copy runs in the parent
            if not is_parents:
                message = f"offloading failed, {record.fallback.format(device=self.device)}: {failure}"
                self.accounts.fall_back("write_failed", message)
            record.stay(KeepReason.FAILED)
        record.on_transferred(transfer, failure)


def _replaced(transfer: Transfer) -> TransferError:
    """Returns the error for a copy whose source storage changed its memory.

    [Note: replaced memory]
    ``share_memory_()``, a queue of ``torch.multiprocessing`` and ``resize_()`` give a storage new memory with the same
    values, and free the old memory at once, even while a copy reads it. Such a copy counts as a failed write, and the
    storage stays on the device with its new memory.
    """
    nbytes = transfer.slot.nbytes
    return TransferError(
        f"the memory of {nbytes} bytes was replaced while it was copied to the {transfer.tier} tier: by "
        "share_memory_(), a queue of torch.multiprocessing, or resize_() of its storage. Do that before the tensor is "
        "saved, or mark the tensor with eager_offload.keep",
        errno=None,
        tier=transfer.tier,
        nbytes=nbytes,
    )
