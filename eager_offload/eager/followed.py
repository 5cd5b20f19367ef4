"""What a run owns: the storages of a forward that follows a step plan, and what is settled when the run is gone."""

from __future__ import annotations

import weakref
from collections.abc import Hashable

import torch

from eager_offload._torch import autograd_sequence, weak_storage
from eager_offload.eager.coding import Coding
from eager_offload.eager.handles import Keeper, Reload, SavedStorage, StorageRecord
from eager_offload.eager.ownership import pass_on
from eager_offload.eager.plans import KnownPlan
from eager_offload.engine.offloader import REFUSED, DeviceOffloader
from eager_offload.engine.transfer import AWAY, COUNTED, KEPT, WAITING, CountedBytes, Transfer
from eager_offload.errors import OffloadError
from eager_offload.learning import Forward
from eager_offload.runtime.base import ALIGNMENT, Stream
from eager_offload.selection import Footprint
from eager_offload.stats import Counters, KeepReason
from eager_offload.tiers.base import Slot
from eager_offload.tiers.finalizers import FinalizerRecord

__all__ = ["FollowedStorage", "RunRecord"]


def _unknown() -> None:
    """In place of a weak reference that nothing asks for."""


class FollowedStorage(SavedStorage, CountedBytes):
    """A storage that was offloaded or is to be, as a step plan says. It knows its run by that's record alone."""

    __slots__ = (*COUNTED, "adopted", "packed_at", "promised", "run")

    def __init__(
        self,
        storage: torch.UntypedStorage,
        footprint: Footprint,
        number: int,
        run: RunRecord,
        stream: Stream,
        coding: Coding | None,
    ) -> None:
        self.run = run
        self.number, self.footprint, self.stream = number, footprint, stream
        self.origin = weak_storage(storage)
        self.alignment_offset = storage.data_ptr() % ALIGNMENT
        self.coding, self.packed = coding, None
        self.aliases = []
        self.started = None
        self.slot = None
        self.reload = None
        self.returned = None
        self.given = ()
        #: What it is as a storage of an unknown step, once its run is over.
        self.adopted: SavedStorage | None = None
        #: The bytes of it that an unpack which comes soon needs on the device; 0 where none does.
        self.promised = 0
        self.packed_at = autograd_sequence()
        self.root = _unknown

    @property
    def saves(self) -> Keeper:  # type: ignore[override]  # read only: what is on its way must not hold its offloader
        saves = self.run.saves()
        assert saves is not None, "a handle of the run holds them"
        return saves

    def stay(self, reason: KeepReason) -> None:
        if self.state is WAITING:
            self.saves.offloader.resident_bytes -= self.footprint.nbytes
            self.run.waiting_bytes -= self.footprint.nbytes
        if self.state is not KEPT:
            self.run.kept_bytes += self.device_bytes
        super().stay(reason)

    def on_transferred(self, transfer: Transfer, failure: OffloadError | None) -> None:
        if self.adopted is not None:
            self.adopted.record.on_transferred(transfer, failure)
            return
        run = self.run
        self.is_gone = run() is None
        if failure is not None:
            if failure is REFUSED:
                run.known.refuse()
            else:
                run.is_spoiled = True  # the slots of a disk that fails serve no further step
            self.slot = None
            self.stay(KeepReason.FAILED)
            return
        if self.promised and self.reload is None and not self.is_gone and self.coding is None:
            assert self.slot is not None
            back = Transfer(self.slot, transfer.nbytes, transfer.counters)
            back.event = transfer.event
            self.saves.offloader.hold(back.nbytes)
            run.returning[back] = None
            self.reload = Reload(self.source_bytes(), back)
        self.arrive()
        if not (self.is_gone or self.asked):
            run.unasked[self.counters] = run.unasked.get(self.counters, 0) + self.logical_bytes
        self.packed = None
        self.release_source()

    def unpromise(self) -> None:
        """No unpack that comes soon needs it on the device."""
        self.run.promised_bytes -= self.promised
        self.saves.order.followed_bytes -= self.promised
        self.promised = 0

    def forget(self) -> None:
        """It is asked for the last time, or taken over by the engine: the run's record counts it no more."""
        self.unpromise()
        run = self.run
        run.autograd_bytes -= self.autograd_bytes
        if self.state is KEPT:
            run.kept_bytes -= self.device_bytes
        elif self.state is WAITING:
            run.waiting_bytes -= self.footprint.nbytes
        elif self.state is AWAY and not self.asked:
            run.unasked[self.counters] -= self.logical_bytes
        if self.reload is not None:
            run.returning.pop(self.reload.transfer, None)

    def as_unknown(self, key: int, name: Hashable, forward: Forward) -> SavedStorage:
        """The same as a storage of an unknown step, in the state that it is in; ``forward`` saves it next."""
        saved = object.__new__(SavedStorage)
        saved.aliases, saved.footprint, saved.alignment_offset = self.aliases, self.footprint, self.alignment_offset
        saved.coding, saved.packed = self.coding, self.packed
        saved.origin, saved.root, saved.stream, saved.saves = self.origin, self.root, self.stream, self.saves
        saved.slot, saved.reload, saved.returned = self.slot, self.reload, self.returned
        pass_on(self, saved)
        saved.started, saved.times_saved, saved.saved_anew = self.started, 1, False
        saved.forward, saved.number = forward, len(forward.notes.sizes)
        saved.first = saved.number
        saved.record = record = StorageRecord(saved, self.saves.offloader.finalized.append)
        for counted in COUNTED:
            setattr(record, counted, getattr(self, counted))
        record.key, record.name, record.queue, record.saves = key, name, None, weakref.ref(self.saves)
        if (leaving := self.saves.offloader.copy_out_of(self)) is not None:
            leaving.record = record
        record.leaving = leaving
        record.reload = None if self.reload is None else self.reload.transfer
        self.forget()
        self.adopted = saved  # last: where an interrupt came before, it is made anew
        return saved

    def drop_reload(self) -> None:
        """What was brought back is not expected any more; a copy on its way holds its target."""
        if self.reload is not None:
            self.saves.offloader.release(self.reload.transfer)
            self.run.returning.pop(self.reload.transfer, None)
            self.reload = None


