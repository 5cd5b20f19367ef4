"""Which saved storages of one device leave now, and which turn out to stay."""

from __future__ import annotations

from operator import attrgetter

from eager_offload import marks
from eager_offload._torch import version_of
from eager_offload.eager.handles import SavedStorage, StorageRecord
from eager_offload.eager.packing import Packed, let_go, packed
from eager_offload.engine.transfer import Transfer
from eager_offload.engine.transfers import FoundSlot, Lack, Transfers
from eager_offload.marks import Mark
from eager_offload.schedule import ResidentQueue
from eager_offload.stats import KeepReason
from eager_offload.tiers.base import MustGrow, Slot


class Offloading:
    """The saved storages of one device, on their way out."""

    def __init__(self, transfers: Transfers) -> None:
        self.transfers = transfers

    def storages(self) -> list[SavedStorage]:
        """Every storage that has a living handle, in the order of their saves."""
        records = [record for record in self.transfers.records if isinstance(record, StorageRecord)]
        records.sort(key=attrgetter("key"))
        return [saved for record in records if (saved := record()) is not None]

    def start_due(self, queue: ResidentQueue, sequence: int | None, found: FoundSlot | None = None) -> Lack | None:
        """Starts what has to leave ``queue`` now; see ``ResidentQueue.due``.

        Args:
            found: what the first of them lacked.

        Returns:
            What the rest waits for, if anything; see ``DeviceOffloader.go_on``.
        """
        transfers = self.transfers
        while (record := queue.due(sequence)) is not None:
            saved: SavedStorage | None = record()
            if saved is None:  # it died a moment ago
                transfers.resident_bytes -= queue.discard(record)
                continue
            if saved.coding is not None and saved.coding.looks:
                with transfers.runtime.enter(saved.stream):
                    saved.look(saved.coding)
            nbytes = saved.footprint.nbytes if saved.coding is None else saved.coding.nbytes
            if not transfers.has_room(nbytes):
                transfers.poll()
                if not transfers.has_room(nbytes):
                    return Lack(0)
            reason, slot, packing = self._reason_to_stay(saved), None, None
            if reason is None:
                try:
                    slot = transfers.slot_for(nbytes, found)
                except MustGrow:
                    return Lack(nbytes)
                reason = KeepReason.BUDGET if slot is None else None
            if slot is not None and saved.coding is not None:
                packing = packed(transfers, saved, saved.coding)
                if packing is None:
                    reason = KeepReason.FAILED
                elif packing.is_refused:
                    transfers.accounts.counters.refuse(saved.coding.codec.name)
                    saved.coding = None
                    continue
            queue.discard(record)
            record.queue = None
            saved.started = queue, sequence, version_of(saved.aliases[0])
            if slot is None or reason is not None:
                self.stay(saved, reason or KeepReason.BUDGET)
            elif packing is None:
                self._start_as_it_is(saved, slot)
            else:
                self._start_packed(saved, slot, packing)
        return None

    def stay(self, saved: SavedStorage, reason: KeepReason) -> None:
        """A storage that has not started to leave stays, and with it every save that shares it."""
        saved.record.stay(reason)
        self.transfers.resident_bytes -= saved.footprint.nbytes

    def _reason_to_stay(self, saved: SavedStorage) -> KeepReason | None:
        """Why a storage whose turn it is stays after all."""
        area, storage = saved.footprint, saved.aliases[0].untyped_storage()
        if storage.nbytes() < area.start + area.nbytes:
            return KeepReason.LAYOUT  # resized since it was saved
        if marks.standing:
            if marks.mark_of(storage) is Mark.KEEP:
                return KeepReason.MARKED
            marks.clear_mark(storage)
        return None

    def _start_as_it_is(self, saved: SavedStorage, slot: Slot) -> None:
        area, storage, transfers = saved.footprint, saved.aliases[0].untyped_storage(), self.transfers
        transfer = Transfer(slot, area.nbytes, transfers.accounts.counters, saved.record, storage)
        source = storage if area.whole and transfers.runtime.copies_storages else saved.source_bytes()
        saved.slot = slot  # before: once the copy is over, the bytes are nowhere else
        transfers.offload(source, slot, saved.stream, transfer, key=saved.record.key)

    def _start_packed(self, saved: SavedStorage, slot: Slot, packing: Packed) -> None:
        transfers, coding, keepalive = self.transfers, saved.coding, saved.aliases[0].untyped_storage()
        assert coding is not None
        transfer = Transfer(slot, saved.footprint.nbytes, transfers.accounts.counters, saved.record)
        transfer.codec, transfer.holds = coding.codec.name, packing.holds
        saved.slot = slot  # likewise
        transfers.offload(packing.packed, slot, saved.stream, transfer, keepalive=keepalive, key=saved.record.key)
        if packing.holds is None:
            let_go(transfers, saved, transfer, packing.packed)
