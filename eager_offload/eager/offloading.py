"""Which saved storages of one device leave now, and which turn out to stay."""

from __future__ import annotations

from torch import Tensor

from eager_offload import marks
from eager_offload._torch import version_of
from eager_offload.eager.coding import Coding
from eager_offload.eager.handles import SavedStorage, StorageRecord
from eager_offload.eager.packing import let_go, packed
from eager_offload.engine.offloader import DeviceOffloader
from eager_offload.engine.transfer import Transfer
from eager_offload.marks import Mark
from eager_offload.schedule import ResidentQueue
from eager_offload.stats import KeepReason
from eager_offload.tiers.base import Slot

__all__ = ["Offloading"]


class Offloading:
    """The saved storages of one device, on their way out. Callers hold the offloader's lock."""

    def __init__(self, offloader: DeviceOffloader) -> None:
        self.offloader = offloader
        #: Every storage that has a living handle, by key.
        self.storages: dict[int, StorageRecord] = {}

    def storage(self, key: int) -> SavedStorage | None:
        """The saved storage of ``key``, while a handle of it lives."""
        record = self.storages.get(key)
        return None if record is None else record()

    def start_due(self, queue: ResidentQueue, sequence: int | None, beside: int = 0) -> bool:
        """Starts what has to leave ``queue`` now; see ``ResidentQueue.due``.

        Returns:
            Whether the window is full, so that the rest can only start when there is room.
        """
        offloader = self.offloader
        while (key := queue.due(sequence, beside)) is not None:
            saved = self.storage(key)
            if saved is not None:
                if saved.coding is not None and saved.coding.looks:
                    with offloader.runtime.enter(saved.stream):
                        saved.look(saved.coding)
                if not offloader.has_room(saved.moved):
                    offloader.poll()
                    if not offloader.has_room(saved.moved):
                        return True
            nbytes = queue.discard(key)
            if saved is None:  # it died a moment ago
                offloader.resident_bytes -= nbytes
                continue
            saved.record.queue = None
            saved.started = queue, sequence, version_of(saved.aliases[0])
            self._start(saved)
        return False

    def stay(self, saved: SavedStorage, reason: KeepReason) -> None:
        """A storage that has not started to leave stays, and with it every save that shares it."""
        saved.record.stay(reason)
        self.offloader.resident_bytes -= saved.footprint.nbytes
        if (observer := self.offloader.accounts.observer) is not None:
            observer.stays(saved.record.key)

    def stay_after_all(self, saved: SavedStorage) -> None:
        """The copy of a storage was cancelled."""
        saved.record.leaving = saved.slot = None
        saved.record.stay(KeepReason.NEWEST)
        if (observer := self.offloader.accounts.observer) is not None:
            observer.stays(saved.record.key)

    def _start(self, saved: SavedStorage) -> None:
        """Starts the copy of a storage, or finds that it stays."""
        area, storage = saved.footprint, saved.aliases[0].untyped_storage()
        if storage.nbytes() < area.start + area.nbytes:
            self.stay(saved, KeepReason.LAYOUT)  # resized since it was saved
            return
        if marks.any_marks():
            if marks.mark_of(storage) is Mark.KEEP:
                self.stay(saved, KeepReason.MARKED)
                return
            marks.clear_mark(storage)
        if saved.coding is None:
            self._start_as_it_is(saved)
        else:
            self._start_packed(saved, saved.coding)

    def _start_as_it_is(self, saved: SavedStorage) -> None:
        slot = self.offloader.reserve(saved.footprint.nbytes)
        if slot is None:
            self.stay(saved, KeepReason.BUDGET)
            return
        storage, counters = saved.aliases[0].untyped_storage(), self.offloader.accounts.counters
        transfer = Transfer(slot, saved.footprint.nbytes, counters, saved.record, storage)
        self._leave(saved, saved.source_bytes(), slot, transfer)

    def _start_packed(self, saved: SavedStorage, coding: Coding) -> None:
        offloader = self.offloader
        slot = offloader.reserve(coding.nbytes)
        if slot is None:
            self.stay(saved, KeepReason.BUDGET)
            return
        found = packed(offloader, saved, coding)
        if found is None:
            self.stay(saved, KeepReason.FAILED)
            return
        if found.is_refused:
            offloader.accounts.counters.refuse(coding.codec.name)
            saved.coding = slot = found = None
            self._start_as_it_is(saved)
            return
        transfer = Transfer(slot, saved.footprint.nbytes, offloader.accounts.counters, saved.record)
        transfer.codec, transfer.holds = coding.codec.name, found.holds
        self._leave(saved, found.packed, slot, transfer, keepalive=saved.aliases[0].untyped_storage())
        if found.holds is None:
            let_go(offloader, saved, transfer, found.packed)

    def _leave(
        self, saved: SavedStorage, source: Tensor, slot: Slot, transfer: Transfer, *, keepalive: object = None
    ) -> None:
        record = saved.record
        record.leaving = transfer
        saved.slot = slot  # before: once the copy is over, the bytes are nowhere else
        self.offloader.offload(source, slot, saved.stream, transfer, keepalive=keepalive, key=record.key)
        if (recorder := saved.forward.recorder) is not None:
            recorder.started(saved.number, None if saved.coding is None else saved.coding.coded)
