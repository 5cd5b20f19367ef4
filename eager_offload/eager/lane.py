"""Carries out what the schedule decides, for the saved tensors of one device.

A lane joins the stops of a saved tensor's way: it takes a tensor in (``take``), starts copies that are due (``start``),
notices what has arrived or died (``settle``), and gives tensors back (``give``). It holds no saved storage strongly.
"""

from __future__ import annotations

import contextlib
import itertools
import time
import warnings
import weakref
from collections import deque
from collections.abc import Hashable, Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from eager_offload import marks
from eager_offload._torch import weak_storage
from eager_offload.config import OffloadConfig
from eager_offload.eager.handles import Reload, Remains, Returned, SavedStorage, SavedView, State
from eager_offload.errors import OffloadError
from eager_offload.marks import Mark
from eager_offload.runtime.base import Direction, Event, Layout, Runtime, Stream
from eager_offload.runtime.registry import Registry
from eager_offload.schedule import DelayLine, Plan, PrefetchOrder, Window
from eager_offload.selection import footprint, root_of
from eager_offload.stats import Accounts, KeepReason, Tally
from eager_offload.tiers.base import Fence, Slot, Tier

__all__ = ["Lane"]

#: A storage that had to be taken this many times, because it does not require grad and is saved over and over, is kept
#: alive by someone else: moving it frees nothing.
_MOST_TAKES = 3


class _Leaving(NamedTuple):
    """An offload on its way. The storage may die before it arrives; its accounts are settled then."""

    ticket: int
    ref: weakref.ref[SavedStorage]
    nbytes: int
    logical_bytes: int
    tally: Tally


class Issued(NamedTuple):
    """A tensor for autograd, and where in its storage the footprint begins."""

    tensor: Tensor
    first_byte: int


