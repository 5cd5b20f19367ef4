"""The copies of one device on their way: started, taken up, completed, counted.

[Note: keepalives]
What a copy reads and writes must outlive it, whatever drops its references meanwhile. So from the moment that a copy is
enqueued until its event is over, the offloader holds both ends. Where the copy itself does, which its runtime says with
``copies_hold_their_ends``, they go when it ends and not at the next call of the library. When the offloader goes first,
the runtime holds them.

[Note: copies that are held back]
A copy that a transfer stream has been given cannot be taken back. Given all that the window allows, a slow link would
hold sources that backward has long done with, and the device's peak would rise above that without offload.
So a stream has two copies at a time (``_ALWAYS``), and as many for each further disk: the one that runs, and one that
begins when that is over, since the host turns to it only with the next save, and the link would be idle until then. It
has more, as much as it carries in the meantime (``_AHEAD_SECONDS``), if that is little of what the device would hold
anyway (``_AHEAD_PART``). The others wait in the offloader, ordered by an event that is recorded at once; they are
cancelled when backward asks for their bytes, and when their graph goes. On a CPU, where a transfer stream is a thread,
that takes the next ones by itself when it has done what it was given (``poll_from_thread``).
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
    "the system starts no thread for transfers, so compute waits for each of them. What binds is a limit of threads: "
    "ulimit -u, the pids limit of a container or a job, or memory for stacks. Raise it, or start fewer workers"
)


#: How many copies a stream is given, however large they are.
_ALWAYS = 2
#: For how long a stream is given more; seconds.
_AHEAD_SECONDS = 1e-3
#: Of the bytes that autograd would hold without offload, the part up to which a stream is given more. It is by so much,
#: or by the copies that it always has, that the device's peak may rise above that.
_AHEAD_PART = 1 / 32


class _Queued(NamedTuple):
    """What a copy out will be made of, when its stream may have it."""

    source: Tensor | torch.UntypedStorage
    slot: Slot
    #: Behind what computes ``source``.
    after: tuple[Event, ...]
    key: int | None


class Shortage(NamedTuple):
    """What a storage that has to leave waits for."""

    #: Of a slot for which a tier has to grow; 0 where the window is full.
    nbytes: int


@dataclass(slots=True)
class ReservedSlot:
    """What came of a search for a slot of ``nbytes`` bytes; nothing else holds the slot."""

    nbytes: int
    slot: Slot | None


class Transfers:
    """The transfers of one device, in both directions: what needs the lock, see ``DeviceOffloader.locked``.

    Nothing here waits, and nothing takes the lock.
    """

    #: Whether they are those of a step of which a graph is captured: see ``captured.py``.
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
        #: Whose lock all of this needs.
        self.accounts, self.lock = accounts, accounts.lock
        self.transfer_log = transfer_log
        #: See [Note: an interrupt is a crash of the offloader] in ``offloader.py``.
        self.is_crashed = False
        #: Of the runtime; here, since every pack and unpack asks.
        self.can_capture = runtime.can_capture
        #: How much may be on its way, each way.
        self.windows = windows
        #: Bytes on their way out.
        self.inflight_bytes = 0
        #: Bytes on the device that the library holds: newest, on their way out, brought back and not asked for yet.
        self.resident_bytes = 0
        self.out_rate, self.in_rate = Rate(), Rate()
        #: What is known of everything that has a living owner, and of what has died since the last poll.
        self.records: set[Any] = set()
        self.finalized: deque[Any] = deque()
        #: Its ``append``, for the records: each would make another one.
        self.on_death = self.finalized.append
        # Ordered ones: to find the first entry of a `dict`, Python walks over all that was taken out before it.
        self._queued: OrderedDict[Transfer, _Queued] = OrderedDict()
        self._held_back_bytes = 0
        # What is on its way, each with its keepalive; the one that started first in front.
        self._out: OrderedDict[Transfer, object] = OrderedDict()
        self._in: OrderedDict[Transfer, object] = OrderedDict()
        #: Copies out that are not over, by what counts their bytes.
        self._leaving: dict[CountedBytes, Transfer] = {}
        if not runtime.copies_hold_their_ends:
            runtime.outlive(self, self._out)
            runtime.outlive(self, self._in)
        tell_after_fork(self)

    def after_fork(self) -> None:
        """The accounts, which are older, have another lock by now; copies that no stream was given are the parent's."""
        self.lock = self.accounts.lock
        for transfer in list(self._queued):
            self.cancel(transfer)
            assert transfer.record is not None
            transfer.record.stay(KeepReason.FAILED)
            transfer.record.on_transferred(transfer, UnderWayAtFork())

    def refuses_saves(self) -> bool:
        """Whether what is saved now stays."""
        return self.runtime.is_capturing(self.device)

    @cached_property
    def _stream_out(self) -> Stream:
        return self._stream(Direction.OUT)

    @cached_property
    def _stream_in(self) -> Stream:
        return self._stream(Direction.IN)

    def _stream(self, direction: Direction) -> Stream:
        return self.runtime.transfer_stream(self.device, direction)

    # -- out --------------------------------------------------------------------------------------------------------

    def slot_for(self, nbytes: int, found: ReservedSlot | None) -> Slot | Shortage | None:
        """Returns a slot for ``nbytes`` bytes that are to leave now, or what they wait for.

        A storage larger than the window may leave alone.

        Args:
            found: a slot is taken if the size matches. One that was found for others, which have died meanwhile, goes
                back first. None is found any more afterwards.

        Returns:
            ``None`` where no tier has room, which is counted and warned of.
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
        """Counts, and warns once, that a slot is in a further ``tier`` since the first one is full."""
        first = self.tiers[0]

        def message() -> str:
            reason, remedy = first.shortage
            return (
                f"the {first.name} tier is full: saved tensors go to the {tier.name} tier as well. The reason: "
                f"{reason}. To change that, {remedy}"
            )

        self.accounts.fall_back(f"{first.name}_to_{tier.name}", message)

    def _note_no_room(self, nbytes: int, fallback: str | None = None) -> None:
        """Counts, and warns once, that no tier has room; ``fallback`` says what becomes of the bytes."""

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
        """Has ``source`` copied into ``slot``, as it is after what ``stream`` has to do so far.

        ``transfer.nbytes`` bytes count as resident already, and do so until the copy is over.

        Args:
            source: flat ``uint8``, of the slot's size; or a storage, where the runtime ``copies_storages``.
            stream: that which computes ``source``.
            at_once: whether the copy is waited for soon; else see [Note: copies that are held back].
            keepalive: what ``source`` is computed from, which is held until ``stream`` has got so far.
            key: of the saved storage, for traces.
        """
        runtime, counters, record = self.runtime, transfer.counters, transfer.record
        assert record is not None
        # Noted now: what computes later may write over the source. Where the host computes, it has.
        after = () if runtime.has_one_stream else (runtime.record(stream),)
        if keepalive is not None and after and not runtime.query(after[0]):
            runtime.keep_until(after[0], keepalive)
        counters_of_save = record.counters  # before a reset, it may be
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
            self._held_back_bytes += transfer.moved
            self._start_held_back()

    @property
    def leaving_bytes(self) -> int:
        """Bytes of the device that are held for copies out."""
        return sum(transfer.nbytes for transfer in self._leaving.values() if transfer.is_held)

    def cancel_copy_of(self, record: CountedBytes) -> bool:
        """Does ``cancel`` for the copy out of what ``record`` counts; ``False`` where there is none."""
        transfer = self._leaving.get(record)
        return transfer is not None and self.cancel(transfer)

    def cancel(self, transfer: Transfer) -> bool:
        """Keeps a copy out from starting, so that its bytes stay; ``False`` where it has started."""
        if self._queued.pop(transfer, None) is None:
            return False
        self._held_back_bytes -= transfer.moved
        self._leaving.pop(cast(CountedBytes, transfer.record), None)
        self.inflight_bytes -= transfer.moved
        transfer.counters.bytes_out -= transfer.moved
        self.drop_resident(transfer)
        return True

    def _start_held_back(self) -> None:
        """Gives the transfer stream as many copies as it may have."""
        if self.is_crashed:
            self._queued.clear()
            self._held_back_bytes = 0
        while self._queued:
            transfer = next(iter(self._queued))
            if len(self._out) >= _ALWAYS:
                carried = (self.out_rate.value or 0.0) * _AHEAD_SECONDS
                ahead = min(carried, self.accounts.counters.live.without_offload * _AHEAD_PART)
                most = max(ahead, self.runtime.given_bytes)
                if self.inflight_bytes - self._held_back_bytes + transfer.moved > most:
                    return
            what = self._queued.pop(transfer)
            self._held_back_bytes -= transfer.moved
            # See [Note: memory that is replaced].
            source = None if transfer.source is None else transfer.source()
            if source is None or (source.data_ptr() == transfer.address and source.nbytes() >= transfer.source_nbytes):
                self._enqueue(transfer, what.slot, what.source, what.slot, what.after, "offload", what.key)
            else:
                self._fail(transfer, _replaced(transfer))

    def _fail(self, transfer: Transfer, failure: OffloadError) -> None:
        """A copy out could not be enqueued."""
        self._out[transfer] = None
        self.complete(transfer, failure)

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
        """Starts to copy ``slot`` into new memory of the device; which may not be read before a ``wait``.

        Args:
            layout: of the new memory, which is allocated on ``stream``.
            what: ``"reload"`` or ``"prefetch"``, for traces.
            after: what the copy comes after.
            held_after: whether the new memory counts until ``drop_resident``; else until the copy is over.

        Raises:
            torch.OutOfMemoryError, MemoryError: the device has no memory for it.
        """
        runtime, counters = self.runtime, self.accounts.counters
        target = runtime.allocate(layout, self.device, stream)
        # [Note: the block's last owner] An allocator hands out a block whose last owner's kernels may still be queued
        # on `stream`. The transfer stream writes to it, so it waits for an event recorded after the allocation.
        # Where compute has one stream only, that is the host, which has done what it was asked to.
        if not runtime.has_one_stream:
            after = (runtime.record(stream), *after)
        transfer = Transfer(slot, layout.nbytes, counters)
        transfer.held_after = held_after
        self._enqueue(transfer, target, slot, slot, after, what, key)
        counters.bytes_in += slot.nbytes
        # As in `add_resident`, which would be a call more.
        live = transfer.live = counters.live
        transfer.live_nbytes = layout.nbytes
        live.on_device += layout.nbytes
        self.resident_bytes += layout.nbytes
        if self.resident_bytes > counters.resident_bytes_peak or live.on_device > counters.device_bytes_peak:
            counters.note_resident(self.resident_bytes)
        return target, transfer

    # -- either way -------------------------------------------------------------------------------------------------

    def add_resident(self, nbytes: int, transfer: Transfer | None = None) -> None:
        """The library holds ``nbytes`` bytes more on the device.

        Args:
            transfer: for which it does, if they are in no storage that the stats follow.
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
        """The library does not hold the device's bytes for ``transfer`` any more; may be called again."""
        if transfer.is_held:
            transfer.is_held = False
            self.resident_bytes -= transfer.nbytes
            if transfer.live is not None:
                transfer.live.on_device -= transfer.live_nbytes

    def mark_consumed(self, transfer: Transfer) -> bool:
        """A stream waits for a reload, or its event is over: what the transfer still holds it need not hold any more.

        Returns:
            Whether it was the first time.
        """
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
        """Notices owners that have died and transfers that are over; never blocks."""
        runtime, finalized, out, back = self.runtime, self.finalized, self._out, self._in
        log = self.transfer_log
        if not runtime.copies_hold_their_ends:
            runtime.poll()
        while finalized:
            record = finalized.popleft()
            self.records.discard(record)
            if not self.is_crashed:  # else it may be half made, or what it is entered in half changed
                record.on_finalized()
        while out and runtime.query((transfer := next(iter(out))).event):
            failure = self._failure_of(transfer.event) if runtime.may_have_failed(transfer.event) else None
            used = transfer.slot
            if failure is None and len(used.fences) == 1 and used.fences[0].event is transfer.event:
                used.fences = ()  # the host knows that it has passed, and no read has come
            self.complete(transfer, failure)
        if self._queued:
            self._start_held_back()
        while back and runtime.query((transfer := next(iter(back))).event):
            self.mark_consumed(transfer)  # a failure is raised where a wait comes; if none does it harms nothing
        if log.counted.position < log.end:
            log.count_stalls()

    def _enqueue(
        self, transfer: Transfer, dst: Any, src: Any, slot: Slot, after: Sequence[Event], what: str, key: int | None
    ) -> None:
        """Gives a transfer stream a copy, as the last use of ``slot``; one of ``dst`` and ``src`` is the slot.

        See [Note: keepalives]. A copy out that fails here is told to its record; one back raises.
        """
        runtime, used, is_traced = self.runtime, slot.record, self.transfer_log.on_entry is not None
        keepalive = None if runtime.copies_hold_their_ends else (dst, src)
        is_out = dst is slot
        table, stream = (self._out, self._stream_out) if is_out else (self._in, self._stream_in)
        for fence in used.fences if is_out else ():
            # A slot's next write comes after its last read. The disk tier serves several runtimes. For the use that
            # another one made of a slot there is nothing to wait for: its thread holds the slot while it reads or
            # writes it, so that it is given anew only afterwards.
            if fence.runtime is runtime and not runtime.query(fence.event):
                after = (*after, fence.event)
        try:
            if profiler_is_on():
                with profiled(what):
                    event = runtime.copy(dst, src, stream, after, timed=is_traced)
            else:
                event = runtime.copy(dst, src, stream, after, timed=is_traced)
            # It stands for all earlier uses: a write waits for them, and a read for the write; reads are on one stream.
            used.fences = (Fence(runtime, event),)
            transfer.event = event
            table[transfer] = keepalive
        except BaseException as error:  # the copy may have been enqueued
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
        """Returns what made a copy that is over fail, if anything."""
        try:
            self.runtime.synchronize(event)  # nothing is left to wait for
        except OffloadError as error:
            return error.with_traceback(None)  # it holds this frame, which holds the error: a cycle
        return None

    def complete(self, transfer: Transfer, failure: OffloadError | None) -> None:
        """A copy out is over, or whatever writes over its source comes after it: that may go, if nothing failed."""
        if self._out.pop(transfer, self) is self:
            return
        # See [Note: memory that is replaced].
        source = None if transfer.source is None else transfer.source()
        if source is not None and (source.data_ptr() != transfer.address or source.nbytes() < transfer.source_nbytes):
            failure = _replaced(transfer)
        del source  # which goes with the record's aliases
        counters, record = transfer.counters, transfer.record
        assert record is not None
        self._leaving.pop(record, None)
        self.inflight_bytes -= transfer.moved
        self.drop_resident(transfer)
        counters.processor_seconds += self.runtime.processor_seconds(transfer.event)
        if failure is None:
            counters.out_seconds += self.out_rate.add(transfer.moved, self.runtime.copy_seconds(transfer.event))
            record.state = AWAY
            if record.is_gone and not record.asked:
                record.counters.released_bytes += record.logical_bytes
        else:
            counters.bytes_out -= transfer.moved
            is_parents = isinstance(failure, UnderWayAtFork)  # nothing is wrong with it there
            if not is_parents:
                message = f"offloading failed, {record.fallback.format(device=self.device)}: {failure}"
                self.accounts.fall_back("write_failed", message)
            record.stay(KeepReason.FAILED)
        record.on_transferred(transfer, failure)


def _replaced(transfer: Transfer) -> TransferError:
    """Returns the error of a copy during which its source was given other memory.

    [Note: memory that is replaced]
    A storage keeps its identity while ``share_memory_()``, a queue of ``torch.multiprocessing`` or ``resize_()`` gives
    it other memory with the same values and frees the old one at once, even in the midst of a read. So a copy during
    which that happened counts as a write that failed, and the storage stays with its new memory.
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
