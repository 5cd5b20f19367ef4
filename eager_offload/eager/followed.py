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
from eager_offload.engine.transfer import COUNTED, KEPT, WAITING, CountedBytes, Transfer
from eager_offload.errors import OffloadError
from eager_offload.learning import Forward
from eager_offload.runtime.base import ALIGNMENT, Stream
from eager_offload.selection import Footprint
from eager_offload.stats import Counters, KeepReason
from eager_offload.tiers.base import Slot
from eager_offload.tiers.finalizers import FinalizerRecord


def _unknown() -> None:
    """In place of a weak reference that nothing asks for."""


class FollowedStorage(SavedStorage, CountedBytes):
    """A storage that was offloaded or is to be, as a step plan says. It knows its run by that's record alone."""

    __slots__ = (*COUNTED, "adopted", "packed_at", "run")

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
            self.run.waits_no_more(self.number)
        if self.state is not KEPT and not self.is_gone:
            self.run.kept[self.number] = self.device_bytes
            self.run.unsettled.setdefault(self.number, 0)
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
        if self.number in run.promised and self.reload is None and not self.is_gone and self.coding is None:
            assert self.slot is not None
            back = Transfer(self.slot, transfer.nbytes, transfer.counters)
            back.event = transfer.event
            self.saves.offloader.hold(back.nbytes)
            run.returning[self.number] = back
            self.reload = Reload(self.source_bytes(), back)
        self.arrive()
        if not (self.is_gone or self.asked):
            run.unasked[self.number] = self.counters
            run.unsettled.setdefault(self.number, 0)  # it may have been asked for last, or its run be over
        self.packed = None
        self.release_source()

    def forget(self) -> None:
        """It is taken over by an unknown step: the run's record counts it no more."""
        run, number = self.run, self.number
        run.unpromise(number)
        run.unsettled.pop(number, None)
        run.kept.pop(number, None)
        run.unasked.pop(number, None)
        run.returning.pop(number, None)
        run.waits_no_more(number)

    def as_unknown(self, key: int, name: Hashable, forward: Forward) -> SavedStorage:
        """The same as a storage of an unknown step, in the state that it is in; ``forward`` saves it next."""
        saved = object.__new__(SavedStorage)
        saved.aliases, saved.footprint, saved.alignment_offset = self.aliases, self.footprint, self.alignment_offset
        saved.coding, saved.packed = self.coding, self.packed
        saved.origin, saved.root, saved.stream, saved.saves = self.origin, self.root, self.stream, self.saves
        saved.slot, saved.reload, saved.returned = self.slot, self.reload, self.returned
        pass_on(self, saved)
        saved.started, saved.times_saved, saved.saved_anew = self.started, 1, False
        saved.forward, saved.number = forward, len(forward.log.sizes)
        saved.first = saved.number
        saved.record = record = StorageRecord(saved, self.saves.offloader.on_death)
        for counted in COUNTED:
            setattr(record, counted, getattr(self, counted))
        record.module = _unknown
        record.key, record.name, record.queue, record.saves = key, name, None, weakref.ref(self.saves)
        self.saves.offloader.hand_on(self, record)
        record.reload = None if self.reload is None else self.reload.transfer
        self.forget()
        self.adopted = saved  # last: where an interrupt came before, it is made anew
        return saved

    def drop_reload(self) -> None:
        """What was brought back is not expected any more; a copy on its way holds its target."""
        if self.reload is not None:
            self.saves.offloader.release(self.reload.transfer)
            self.run.returning.pop(self.number, None)
            self.reload = None


class FollowedRecord(FinalizerRecord[FollowedStorage]):
    """A weak reference to a storage of a run. What that still counts when it dies, the run's record knows by number."""

    __slots__ = ("number", "run")
    number: int
    run: RunRecord


class RunRecord(FinalizerRecord[object]):
    """A weak reference to a run, and what is to be settled once its last handle is gone. It holds no bytes.

    What a storage counts is here, by its number, so that it can be settled when it dies, which may be long before.
    """

    __slots__ = (
        "counters",
        "due",
        "is_spoiled",
        "kept",
        "known",
        "promised",
        "returning",
        "saves",
        "slots",
        "unasked",
        "unsettled",
        "waiting",
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
    #: Bytes that are counted as alive because of each storage that something is counted of.
    unsettled: dict[int, int]
    #: Bytes of those that stay.
    kept: dict[int, int]
    #: Those that are yet to leave, and their bytes together.
    waiting: set[int]
    waiting_bytes: int
    #: Bytes of those that are on the device since an unpack comes soon, or are to be: see
    #: ``PrefetchOrder.followed_bytes``; and of each, by which unpack of the device that comes.
    promised: dict[int, int]
    due: list[int]
    #: Where those are counted that have left and were not asked for.
    unasked: dict[int, Counters]
    #: Copies back that the device's bytes are held for.
    returning: dict[int, Transfer]

    def on_finalized(self) -> None:
        saves = self.saves()
        self.forget_all(None if saves is None else saves.offloader)
        if saves is not None:
            saves.release_scratch()
        if self.slots and not (self.is_spoiled or self.known.is_forgotten):
            self.known.idle.append([slot for slot in self.slots if slot is not None])

    def forget_all(self, offloader: DeviceOffloader | None) -> None:
        """Whatever it still counts is gone; ``offloader`` is ``None`` where that was closed, and is gone too."""
        if offloader is not None and offloader.is_crashed:
            return
        if offloader is not None:
            for transfer in offloader.held_back():
                storage = transfer.record
                if isinstance(storage, FollowedStorage) and storage.run is self and offloader.cancel(transfer):
                    storage.is_gone = True
                    storage.stay(KeepReason.NEWEST)
        for number in list(self.unsettled):
            self.forget(number, offloader)

    def forget(self, number: int, offloader: DeviceOffloader | None) -> None:
        """A storage has died, or counts no more: what it still counted is gone."""
        live = self.counters.live
        live.without_offload -= self.unsettled.pop(number)
        live.kept -= self.kept.pop(number, 0)
        if (counters := self.unasked.pop(number, None)) is not None:
            counters.released_bytes += self.known.plan.saves[number].nbytes
        self.unpromise(number)
        transfer, waiting = self.returning.pop(number, None), self.waits_no_more(number)
        if offloader is not None:
            offloader.resident_bytes -= waiting
            if transfer is not None:
                offloader.release(transfer)

    def waits_no_more(self, number: int) -> int:
        """The copy of a storage has started, or will not: returns the bytes that had waited for it."""
        if number not in self.waiting:
            return 0
        self.waiting.remove(number)
        nbytes = self.known.plan.saves[number].storage_nbytes
        self.waiting_bytes -= nbytes
        return nbytes

    def unpromise(self, number: int) -> None:
        """No unpack that comes soon needs a storage on the device."""
        nbytes, saves = self.promised.pop(number, 0), self.saves()
        if saves is not None:
            saves.order.followed_bytes -= nbytes