class Lane:
    """The saved tensors of one device: its runtime, its tiers, its windows."""

    def __init__(
        self, device: torch.device, runtime: Runtime, tiers: Sequence[Tier], config: OffloadConfig, accounts: Accounts
    ) -> None:
        self.device = device
        self.runtime = runtime
        self.tiers = tiers
        self.graveyard: deque[int | Remains] = deque()
        self._accounts = accounts
        self._registry = Registry(runtime)
        self._window = Window(config.size("max_inflight_bytes"))
        self._order = PrefetchOrder(config.size("prefetch_bytes"))
        self._delay_bytes = config.delay_bytes
        self._keys = itertools.count(1)
        self._storages: dict[int, weakref.ref[SavedStorage]] = {}
        self._names: dict[Hashable, weakref.ref[SavedStorage]] = {}
        self._leaving: dict[int, _Leaving] = {}
        self._buried: set[int] = set()  # keys of storages that died on their way out
        self._orphans: list[Reload] = []  # reloads that nobody asked for and that may still be running
        self._resident = 0

    @property
    def _tally(self) -> Tally:
        return self._accounts.tally

    @property
    def inflight_bytes(self) -> int:
        return self._window.nbytes

    @property
    def resident_bytes(self) -> int:
        """Bytes on the device that the library holds: newest, on their way out, brought back and not yet asked for."""
        return self._resident

    def new_line(self) -> DelayLine:
        """A delay line, for one thread."""
        return DelayLine(self._delay_bytes)

    # -- forward --------------------------------------------------------------------------------------------------

    def take(
        self, tensor: Tensor, line: DelayLine, packed_at: int, sequence: int, mark: Mark | None
    ) -> SavedView | KeepReason:
        """Takes a saved tensor in; a reason where it has to stay after all.

        Args:
            tensor: strided, not empty, on this lane's device.
            line: the calling thread's delay line.
            packed_at: the calling thread's autograd sequence number.
            sequence: names the forward, for the prefetch order.
            mark: what the user asked of its storage.
        """
        with self._accounts.lock:
            return self._take(tensor, line, packed_at, sequence, mark)

    def _take(
        self, tensor: Tensor, line: DelayLine, packed_at: int, sequence: int, mark: Mark | None
    ) -> SavedView | KeepReason:
        try:
            storage = tensor.untyped_storage()
        except (NotImplementedError, RuntimeError):  # a wrapper without bytes of its own, inside a transform
            return KeepReason.LAYOUT
        if tensor.data_ptr() % tensor.itemsize:
            return KeepReason.LAYOUT  # cannot be rebuilt at such an address
        stream = self.runtime.current_stream(self.device)
        self.settle()
        area = footprint(tensor, storage.nbytes())
        name: Hashable = storage._cdata
        if not area.whole:
            whole = self._known(name, storage)
            if whole is not None and self._may_share(whole, tensor, line, packed_at):
                return self._share(whole, tensor, sequence)
            name = (name, tensor.storage_offset(), tensor.size(), tensor.stride(), tensor.dtype)
        known = self._known(name, storage)
        if known is not None:
            if self._may_share(known, tensor, line, packed_at):
                return self._share(known, tensor, sequence)
            if known.takes == _MOST_TAKES:
                return KeepReason.ALIVE
        saved = SavedStorage(next(self._keys), name, tensor, area, self, stream, self._tally)
        saved.takes = 1 if known is None or tensor.requires_grad else known.takes + 1
        saved.line = line
        self._storages[saved.key] = saved.ref
        self._names[name] = saved.ref
        view = self._view(saved, tensor, sequence)
        self._tally.kept(KeepReason.NEWEST, saved.logical_bytes)
        self._hold(area.nbytes)
        urgent = mark is Mark.PREFER
        line.push(saved.key, area.nbytes, None if tensor.requires_grad else packed_at, urgent=urgent)
        while (key := line.due(packed_at)) is not None:
            self._start(key, line)
        return view

    def flush(self, line: DelayLine) -> None:
        """The context is left: every operator has run, so all that exceeds the newest bytes leaves."""
        self.settle()
        while (key := line.due(None)) is not None:
            self._start(key, line)

    def _known(self, name: Hashable, storage: torch.UntypedStorage) -> SavedStorage | None:
        """The saved storage under ``name``, if it is of the very ``storage``: an address may have a new owner."""
        ref = self._names.get(name)
        saved = None if ref is None else ref()
        return saved if saved is not None and saved.origin() is storage else None

    def _may_share(self, saved: SavedStorage, tensor: Tensor, line: DelayLine, packed_at: int) -> bool:
        """Whether the bytes that ``saved`` has, or will have, are those that ``tensor`` has at its unpack.

        [Note: sharing]
        Before its copy starts, a storage may be shared freely: the copy takes what is there by then, and if that is
        not what an earlier save meant, the earlier one's version has changed and its unpack raises. A save that does
        not require grad may be filled yet, so it postpones the copy; only the thread that counts the sequence numbers
        can do that. Afterwards the copy serves only a tensor that was final at pack, of the same version counter, that
        has not changed since. A storage that stays serves everyone.
        """
        if saved.state is State.KEPT:
            return True
        if saved.state is State.WAITING:
            if tensor.requires_grad:
                return True
            if saved.line is not line:
                return False
            line.postpone(saved.key, packed_at)
            return True
        return tensor.requires_grad and saved.root() is root_of(tensor) and saved.copied_version == tensor._version

    def _share(self, saved: SavedStorage, tensor: Tensor, sequence: int) -> SavedView:
        self._tally.shared(tensor.nbytes)
        return self._view(saved, tensor, sequence)

    def _view(self, saved: SavedStorage, tensor: Tensor, sequence: int) -> SavedView:
        position = next(self._keys)
        view = SavedView(saved, tensor, position)
        if saved.state is State.AWAY:
            view.forget_bytes()
        else:
            saved.aliases.append(view.alias)
        self._order.add(position, saved.key, saved.footprint.nbytes, sequence)
        return view

    # -- device -> tier -------------------------------------------------------------------------------------------

    def _start(self, key: int, line: DelayLine) -> None:
        """Starts the copy of the storage that is next in ``line``, or finds that it stays."""
        saved = self._storages[key]()
        if saved is None or saved.state is not State.WAITING:
            line.discard(key)  # it died a moment ago (settling will find it), or an interrupt came after its start
            return
        moved = saved.footprint.moved
        while not self._window.has_room(moved):
            self._make_room()
        marked = marks.any_marks()
        storage = saved.aliases[0].untyped_storage()
        if marked and marks.mark_of(storage) is Mark.KEEP:
            self._keep(saved, KeepReason.MARKED)
        elif (slot := self._reserve(moved)) is None:
            self._keep(saved, KeepReason.BUDGET)
        else:
            self._send(saved, slot)
            if marked:
                marks.clear_mark(storage)
        # Last: whatever interrupts this leaves the storage in line.
        line.discard(key)
        saved.line = None

    def _keep(self, saved: SavedStorage, reason: KeepReason) -> None:
        saved.state = State.KEPT
        saved.tally.reclassify(saved.logical_bytes, KeepReason.NEWEST, reason)
        self._hold(-saved.footprint.nbytes)

    def _send(self, saved: SavedStorage, slot: Slot) -> None:
        """Enqueues the copy into ``slot``."""
        area, tally = saved.footprint, self._accounts.tally
        if area.gathered:
            with self.runtime.enter(saved.stream):  # gathering is compute, of the stream that made the tensor
                source = saved.source_bytes()
        else:
            source = saved.source_bytes()
        event = self._copy_out(source, slot, saved.stream)
        saved.slot, saved.out_event, saved.state = slot, event, State.LEAVING
        saved.copied_version = saved.aliases[0]._version
        ticket = self._registry.register(event, (source, saved.aliases, slot))
        self._leaving[saved.key] = _Leaving(ticket, saved.ref, area.nbytes, saved.logical_bytes, saved.tally)
        window = self._window
        window.enter(saved.key, area.moved)
        saved.tally.reclassify(saved.logical_bytes, KeepReason.NEWEST, None)
        tally.bytes_out += area.moved
        if window.nbytes > tally.inflight_bytes_peak:
            tally.inflight_bytes_peak = window.nbytes

    def _copy_out(self, source: Tensor, slot: Slot, stream: Stream) -> Event:
        """Enqueues the copy behind the compute that made ``source`` and behind the slot's last uses."""
        ordering = self.runtime.record(stream)
        out = self.runtime.transfer_stream(self.device, Direction.OUT)
        self.runtime.wait(out, ordering)
        self._wait_for(out, slot.fences)
        self.runtime.copy(slot, source, out)
        event = self.runtime.record(out)
        slot.fences = (Fence(self.runtime, event),)
        return event

    def _wait_for(self, stream: Stream, fences: Iterable[Fence]) -> None:
        for fence in fences:
            if not fence.passed():
                self.runtime.wait(stream, fence.event)

    def _reserve(self, nbytes: int) -> Slot | None:
        """Room in the first tier that has it."""
        for tier in self.tiers:
            slot = tier.reserve(nbytes)
            if slot is not None:
                if tier is not self.tiers[0] and self._tally.demote(f"{self.tiers[0].name}_to_{tier.name}"):
                    _tell(f"the {self.tiers[0].name} tier is full: saved tensors go to the {tier.name} tier as well")
                self._note_held(tier)
                return slot
        if self._tally.demote("budget"):
            names = " and ".join(tier.name for tier in self.tiers)
            _tell(f"no room for {nbytes} bytes in the {names} tier: they stay on {self.device}; raise its budget")
        return None

    def _note_held(self, tier: Tier) -> None:
        held, tally = tier.held_bytes, self._tally
        if tier.name == "disk":
            tally.disk_bytes_peak = max(tally.disk_bytes_peak, held)
        else:
            tally.host_bytes_peak = max(tally.host_bytes_peak, held)

    def _make_room(self) -> None:
        """Waits until the oldest offload has arrived.

        [Note: a full window] The host waits, and the source goes when the event has completed. It would also be free to
        go once its allocating stream waits for the event, without the host; but that stream need not be the one that
        was current at pack (a batch that another stream loaded), and the allocator would hand its block out too early.
        """
        key = self._window.oldest
        assert key is not None
        started = time.perf_counter()
        self._arrive(key)
        self._accounts.tally.stall_seconds += time.perf_counter() - started

    def _arrive(self, key: int) -> None:
        """Takes up an offload's completion, waiting for it if need be, and lets go of its source."""
        leaving = self._leaving[key]
        failure: OffloadError | None = None
        try:
            self._registry.synchronize(leaving.ticket)
        except OffloadError as error:
            failure = error
        del self._leaving[key]
        self._window.leave(key)
        saved = leaving.ref()
        buried = key in self._buried
        self._buried.discard(key)
        if failure is not None:
            self._fail(leaving, saved, buried, failure)
            return
        self._hold(-leaving.nbytes)
        if saved is not None:
            saved.release_source()
            saved.state = State.AWAY
        elif buried:
            leaving.tally.released_bytes += leaving.logical_bytes

    def _fail(self, leaving: _Leaving, saved: SavedStorage | None, buried: bool, error: OffloadError) -> None:
        """The bytes did not arrive. The source is still alive, so nothing is lost: it stays."""
        if self._tally.demote("write_failed"):
            _tell(f"offloading failed, the saved tensor stays on {self.device}: {error}")
        leaving.tally.reclassify(leaving.logical_bytes, None, KeepReason.FAILED)
        if not buried if saved is None else saved.asked:
            leaving.tally.forwarded_bytes -= leaving.logical_bytes
        self._hold(-leaving.nbytes)
        if saved is not None:
            saved.state, saved.slot, saved.out_event = State.KEPT, None, None

    # -- what has happened meanwhile ------------------------------------------------------------------------------

    def settle(self) -> None:
        """Notices handles that went and transfers that arrived; never blocks."""
        self.runtime.tidy()
        graveyard = self.graveyard
        while graveyard:
            gone = graveyard.popleft()
            if isinstance(gone, int):
                self._let_go(self._order.remove(gone))
            else:
                self._bury(gone)
        while (key := self._window.oldest) is not None and self._registry.arrived(self._leaving[key].ticket):
            self._arrive(key)
        if self._orphans:
            self._orphans = [orphan for orphan in self._orphans if not self._ended(orphan)]

    def synchronize(self) -> None:
        """Waits until nothing is on its way."""
        self.settle()  # what has died may leave a reload behind that nobody wants, and that is waited for as well
        while (key := self._window.oldest) is not None:
            self._arrive(key)
        for orphan in self._orphans:
            with contextlib.suppress(OffloadError):  # see `_ended`
                self.runtime.synchronize(orphan.event)
        self.settle()

    def _bury(self, remains: Remains) -> None:
        """Settles the accounts of a storage whose last handle is gone."""
        del self._storages[remains.key]
        if self._names.get(remains.name) is remains.ref:
            del self._names[remains.name]
        if remains.line is not None:
            remains.line.discard(remains.key)
        if remains.state is State.WAITING:
            self._hold(-remains.nbytes)
        elif remains.state is not State.KEPT and not remains.asked:
            if remains.key in self._leaving:
                self._buried.add(remains.key)
            else:
                remains.tally.released_bytes += remains.logical_bytes
        if remains.reload is not None:
            self._abandon(remains.reload)

    def _abandon(self, reload: Reload) -> None:
        """A reload is not wanted any more; its target goes when its copy can no longer write to it."""
        self._hold(-reload.target.nbytes)
        if reload.ticket is not None:
            self._orphans.append(reload)

    def _ended(self, orphan: Reload) -> bool:
        assert orphan.ticket is not None
        if not self._registry.arrived(orphan.ticket):
            return False
        with contextlib.suppress(OffloadError):  # a failed read of bytes that nobody asked for harms nobody
            self._registry.synchronize(orphan.ticket)
        return True

    def _let_go(self, key: int | None) -> None:
        """A storage that was brought back early is not expected soon any more."""
        saved = None if key is None else self._storage(key)
        if saved is not None and saved.reload is not None:
            reload, saved.reload = saved.reload, None
            if reload.ticket is None:
                saved.returned = None
            self._abandon(reload)

    def _storage(self, key: int) -> SavedStorage | None:
        ref = self._storages.get(key)
        return None if ref is None else ref()

    # -- tier -> device -------------------------------------------------------------------------------------------

    def give(self, view: SavedView) -> Tensor:
        """The saved tensor again, for the stream that is current now; brings back early what is expected next.

        Raises:
            SavedTensorModifiedError: it was changed in place after it was saved.
            TransferError, CorruptionError: its bytes did not come back.
        """
        view.check_version()
        saved = view.storage
        with self._accounts.lock:
            stream = self.runtime.current_stream(self.device)
            self.settle()
            tensor = self._resident_view(view, stream)
            reload = self._reload_for(saved, stream) if tensor is None else None
            self._credit(saved, forwarded=tensor is not None)
            self._follow(self._order.unpacked(view.position), saved.key)
        if reload is None:
            assert tensor is not None
            return tensor
        self._await(saved, reload, stream)
        with self._accounts.lock:
            issued = self._issue(view, reload, stream)
            if saved.reload is not reload:
                self._hold(-reload.target.nbytes)  # this stream's own, and autograd's from here on
            elif not self._order.holds(saved.key):
                saved.reload = None
                saved.returned = Returned(weak_storage(issued.tensor.untyped_storage()), issued.first_byte)
                self._hold(-reload.target.nbytes)
        return issued.tensor

    def _resident_view(self, view: SavedView, stream: Stream) -> Tensor | None:
        """The tensor, if its bytes are on the device: not gone yet, kept alive by someone else, or back already."""
        saved = view.storage
        if saved.state is not State.AWAY:
            return view.alias.detach()
        storage, first_byte = saved.origin(), saved.footprint.start
        if storage is not None and storage.nbytes() >= first_byte + saved.footprint.nbytes:
            return view.over(storage, first_byte)
        if saved.returned is not None and stream == saved.stream:
            storage = saved.returned.storage()
            if storage is not None:
                return view.over(storage, saved.returned.first_byte)
        return None

    def _credit(self, saved: SavedStorage, *, forwarded: bool) -> None:
        """Counts how an offloaded storage came out, the first time that it is asked for."""
        if saved.asked or saved.state not in (State.LEAVING, State.AWAY):
            return
        saved.asked = True
        if forwarded:
            saved.tally.forwarded_bytes += saved.logical_bytes
        else:
            saved.tally.reloaded_bytes += saved.logical_bytes

    def _follow(self, plan: Plan, current: int) -> None:
        """Carries out what the prefetch order says; ``current`` is being handed out and sees to itself."""
        for key in plan.drop:
            if key != current:
                self._let_go(key)
        for key in plan.bring:
            saved = self._storage(key)
            if saved is None or saved.state is not State.AWAY or saved.reload is not None:
                continue
            if saved.origin() is not None or (saved.returned is not None and saved.returned.storage() is not None):
                continue
            try:
                saved.reload = self._bring(saved, saved.stream)
            except (torch.OutOfMemoryError, MemoryError):
                return  # prefetch is a hint: what is needed now may still fit

    def _reload_for(self, saved: SavedStorage, stream: Stream) -> Reload:
        """The reload that ``stream`` can wait for: the shared one on the stream of the pack, else one of its own."""
        if stream != saved.stream:
            return self._bring(saved, stream)
        if saved.reload is None:
            saved.reload = self._bring(saved, stream)
        return saved.reload

    def _bring(self, saved: SavedStorage, stream: Stream) -> Reload:
        """Enqueues a reload into a new target that belongs to ``stream``."""
        slot = saved.slot
        assert slot is not None
        assert saved.out_event is not None
        target = self.runtime.allocate(saved.target_layout, self.device, stream)
        # [Note: the block's last owner] An allocator hands out a block whose last owner's kernels may still be queued
        # on `stream`. The transfer stream writes to it, so it waits for an event recorded after the allocation.
        allocated = self.runtime.record(stream)
        back = self.runtime.transfer_stream(self.device, Direction.IN)
        self.runtime.wait(back, allocated)
        self.runtime.wait(back, saved.out_event)
        self.runtime.copy(target, slot, back)
        event = self.runtime.record(back)
        slot.fences = (*(fence for fence in slot.fences if not fence.passed()), Fence(self.runtime, event))
        self._hold(target.nbytes)
        self._tally.bytes_in += target.nbytes
        return Reload(target, event, self._registry.register(event, (target, slot)))

    def _await(self, saved: SavedStorage, reload: Reload, stream: Stream) -> None:
        """Makes ``stream`` wait for a reload; on a CPU device the host waits, without the lock."""
        with self._accounts.lock:
            ticket, reload.ticket = reload.ticket, None
        started = None if self.runtime.query(reload.event) else time.perf_counter()
        try:
            if ticket is None:
                self.runtime.wait(stream, reload.event)
            else:
                self._registry.wait(ticket, stream)
        except BaseException as error:
            with self._accounts.lock:
                if isinstance(error, OffloadError):
                    self._hold(-reload.target.nbytes)
                else:
                    reload.ticket = ticket  # interrupted: the copy goes on
                    self._orphans.append(reload)
                    self._hold(-reload.target.nbytes)
                if saved.reload is reload:
                    saved.reload = None
            raise
        if started is not None:
            with self._accounts.lock:
                self._tally.stall_seconds += time.perf_counter() - started

    def _issue(self, view: SavedView, reload: Reload, stream: Stream) -> Issued:
        target = reload.target
        area = view.storage.footprint
        if not area.gathered:
            first_byte = int(target.storage_offset())
            return Issued(view.over(target.untyped_storage(), first_byte), first_byte)
        place = self.runtime.allocate(Layout(area.nbytes, view.storage.phase), self.device, stream)
        return Issued(view.scatter(target, place), int(place.storage_offset()))

    def _hold(self, nbytes: int) -> None:
        self._resident += nbytes
        if self._resident > self._tally.resident_bytes_peak:
            self._tally.resident_bytes_peak = self._resident


def _tell(message: str) -> None:
    warnings.warn(f"eager_offload: {message}", RuntimeWarning, stacklevel=2)
