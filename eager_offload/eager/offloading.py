"""Which saved storages of one device leave now, and which turn out to stay."""

from __future__ import annotations

from operator import attrgetter

import torch
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

    def storages(self) -> list[SavedStorage]:
        """Every storage that has a living handle, in the order of their saves."""
        records = [record for record in self.offloader.records if isinstance(record, StorageRecord)]
        records.sort(key=attrgetter("key"))
        return [saved for record in records if (saved := record()) is not None]

    def start_due(self, queue: ResidentQueue, sequence: int | None, beside: int = 0) -> bool:
        """Starts what has to leave ``queue`` now; see ``ResidentQueue.due``.

        Returns:
            Whether the window is full, so that the rest can only start when there is room.
        """
        offloader = self.offloader
        while (record := queue.due(sequence, beside)) is not None:
            saved: SavedStorage | None = record()
            if saved is not None:
                if saved.coding is not None and saved.coding.looks:
                    with offloader.runtime.enter(saved.stream):
                        saved.look(saved.coding)
                moved = saved.moved
                if not offloader.has_room(moved):
                    offloader.poll()
                    if not offloader.has_room(moved):
                        return True
            nbytes = queue.discard(record)
            if saved is None:  # it died a moment ago
                offloader.resident_bytes -= nbytes
                continue
            record.queue = None
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
        if marks.standing and marks.any_marks():
            if marks.mark_of(storage) is Mark.KEEP:
                self.stay(saved, KeepReason.MARKED)
                return
            marks.clear_mark(storage)
        if saved.coding is None:
            self._start_as_it_is(saved, storage)
        else:
            self._start_packed(saved, saved.coding, storage)

    def _start_as_it_is(self, saved: SavedStorage, storage: torch.UntypedStorage) -> None:
        offloader, area = self.offloader, saved.footprint
        slot = offloader.reserve(area.nbytes)
        if slot is None:
            self.stay(saved, KeepReason.BUDGET)
            return
        transfer = Transfer(slot, area.nbytes, offloader.accounts.counters, saved.record, storage)
        source = storage if area.whole and offloader.runtime.copies_storages else saved.source_bytes()
        self._leave(saved, source, slot, transfer)

    def _start_packed(self, saved: SavedStorage, coding: Coding, storage: torch.UntypedStorage) -> None:
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
            self._start_as_it_is(saved, storage)
            return
        transfer = Transfer(slot, saved.footprint.nbytes, offloader.accounts.counters, saved.record)
        transfer.codec, transfer.holds = coding.codec.name, found.holds
        self._leave(saved, found.packed, slot, transfer, keepalive=storage)
        if found.holds is None:
            let_go(offloader, saved, transfer, found.packed)

    def _leave(
        self,
        saved: SavedStorage,
        source: Tensor | torch.UntypedStorage,
        slot: Slot,
        transfer: Transfer,
        *,
        keepalive: object = None,
    ) -> None:
        record = saved.record
        record.leaving = transfer
        saved.slot = slot  # before: once the copy is over, the bytes are nowhere else
        self.offloader.offload(source, slot, saved.stream, transfer, keepalive=keepalive, key=record.key)
        if (recorder := saved.forward.recorder) is not None:
            recorder.started(saved.number, None if saved.coding is None else saved.coding.coded)
