"""Tier to device: what is asked for comes back, and what is expected next comes early."""

from __future__ import annotations

import torch
from torch import Tensor

from eager_offload._torch import storage_of, weak_storage
from eager_offload.eager.handles import Reload, Returned, SavedStorage, SavedView, StorageRecord
from eager_offload.eager.offloading import Offloading
from eager_offload.eager.packing import unpacked, unpacked_at_once
from eager_offload.engine.transfer import AWAY, LEAVING, WAITING, Transfer
from eager_offload.engine.transfers import Transfers
from eager_offload.runtime.base import Event, Layout, Stream
from eager_offload.schedule import Prefetch, PrefetchOrder
from eager_offload.stats import KeepReason


class Reloading:
    """The saved storages of one device, on their way back."""

    def __init__(self, transfers: Transfers, offloading: Offloading) -> None:
        self._transfers, self._offloading = transfers, offloading
        self.order = PrefetchOrder(self._transfers.windows.prefetch)

    def hand_over(self, view: SavedView, reload: Reload, stream: Stream) -> Tensor:
        """What was reloaded belongs to autograd from here on, unless more of it is expected to be asked for."""
        saved, place = view.storage, reload.target
        if reload.is_packed:
            place = unpacked(self._transfers, saved, place, stream)
        storage, first_byte = place.untyped_storage(), int(place.storage_offset())
        tensor, expected = view.over(storage, first_byte), saved.record in self.order.promised
        if saved.reload is reload:
            saved.returned = Returned(weak_storage(storage), first_byte, reload.transfer.event)
            if expected:
                return tensor
            saved.reload = saved.record.reload = None
        elif not expected:
            self.drop(saved)  # the one on the stream of the pack, which this stream could not use
        self._transfers.release(reload.transfer)
        return tensor

    def drop(self, saved: SavedStorage | None) -> None:
        """A storage that was brought back early is not expected soon any more; a copy on its way holds its target."""
        if saved is not None and saved.reload is not None:
            self._transfers.release(saved.reload.transfer)
            saved.reload = saved.record.reload = None

    def drop_all_but(self, needed: SavedStorage) -> None:
        for saved in self._offloading.storages():
            if saved is not needed:
                self.drop(saved)

    def on_arrival(self, saved: SavedStorage, transfer: Transfer) -> None:
        """Keeps the source of a storage that is promised, as if its bytes, which rest in a tier, had come back.

        Not where the storage was saved anew: that save would be taken for one that something else keeps alive.
        """
        if saved.reload is None and saved.coding is None and not saved.saved_anew:
            self._hold(saved, saved.source_bytes(), transfer.event, is_source=True)

    def _hold(self, saved: SavedStorage, target: Tensor, event: Event, *, is_source: bool = False) -> None:
        """Keeps ``target``, in which the bytes of a storage are that is promised, as what was reloaded is kept."""
        assert saved.slot is not None
        back = Transfer(saved.slot, saved.footprint.nbytes, saved.record.counters)
        back.event = event
        self._transfers.hold(back.nbytes, None if is_source else back)
        saved.reload, saved.record.reload = Reload(target, back), back

    def stay_if_it_can(self, saved: SavedStorage) -> None:
        """Backward has come to a storage, so that to move it from now on would be in vain."""
        record = saved.record
        if record.state is LEAVING and self._transfers.cancel_copy_of(record):
            record.stay(KeepReason.NEWEST)
        elif record.state is WAITING:
            self.stay(saved)

    def stay(self, saved: SavedStorage) -> None:
        """A storage whose copy has not started stays where it is."""
        self._offloading.stay(saved, KeepReason.NEWEST)
        record = saved.record
        if record.queue is not None:
            record.queue.discard(record)
            record.queue = None

    def resident(self, view: SavedView, stream: Stream) -> Tensor | None:
        """The tensor, if its bytes are on the device: not gone yet, kept alive by another owner, or back already."""
        saved = view.storage
        original = None if view.original is None else view.original()
        is_away = saved.record.state is AWAY
        if not is_away and saved.packed is None:
            return view.alias.detach() if original is None else original
        storage, first_byte, nbytes = saved.origin(), saved.footprint.start, saved.footprint.nbytes
        if storage is not None and storage.nbytes() >= first_byte + nbytes:
            # A part of a storage tells nothing: other parts of it that were saved may hold all of it.
            is_new = not (saved.record.asked or saved.saved_anew) and saved.reload is None
            if is_away and is_new and saved.footprint.whole:
                saved.step.log.alive.add(saved.first)
            if not saved.rounds:
                return view.over(storage, first_byte) if original is None else original
        if original is not None and storage_of(original) is not storage:
            return original  # it was given other bytes, `tensor.data = ...`, and autograd looks at those
        if saved.returned is not None and stream == saved.stream:
            storage, first_byte = saved.returned.storage(), saved.returned.first_byte
            if storage is not None and storage.nbytes() >= first_byte + nbytes:  # else its owner has resized it
                return view.over(storage, first_byte)
        return None if saved.packed is None else unpacked_at_once(view, saved, stream)

    def follow(self, plan: Prefetch, current: StorageRecord) -> None:
        """Carries out what the prefetch order says; ``current`` is being handed out and sees to itself."""
        for record in plan.drop:
            if record is not current:
                self.drop(record())
        for record in plan.bring:
            saved: SavedStorage | None = record()
            if saved is None or record.state is not AWAY or saved.reload is not None:
                continue
            if saved.origin() is not None:
                continue
            if saved.returned is not None and saved.returned.storage() is not None:
                target = saved.returned_bytes() if saved.coding is None else None
                if target is not None:  # a node has it, with which it would go
                    self._hold(saved, target, saved.returned.event)
                continue
            try:
                saved.reload = self._bring(saved, saved.stream, "prefetch")
                record.reload = saved.reload.transfer
            except (torch.OutOfMemoryError, MemoryError):
                return  # prefetch is a hint: what is needed now may still fit

    def reload_for(self, saved: SavedStorage, stream: Stream) -> Reload:
        """The reload that ``stream`` can wait for: the shared one on the stream of the pack, else one of its own."""
        shared = stream == saved.stream
        if shared and saved.reload is not None:
            target = saved.reload.target
            if target.untyped_storage().nbytes() >= target.storage_offset() + target.numel():
                return saved.reload
            self.drop(saved)  # it was handed out before, and its new owner has resized it
        reload = self._bring(saved, stream, "reload")
        if shared:
            saved.reload, saved.record.reload = reload, reload.transfer
        return reload

    def _bring(self, saved: SavedStorage, stream: Stream, what: str) -> Reload:
        """Starts a reload into a new target that belongs to ``stream``."""
        assert saved.slot is not None
        assert saved.record.state is AWAY, "the host knows that the bytes have arrived: no stream has to wait for that"
        coding, key = saved.coding, saved.record.key
        # What was packed is unpacked later, into other memory.
        layout = Layout(saved.footprint.nbytes, saved.alignment_offset) if coding is None else Layout(coding.nbytes)
        target, transfer = self._transfers.reload(saved.slot, layout, stream, what, key=key)
        return Reload(target, transfer, coding is not None)