class RunRecord(FinalizerRecord[object]):
    """A weak reference to a run, and what is to be settled once its last handle is gone. It holds no bytes."""

    __slots__ = (
        "autograd_bytes",
        "counters",
        "is_spoiled",
        "kept_bytes",
        "known",
        "promised_bytes",
        "returning",
        "saves",
        "slots",
        "unasked",
        "waiting_bytes",
    )
    #: Those of its device; weak, since their offloader holds the record.
    saves: weakref.ref[Keeper]
    counters: Counters
    #: Where its slots go, and those; ``None`` for one that it has given back.
    known: KnownPlan
    slots: list[Slot | None]
    #: Whether these are not to be used again.
    is_spoiled: bool
    #: Bytes that are counted as alive because of it, those of them that stay, and those that are yet to leave.
    autograd_bytes: int
    kept_bytes: int
    waiting_bytes: int
    #: Those that are on the device since an unpack comes soon, or are to be: see ``PrefetchOrder.followed_bytes``.
    promised_bytes: int
    #: Bytes that have left and were not asked for, by where they are counted.
    unasked: dict[Counters, int]
    #: Copies back that the device's bytes are held for.
    returning: dict[Transfer, None]

    def on_finalized(self) -> None:
        saves = self.saves()
        self.settle(None if saves is None else saves.offloader)
        if saves is not None:
            saves.release_scratch()
        if self.slots and not (self.is_spoiled or self.known.is_forgotten):
            self.known.idle.append([slot for slot in self.slots if slot is not None])

    def settle(self, offloader: DeviceOffloader | None) -> None:
        """Whatever it still counts is gone; ``offloader`` is ``None`` where that was closed, and is gone too."""
        if offloader is not None and offloader.is_crashed:
            return
        live = self.counters.live
        live.without_offload -= self.autograd_bytes
        live.kept -= self.kept_bytes
        for counters, nbytes in self.unasked.items():
            counters.released_bytes += nbytes
        if offloader is not None:
            offloader.resident_bytes -= self.waiting_bytes
            for transfer in offloader.held_back():
                storage = transfer.record
                if isinstance(storage, FollowedStorage) and storage.run is self and offloader.cancel(transfer):
                    storage.is_gone = True
                    storage.stay(KeepReason.NEWEST)
            for transfer in self.returning:
                offloader.release(transfer)
        if (saves := self.saves()) is not None:
            saves.order.followed_bytes -= self.promised_bytes
        self.waiting_bytes = self.autograd_bytes = self.kept_bytes = self.promised_bytes = 0
        self.returning, self.unasked = {}, {}
