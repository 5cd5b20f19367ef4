"""Which saved storages of one device leave now, and which turn out to stay."""

from __future__ import annotations

import torch
from torch import Tensor

from eager_offload import marks
from eager_offload._torch import version_of
from eager_offload.eager.handles import SavedStorage, StorageRecord
from eager_offload.engine.offloader import DeviceOffloader
from eager_offload.engine.transfer import Transfer
from eager_offload.marks import Mark
from eager_offload.schedule import ResidentQueue
from eager_offload.stats import KeepReason

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

    def start_due(self, queue: ResidentQueue, sequence: int | None) -> bool:
        """Starts what has to leave ``queue`` now; see ``ResidentQueue.due``.

        Returns:
            Whether the window is full, so that the rest can only start when there is room.
        """
        offloader = self.offloader
        while (key := queue.due(sequence)) is not None:
            saved = self.storage(key)
            if saved is not None and not offloader.has_room(saved.footprint.moved):
                offloader.poll()
                if not offloader.has_room(saved.footprint.moved):
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
        slot = self.offloader.reserve(area.moved)
        if slot is None:
            self.stay(saved, KeepReason.BUDGET)
            return
        source = self._gather(saved) if area.gathered else saved.source_bytes()
        if source is None:
            return
        watched = None if area.gathered else storage
        transfer = Transfer(slot, area.nbytes, self.offloader.accounts.counters, saved.record, watched)
        saved.record.leaving = transfer
        saved.slot = slot  # before: once the copy is over, the bytes are nowhere else
        keepalive = saved.aliases[0] if area.gathered else None
        self.offloader.offload(source, slot, saved.stream, transfer, keepalive=keepalive, key=saved.record.key)
        if (recorder := saved.forward.recorder) is not None:
            recorder.started(saved.number)

    def _gather(self, saved: SavedStorage) -> Tensor | None:
        """The elements of a view side by side; ``None`` where the device has no memory for that, and it stays."""
        offloader = self.offloader
        try:
            with offloader.runtime.enter(saved.stream):  # gathering is compute, of the stream that made the tensor
                return saved.source_bytes()
        except (RuntimeError, MemoryError) as error:
            if not _is_full(error):
                raise
        self.stay(saved, KeepReason.FAILED)
        if offloader.accounts.counters.demote("device_full"):
            offloader.warn(
                f"{offloader.device} has no memory left to gather the {saved.footprint.moved} bytes of a saved view "
                "before they leave: they stay, with the storage that they are a part of"
            )
        return None


def _is_full(error: RuntimeError | MemoryError) -> bool:
    """Whether a device, or the CPU, had no memory for a tensor; torch has an error of its own for the former only."""
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or "DefaultCPUAllocator" in str(error)
