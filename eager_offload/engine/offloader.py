"""The transfers of one device: started, waited for, completed, counted.

    eager code      decides at run time which saved storage leaves and which comes back    (``eager/``)
    compiled code   was told by its graph                                                  (``compile/``)
    both            reserve, offload, reload, wait, poll                                   DeviceOffloader

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

[Note: a step that is prepared for a capture]
A captured step does what the last step before it did, so no decision of that one may depend on how fast the host or
the link is. While one is prepared (``Accounts.preparing``) no copy is held back, hence none is cancelled, and the host
takes a copy out to be over when it has waited for it and not when an event says so. So a source goes when the window
has no room for the next one, as in the graph, where no event is ever over: which bytes leave, and where each source
goes, follow from the saves and the settings.

[Note: an interrupt is a crash of the offloader]
A KeyboardInterrupt, or what a signal handler raises, may come between any two lines. No code is ordered for that: an
offloader in whose midst one came is *crashed*. From then on nothing more leaves through it, nothing is brought back
early, and the counters are approximate. What its graphs own stays theirs: a source is held until its copy is known to
be over, so a handle has its bytes either on the device or in a slot. The next outermost ``with`` has a new offloader.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from eager_offload._torch import profiled, profiler_is_on
from eager_offload.engine.transfer import CountedBytes, Transfer
from eager_offload.engine.transfer_log import Copied, TransferLog, Waited
from eager_offload.errors import OffloadError, TransferError, captured, reentered, warn
from eager_offload.live_bytes import LiveBytes
from eager_offload.runtime.base import Direction, Event, Layout, Runtime, Stream
from eager_offload.schedule import Rate, Windows
from eager_offload.stats import Accounts
from eager_offload.tiers.base import Fence, MustGrow, Slot, Tier
from eager_offload.tiers.forking import tell_after_fork

_NO_THREAD = (
    "the system starts no thread for transfers, so compute waits for each of them. What binds is a limit of threads: "
    "ulimit -u, the pids limit of a container or a job, or memory for stacks. Raise it, or start fewer workers"
)


#: How many copies a stream is given for each lane of a tier, however large they are.
_ALWAYS = 2
#: For how long a stream is given more; seconds.
_AHEAD_SECONDS = 1e-3
#: Of the bytes that autograd would hold without offload, the part up to which a stream is given more. It is by so much,
#: or by the copies that it always has, that the device's peak may rise above that.
_AHEAD_PART = 1 / 32

#: What has travelled is of no use: its source stays, as after a failed write.
REFUSED = OffloadError("a codec cannot hold the values of a saved tensor")


class _HeldBack(NamedTuple):
    """What a copy out will be made of, when its stream may have it."""

    source: Tensor | torch.UntypedStorage
    slot: Slot
    #: Stands behind what computes ``source``.
    computed: Event
    key: int | None


class Lack(NamedTuple):
    """What a storage that has to leave waits for."""

    #: Of a slot for which a tier has to grow; 0 where the window is full.
    nbytes: int


@dataclass(slots=True)
class FoundSlot:
    """What came of a search for a slot of ``nbytes`` bytes; nothing else holds the slot."""

    nbytes: int
    slot: Slot | None


class Census(NamedTuple):
    """How much an offloader knows of; everything is 0 once all graphs are gone and transfers are over."""

    #: Storages, views and host tensors that are alive, or whose end was not noticed yet.
    records: int
    in_flight: int
    resident_bytes: int
    used_bytes: int


class DeviceOffloader:
    """The transfers of one device, in both directions. Callers hold ``lock``, unless a method says otherwise."""

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
        self.accounts = accounts
        self.transfer_log = transfer_log
        #: See [Note: an interrupt is a crash of the offloader]; callers set it with ``crash``.
        self.is_crashed = False
        #: Of the runtime; here, since every pack and unpack asks.
        self.can_capture = runtime.can_capture
        #: That of the accounts.
        self.lock = accounts.lock
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
        self._held_back: OrderedDict[Transfer, _HeldBack] = OrderedDict()
        self._held_back_bytes = 0
        # What is on its way, each with its keepalive; the one that started first in front.
        self._out: OrderedDict[Transfer, object] = OrderedDict()
        self._in: OrderedDict[Transfer, object] = OrderedDict()
        #: Copies out that are not over, by what counts their bytes.
        self._leaving: dict[CountedBytes, Transfer] = {}
        self._warns_later = False
        self._deferred: deque[str] = deque()
        runtime.outlive(self, self._out)
        runtime.outlive(self, self._in)
        runtime.poll_when_idle(self)
        tell_after_fork(self)

    def after_fork(self) -> None:
        """The accounts, which are older, have another lock by now; copies that no stream was given are the parent's."""
        self.lock = self.accounts.lock
        for transfer in self.held_back():
            self.cancel(transfer)
            assert transfer.record is not None
            transfer.record.on_transferred(transfer, OffloadError("the process has forked before this copy began"))

    def census(self) -> Census:
        """What is known of at this moment. Takes the lock."""
        with self.lock, self.crashing():
            self.poll()
            used_bytes = sum(tier.used_bytes for tier in self.tiers)
            in_flight = len(self._held_back) + len(self._out) + len(self._in)
            if self.is_crashed:  # not all that has died is known, and bytes are not counted any more
                alive = sum(record() is not None for record in self.records)
                return Census(alive, in_flight, 0, used_bytes)
            return Census(len(self.records), in_flight, self.resident_bytes, used_bytes)

    def refuse_call(self, what: str) -> None:
        """Nothing may be begun in the midst of a call, nor while the current stream is captured; without the lock.

        Raises:
            OffloadError: it is so.
        """
        if self.lock._is_owned():  # see [Note: reentry] in tiers/forking.py
            raise reentered()
        if self.can_capture and self.is_capturing():
            raise captured(what)

    def is_capturing(self) -> bool:
        """Whether the calling thread's work goes into a graph that is being captured; without the lock."""
        return self.can_capture and self.runtime.is_capturing(self.device)

    def crash(self) -> None:
        """An exception that is not the library's own has come in the midst of a call: see the note."""
        self.is_crashed = self.accounts.counters.is_approximate = True
        self.accounts.counters.live = LiveBytes()  # what dies from here on is not counted
        self._leaving = {}  # one may be in here that has not started, and would hold its source

    @contextmanager
    def crashing(self) -> Iterator[None]:
        """Around what must not be left half done: an exception that is not the library's own crashes it."""
        try:
            yield
        except OffloadError:
            raise
        except BaseException:
            self.crash()
            raise

    @cached_property
    def _stream_out(self) -> Stream:
        return self.runtime.transfer_stream(self.device, Direction.OUT)

    @cached_property
    def _stream_in(self) -> Stream:
        return self.runtime.transfer_stream(self.device, Direction.IN)

    # -- out --------------------------------------------------------------------------------------------------------

    def has_room(self, nbytes: int) -> bool:
        """Whether ``nbytes`` more may be on their way out. A storage larger than the window may, alone."""
        return not (self._out or self._held_back) or self.inflight_bytes + nbytes <= self.windows.inflight

    def room(self, nbytes: int, *, grows: bool = True) -> Slot | None:
        """Room in the first tier that has it; ``None`` where none has.

        Args:
            grows: whether a tier may grow for it, for which the host waits: not with the lock held.

        Raises:
            MustGrow: it would have to, and may not.
        """
        first = self.tiers[0]
        for tier in self.tiers:
            try:
                with self.lock:  # what calls in the midst of it, a signal handler say, is to be refused
                    slot = tier.at_hand(nbytes)
            except MustGrow:
                if not grows:
                    raise
                slot = self._grow(tier, nbytes)
            if slot is not None:
                if tier is not first and self._demote(f"{first.name}_to_{tier.name}"):
                    reason, remedy = first.shortage
                    self.warn(
                        f"the {first.name} tier is full: saved tensors go to the {tier.name} tier as well. The reason: "
                        f"{reason}. To change that, {remedy}"
                    )
                return slot
        return None

    def _grow(self, tier: Tier, nbytes: int) -> Slot | None:
        """Room in ``tier``, which grows for it; the wait is counted."""
        with self._counting_wait(None):
            slot = tier.reserve(nbytes)
        if message := tier.warning():
            self.warn(message)
        return slot

    def _demote(self, what: str) -> bool:
        with self.lock:
            return self.accounts.counters.demote(what)

    def reserve(self, nbytes: int, *, grows: bool = True, fallback: str | None = None) -> Slot | None:
        """The same, but counted and warned of where none has.

        Args:
            fallback: what becomes of the bytes then, for the warning; ``None``: they stay where they are.
        """
        slot = self.room(nbytes, grows=grows)
        if slot is None and self._demote("budget"):
            names = " and ".join(tier.name for tier in self.tiers)
            with self.lock:
                shortages = [(tier.name, *tier.shortage) for tier in self.tiers]
            why = "; ".join(f"{name}: {reason}" for name, reason, _ in shortages)
            cures = [remedy for _, _, remedy in shortages]
            if all(tier.name != "disk" for tier in self.tiers):
                cures.append('let saved tensors go on to disk (tier="auto" and a disk_path)')
            cure = ", or ".join(dict.fromkeys(cures))
            self.warn(
                f"no room for {nbytes} bytes in the {names} tier: {fallback or f'they stay on {self.device}'}. "
                f"The reason: {why}. To change that, {cure}"
            )
        return slot

    def slot_for(self, nbytes: int, found: FoundSlot | None) -> Slot | None:
        """A slot with the lock held: what was ``found`` for as many bytes, which nothing is found for then; else anew.

        What was found for others, which have died meanwhile, say, goes back first.

        Raises:
            MustGrow: a tier has to grow for it.
        """
        if found is not None:
            slot, is_for_these = found.slot, found.nbytes == nbytes
            found.slot, found.nbytes = None, 0
            if is_for_these:
                return slot
            del slot
        return self.reserve(nbytes, grows=False)

    def go_on(self, lack: Lack | None, start: Callable[[FoundSlot | None], Lack | None], *, waits: bool = True) -> None:
        """Waits for what copies out lack, and starts them; the lock is not held, and other threads may take the room.

        Args:
            start: is called with the lock held and what the first of them lacked; returns what is lacking next.
            waits: for room in the window; else what finds none does not start.
        """
        while lack is not None:
            found = None
            if lack.nbytes:
                found = FoundSlot(lack.nbytes, self.reserve(lack.nbytes))
            elif not (waits and self.wait_for_room()):
                return
            with self.lock:
                lack = None if self.is_crashed else start(found)

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
        computed: Event = None,
    ) -> None:
        """Has ``source`` copied into ``slot``, as it is after what ``stream`` has to do so far.

        ``transfer.nbytes`` bytes count as resident already, and do so until the copy is over.

        Args:
            source: flat ``uint8``, of the slot's size; or a storage, where the runtime ``copies_storages``.
            stream: that which computes ``source``.
            at_once: whether the copy is waited for soon; else see [Note: copies that are held back].
            keepalive: what ``source`` is computed from, which is held until ``stream`` has got so far.
            key: of the saved storage, for traces.
            computed: an event that stands behind what computes ``source``, where there is one already.
        """
        counters, record = transfer.counters, transfer.record
        assert record is not None
        computed = self.runtime.record(stream) if computed is None else computed
        if keepalive is not None and not self.runtime.query(computed):
            self.runtime.keep_until(computed, keepalive)
        record.leave()
        self._leaving[record] = transfer
        counters.bytes_out += transfer.moved
        self.inflight_bytes += transfer.moved
        if self.inflight_bytes > counters.inflight_bytes_peak:
            counters.inflight_bytes_peak = self.inflight_bytes
        runtime = self.runtime
        is_little = not self._held_back and self.inflight_bytes <= runtime.given_bytes
        if at_once or is_little or self.accounts.preparing or not runtime.holds_copies_back:
            self._start(transfer, source, slot, computed, key)
        else:
            self._held_back[transfer] = _HeldBack(source, slot, computed, key)
            self._held_back_bytes += transfer.moved
            self._start_held_back()

    def held_back(self) -> list[Transfer]:
        """The copies out that no stream was given yet."""
        return list(self._held_back)

    @property
    def leaving_bytes(self) -> int:
        """Bytes of the device that are held for copies out."""
        return sum(transfer.nbytes for transfer in self._leaving.values() if transfer.is_held)

    def hand_on(self, record: CountedBytes, heir: CountedBytes) -> None:
        """Has ``heir`` count the bytes of the copy out of what ``record`` counts, where that is on its way."""
        transfer = self._leaving.pop(record, None)
        if transfer is not None:
            transfer.record = heir
            self._leaving[heir] = transfer

    def cancel_copy_of(self, record: CountedBytes) -> bool:
        """Does ``cancel`` for the copy out of what ``record`` counts; ``False`` where there is none."""
        transfer = self._leaving.get(record)
        return transfer is not None and self.cancel(transfer)

    def cancel(self, transfer: Transfer) -> bool:
        """Keeps a copy out from starting, so that its bytes stay; ``False`` where it has started."""
        if self._held_back.pop(transfer, None) is None:
            return False
        self._held_back_bytes -= transfer.moved
        self._leaving.pop(cast(CountedBytes, transfer.record), None)
        self.inflight_bytes -= transfer.moved
        transfer.counters.bytes_out -= transfer.moved
        self.release(transfer)
        return True

    def _start_held_back(self) -> None:
        """Gives the transfer stream as many copies as it may have."""
        if self.is_crashed:
            self._held_back.clear()
            self._held_back_bytes = 0
        while self._held_back:
            transfer = next(iter(self._held_back))
            if len(self._out) >= _ALWAYS * max([tier.lanes for tier in self.tiers]):
                carried = (self.out_rate.value or 0.0) * _AHEAD_SECONDS
                ahead = min(carried, self.accounts.counters.live.without_offload * _AHEAD_PART)
                most = max(ahead, self.runtime.given_bytes)
                if self.inflight_bytes - self._held_back_bytes + transfer.moved > most:
                    return
            what = self._held_back.pop(transfer)
            self._held_back_bytes -= transfer.moved
            if (failure := replaced(transfer)) is not None:
                self._fail(transfer, failure)
            else:
                self._start(transfer, *what)

    def _start(self, transfer: Transfer, source: Any, slot: Slot, computed: Event, key: int | None) -> None:
        """Gives the transfer stream a copy out; the arguments are those of ``_HeldBack``."""
        runtime = self.runtime
        after: tuple[Event, ...] = (computed,)
        for fence in slot.record.fences:
            # The disk tier serves several runtimes. For the use that another one made of a slot there is nothing to
            # wait for: its thread holds the slot while it reads or writes it, so that it is given anew only afterwards.
            if fence.runtime is runtime and not runtime.query(fence.event):
                after = (*after, fence.event)
        try:
            self._enqueue(self._out, transfer, slot, source, slot, self._stream_out, "offload", after, key)
        except OffloadError as error:
            self._fail(transfer, error.with_traceback(None))

    def _fail(self, transfer: Transfer, failure: OffloadError) -> None:
        """A copy out could not be enqueued."""
        self._out[transfer] = None
        self.complete(transfer, failure)

    def wait_for_room(self) -> bool:
        """Waits until the oldest copy out is over. The lock is not held: other threads have no part in the wait.

        [Note: a full window] The host waits, and the source goes when the event is over. It would also be free to go
        once its allocating stream waits for the event, without the host; but that stream need not be the one that was
        current at pack (a batch that another stream loaded), and the allocator would hand its block out too early.

        Returns:
            ``False`` where it is of a process that this one was forked from, and never will be.
        """
        with self.lock:
            oldest = next(iter(self._out), None)
        if oldest is not None:
            with suppress(OffloadError):  # `poll` sees to that
                self.wait(oldest, None, "window is full", fills_window=True)
        with self.lock:
            self.poll()
            return oldest not in self._out

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
            held_after: whether the new memory counts as the library's until ``release``; else until the copy is over.

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
        self._enqueue(self._in, transfer, target, slot, slot, self._stream_in, what, after, key)
        counters.bytes_in += slot.record.carried
        self.hold(transfer.nbytes)
        return target, transfer

    # -- either way -------------------------------------------------------------------------------------------------

    def wait(self, transfer: Transfer, stream: Stream | None, what: str, *, fills_window: bool = False) -> None:
        """Makes ``stream`` wait for a transfer, or where that is ``None`` the host; the wait is counted.

        The lock is not held. On a CPU device the host waits for its own stream.

        Args:
            what: is waited for, for traces.
            fills_window: whether it is waited for so that others may leave.

        Raises:
            OffloadError: the transfer failed, and the host knows that already.
        """
        runtime, event = self.runtime, transfer.event
        transfer.is_awaited = transfer.is_awaited or stream is None
        if runtime.query(event):
            runtime.wait(stream, event) if stream is not None else runtime.synchronize(event)
            return
        with self._counting_wait(stream, event, what=what, fills_window=fills_window):
            runtime.wait(stream, event) if stream is not None else runtime.synchronize(event)

    @contextmanager
    def _counting_wait(
        self, stream: Stream | None, event: Event = None, *, what: str = "", fills_window: bool = False
    ) -> Iterator[None]:
        """Logs what the host and compute wait inside. The lock is not held.

        [Note: stalls] What the host has waited is known when it goes on. What compute has waited is not, where a device
        lies behind its host: timestamps of the stream on either side of the wait tell it, once the device has passed
        both. They are next to each other in the stream, so they lie apart by what the stream waited for the transfer,
        or had nothing to do while the host waited; a stream that is busy until then has not waited, whatever the host
        did. Nothing is timed in a capture, in which nothing runs.

        Args:
            stream: that waits; ``None``: the host does, and what computes is the current one.
            event: of a transfer that is waited for; ``None``: a tier grows, or all of several transfers are.
            what: as in ``Waited``.
        """
        runtime, counters = self.runtime, self.accounts.counters
        compute = runtime.current_stream(self.device) if stream is None else stream
        before = None if self.is_capturing() else runtime.moment(compute)
        called = runtime.moment(None)
        try:
            yield
        finally:
            returned = runtime.moment(None)
            seconds = runtime.seconds_between(called, returned)
            assert seconds is not None, "the host's moments have come"
            after = None if before is None else runtime.moment(compute)
            if runtime.has_one_stream:  # compute is the host
                before, after = called, returned
            with self.lock:
                if stream is None or runtime.has_host_wait(event):
                    counters.host_wait_seconds += seconds
                if before is not None:
                    waited = Waited(self.device, runtime, what, fills_window, before, after, called, counters)
                    self.transfer_log.write(waited)

    def hold(self, nbytes: int) -> None:
        """The library holds ``nbytes`` bytes more on the device."""
        self.resident_bytes += nbytes
        counters = self.accounts.counters
        if self.resident_bytes + counters.live.kept > counters.device_bytes_peak:
            counters.note_resident(self.resident_bytes)
        elif self.resident_bytes > counters.resident_bytes_peak:
            counters.resident_bytes_peak = self.resident_bytes

    def release(self, transfer: Transfer) -> None:
        """The library does not hold the device's bytes for ``transfer`` any more; may be called again."""
        if transfer.is_held:
            transfer.is_held = False
            self.resident_bytes -= transfer.nbytes

    def shrink(self, transfer: Transfer, nbytes: int) -> None:
        """For a transfer that is on its way the library holds ``nbytes`` bytes of the device from here on."""
        if transfer.is_held:
            self.resident_bytes -= transfer.nbytes - nbytes
        transfer.nbytes = nbytes

    def take_up(self, transfer: Transfer) -> bool:
        """A stream waits for a reload, or its event is over: what the transfer still holds it need not hold any more.

        Returns:
            Whether it was the first time.
        """
        if transfer not in self._in:
            return False
        del self._in[transfer]
        if not transfer.held_after:
            self.release(transfer)
        counters, spans = transfer.counters, self.runtime.spans(transfer.event)
        seconds = self.runtime.seconds_between(spans[0].began, spans[0].ended) if spans else None
        counters.in_seconds += self.in_rate.add(transfer.slot.carried, seconds)
        counters.processor_seconds += self.runtime.processor_seconds(transfer.event)
        return True

    def poll(self) -> None:
        """Notices owners that have died and transfers that are over; never blocks."""
        runtime, finalized, out, back = self.runtime, self.finalized, self._out, self._in
        preparing, log = self.accounts.preparing, self.transfer_log
        runtime.poll()
        while finalized:
            record = finalized.popleft()
            self.records.discard(record)
            if not self.is_crashed:  # else it may be half made, or what it is entered in half changed
                record.on_finalized()
        while out and runtime.query((transfer := next(iter(out))).event):
            if preparing and not transfer.is_awaited:
                break
            self._complete_queried(transfer)
        if self._held_back:
            self._start_held_back()
        while back and runtime.query((transfer := next(iter(back))).event):
            self.take_up(transfer)  # a failure is raised where a wait comes; if none does it harms nothing
        if log.counted.position < log.end:
            log.count_stalls()
        while self._deferred and not self._warns_later:
            self.warn(self._deferred.popleft())

    def holds_copies(self) -> bool:
        """Returns whether there are copies out that no stream was given yet."""
        return bool(self._held_back)

    def poll_from_thread(self) -> bool:
        """``poll``, for a transfer thread: there may be no further call. ``False`` where another thread is inside.

        It does not wait for the lock, whose holder may be waiting for the thread, and it does not warn: a warning
        belongs to a line of the user's, so the next call from there gives it.
        """
        if not self.lock.acquire(blocking=False):
            return False
        try:
            self._warns_later = True
            self.poll()
        finally:
            self._warns_later = False
            self.lock.release()
        return True

    def synchronize(self) -> None:
        """Waits until nothing is on its way and compute has passed its waits. What starts meanwhile is not waited for.

        Takes the lock.
        """
        with self.crashing():
            self.wait_until_left()
            with self.lock:
                pending, waits = list(self._in), self.transfer_log.uncounted()
            self.wait_until_over(pending)
            self.runtime.synchronize_kept()
            for wait in waits:
                wait.synchronize()
            with self.lock:
                self.poll()

    def wait_until_left(self) -> None:
        """The host waits until nothing is on its way out. The lock is held between the waits only."""
        with self.lock:
            self.poll()
            awaited = {*self._held_back, *self._out}
        while awaited:
            with self.lock:
                started = list(self._out)
            self.wait_until_over(started)
            with self.lock:
                self.poll()
                remaining = awaited.intersection((*self._held_back, *self._out))
            if len(remaining) == len(awaited):
                return  # copies of the process that this one was forked from: they never end
            awaited = remaining

    def make_room(self, drop: Callable[[], None] = lambda: None) -> None:
        """The device is full, and something has to come back: what the library itself holds there goes.

        The lock is held between the waits only.

        Args:
            drop: lets go of what was brought back early; called with the lock held.
        """
        with self._counting_wait(None):
            self.wait_until_left()  # first: what is expected stays when its copy arrives
            with self.lock:
                self.poll()
                drop()
                returning = list(self._in)
            self.wait_until_over(returning)
        with self.lock:
            self.poll()

    def wait_until_over(self, transfers: Sequence[Transfer]) -> None:
        """The host waits for ``transfers``; the caller that takes one up gets its failure. The lock is not held."""
        for transfer in transfers:
            transfer.is_awaited = True
            with suppress(OffloadError):
                self.runtime.synchronize(transfer.event)

    def warn(self, message: str) -> None:
        """A warning to the user."""
        if self._warns_later:
            self._deferred.append(message)
        else:
            warn(message)

    def _enqueue(
        self,
        table: dict[Transfer, object],
        transfer: Transfer,
        dst: Tensor | Slot,
        src: Tensor | Slot,
        slot: Slot,
        stream: Stream,
        what: str,
        after: Sequence[Event],
        key: int | None,
    ) -> None:
        """Enqueues a copy on ``stream``, as the last use of ``slot``. See [Note: keepalives]."""
        runtime, used, is_traced = self.runtime, slot.record, self.transfer_log.on_entry is not None
        keepalive = None if runtime.copies_hold_their_ends else (dst, src)
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
        except BaseException:  # the copy may have been enqueued
            event = runtime.record(stream)
            used.fences = (*used.fences, Fence(runtime, event))
            runtime.keep_until(event, keepalive)
            raise
        if is_traced:
            self.transfer_log.write(Copied(self.device, what, slot.nbytes, slot.tier, event, key))
        if runtime.ran_inline(event) and self.accounts.counters.demote("no_thread"):
            self._deferred.append(_NO_THREAD)

    def _complete_queried(self, transfer: Transfer) -> None:
        """A copy out is over."""
        failure: OffloadError | None = None
        try:
            self.runtime.synchronize(transfer.event)  # raises what made it fail; nothing is left to wait for
        except OffloadError as error:
            failure = error.with_traceback(None)  # it holds this frame, which holds the error: a cycle
        else:
            fences = transfer.slot.fences
            if len(fences) == 1 and fences[0].event is transfer.event:
                transfer.slot.fences = ()  # the host knows that it has passed, and no read has come
        self.complete(transfer, failure)

    def complete(self, transfer: Transfer, failure: OffloadError | None) -> None:
        """A copy out is over, or whatever writes over its source comes after it: that may go, if nothing failed."""
        if self._out.pop(transfer, self) is self:
            return
        failure = replaced(transfer) or failure
        counters, carried, record = transfer.counters, transfer.slot.carried, transfer.record
        assert record is not None
        self._leaving.pop(record, None)
        self.inflight_bytes -= transfer.moved
        self.release(transfer)
        counters.processor_seconds += self.runtime.processor_seconds(transfer.event)
        if failure is None and transfer.holds is not None and not transfer.holds:
            counters.refuse(transfer.codec)
            record.on_transferred(transfer, REFUSED)
            return
        if failure is None:
            if transfer.codec:
                counters.packed(transfer.codec, transfer.saved_nbytes, transfer.moved)
            spans = self.runtime.spans(transfer.event)
            seconds = self.runtime.seconds_between(spans[0].began, spans[0].ended) if spans else None
            counters.out_seconds += self.out_rate.add(carried, seconds)
            counters.bytes_out -= transfer.moved - carried
        else:
            counters.bytes_out -= transfer.moved
            if self.accounts.counters.demote("write_failed"):
                self.warn(f"offloading failed, {record.fallback.format(device=self.device)}: {failure}")
        record.on_transferred(transfer, failure)


def replaced(transfer: Transfer) -> TransferError | None:
    """The error of a copy during which its source was given other memory.

    [Note: memory that is replaced]
    A storage keeps its identity while ``share_memory_()``, a queue of ``torch.multiprocessing`` or ``resize_()`` gives
    it other memory with the same values and frees the old one at once, even in the midst of a read. So a copy during
    which that happened counts as a write that failed, and the storage stays with its new memory.
    """
    source = None if transfer.source is None else transfer.source()
    if source is None or (source.data_ptr() == transfer.address and source.nbytes() >= transfer.source_nbytes):
        return None
    nbytes = transfer.slot.nbytes
    return TransferError(
        f"the memory of {nbytes} bytes was replaced while it was copied to the {transfer.tier} tier: by "
        "share_memory_(), a queue of torch.multiprocessing, or resize_() of its storage. Do that before the tensor is "
        "saved, or mark the tensor with eager_offload.keep",
        errno=None,
        tier=transfer.tier,
        nbytes=nbytes,
    )
