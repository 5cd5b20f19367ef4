"""The transfers of one device's saved storages: offloads that are due, reloads, and prefetches.

    start_due   takes due storages from the resident queue and starts their copies out
    fetch       returns a tensor, from the device or by a reload, and prefetches along the expected order

``fetch`` and ``prefetch`` take the offloader's lock; callers of all other methods hold it.
"""

from __future__ import annotations

from operator import attrgetter

import torch
from torch import Tensor

from eager_offload import marks
from eager_offload.core.schedule import Prefetch, PrefetchOrder, ResidentQueue
from eager_offload.eager.gather import gather, scatter
from eager_offload.eager.handles import CopyStart, Returned, SavedStorage, SavedView, StorageRecord
from eager_offload.eager.keeping import Keeping
from eager_offload.engine.offloader import DeviceOffloader
from eager_offload.engine.transfer import AWAY, KEPT, LEAVING, WAITING, Transfer
from eager_offload.engine.transfers import ReservedSlot, Shortage
from eager_offload.marks import Mark
from eager_offload.runtime.base import Event, Stream
from eager_offload.stats import KeepReason
from eager_offload.tiers.base import Slot
from eager_offload.torch_private.autograd import current_backward, keeps_graph
from eager_offload.torch_private.memory import storage_of, version_of, weak_storage


class Moves:
    """Offloads and reloads the saved storages of one device."""

    def __init__(self, offloader: DeviceOffloader, order: PrefetchOrder, keeping: Keeping) -> None:
        self._offloader, self._order, self._keeping = offloader, order, keeping

    def storages(self) -> list[SavedStorage]:
        """Returns every storage with a live handle, in save order."""
        records = [record for record in self._offloader.records if isinstance(record, StorageRecord)]
        records.sort(key=attrgetter("key"))
        return [saved for record in records if (saved := record()) is not None]

    # -- out --------------------------------------------------------------------------------------------------------

    def start_due(
        self, queue: ResidentQueue, sequence: int | None, found: ReservedSlot | None = None
    ) -> Shortage | None:
        """Starts the copies of the storages that are due in ``queue``.

        Args:
            found: the slot that was reserved for the first of them, after a ``Shortage``.

        Returns:
            What the remaining due storages wait for, if anything; see ``DeviceOffloader.go_on``.
        """
        offloader = self._offloader
        if not offloader.windows.is_known:
            self._keeping.grow(queue)
        record = queue.due(sequence)
        while record is not None:
            saved: SavedStorage | None = record()
            if saved is None:  # its last handle has just died
                offloader.resident_bytes -= queue.discard(record)
                record = queue.due(sequence)
                continue
            area, storage = saved.footprint, saved.aliases[0].untyped_storage()
            reason: KeepReason | None = None
            slot: Slot | None = None
            gathered: Tensor | None = None
            if storage.nbytes() < area.start + area.nbytes:
                reason = KeepReason.LAYOUT  # resized after the save
            elif marks.standing and marks.mark_of(storage) is Mark.KEEP:
                reason = KeepReason.MARKED
            else:
                at_hand = offloader.slot_for(area.moved, found)
                if isinstance(at_hand, Shortage):
                    return at_hand
                slot = at_hand
                if slot is None:
                    reason = KeepReason.BUDGET
                elif area.gathered and (gathered := gather(offloader, saved)) is None:
                    reason = KeepReason.FAILED
                if marks.standing:  # a mark holds until the copy starts
                    marks.clear_mark(storage)
            record.queue, following = None, queue.due(sequence, without=record)
            saved.started = CopyStart(queue, sequence, version_of(saved.aliases[0]))
            if slot is None or reason is not None:
                self._stay(saved, reason or KeepReason.BUDGET)
                record = following
                continue
            saved.slot = slot  # set before the copy starts: after it, the slot has the only bytes
            counters = offloader.accounts.counters
            if gathered is None:
                transfer = Transfer(slot, area.nbytes, counters, record, storage)
                source = storage if area.whole and offloader.runtime.copies_storages else saved.source_bytes()
                offloader.offload(source, slot, saved.stream, transfer, key=record.key)
            else:
                transfer = Transfer(slot, area.nbytes + area.moved, counters, record)
                offloader.add_resident(area.moved, transfer)
                # The handle, and with it the source, may die before the stream has run the gather. Hold the source.
                offloader.offload(gathered, slot, saved.stream, transfer, keepalive=storage, key=record.key)
            record = following
        return None

    def _stay(self, saved: SavedStorage, reason: KeepReason) -> None:
        """Keeps a storage whose copy has not started, and counts it and all saves that share it as kept."""
        saved.record.stay(reason)
        self._offloader.resident_bytes -= saved.footprint.nbytes

    # -- back -------------------------------------------------------------------------------------------------------

    def fetch(self, view: SavedView) -> Tensor:
        """Returns the tensor, ordered after its reload on the current stream, and prefetches the next ones."""
        offloader, order, saved, step = self._offloader, self._order, view.storage, view.step
        runtime, record = offloader.runtime, saved.record
        if offloader.is_captured:
            # A source that this or a promised unpack needs is not released.
            offloader.send_one(lambda one: one is record or one in order.promised)
        with offloader.lock:
            offloader.poll()
            stream = runtime.current_stream(offloader.device)
            tensor = self._resident(view, stream)
            # 1. Reload if not resident. Another stream than the pack's gets a reload of its own.
            target, transfer, is_own = None, None, stream == saved.stream
            if tensor is None and is_own and (target := saved.target) is not None:
                transfer = record.reload
                if target.untyped_storage().nbytes() < target.storage_offset() + target.numel():
                    self._drop(saved)  # autograd received it before, and its new owner has resized it
                    target = transfer = None
            if tensor is None and transfer is None:
                # AWAY means that the host has seen the copy out end, so the reload need not wait for it.
                assert saved.slot is not None
                target, transfer = offloader.reload(saved.slot, saved.layout, stream, "reload", key=record.key)
                if is_own:
                    saved.target, record.reload = target, transfer
            # 2. Prefetch and drop along the expected order.
            if not offloader.is_crashed:
                if record.state is LEAVING or record.state is WAITING:
                    self._keep(saved)
                if record.state is not KEPT:
                    record.on_unpack(resident=transfer is None)
                expected = step.on_unpack(view.number, runtime.timestamp())
                if expected is not None:  # the order has changed
                    order.arrange(step.uses, expected)
                backward = current_backward()
                # With ``retain_graph`` backward may unpack this use again, so the order may hold the reload.
                again = transfer is not None and transfer is record.reload and backward >= 0 and keeps_graph()
                plan = order.on_unpack(step.uses, view.use, backward, again=again)
                if plan.drop or plan.bring:
                    self._follow(plan, record)
            if transfer is None:
                if record not in order.promised:
                    self._drop(saved)
                assert tensor is not None
                return tensor
        # 3. Wait without the lock: on a CPU the host waits for a copy thread, which polls under the lock.
        assert target is not None
        try:
            has_waited = not runtime.query(transfer.event) or runtime.may_have_failed(transfer.event)
            if has_waited:
                offloader.wait(transfer, stream, "reload")
            with offloader.lock:
                if has_waited:
                    offloader.mark_consumed(transfer)
                # 4. From here on autograd owns the reloaded memory, unless further uses of it are expected.
                place = scatter(offloader, view, target, stream) if saved.footprint.gathered else target
                storage, first_byte = place.untyped_storage(), int(place.storage_offset())
                tensor, is_expected = view.over(storage, first_byte), record in order.promised
                if record.reload is transfer:
                    saved.returned = Returned(weak_storage(storage), first_byte, transfer.event)
                    if is_expected:
                        return tensor
                    saved.target = record.reload = None
                elif not is_expected:
                    self._drop(saved)  # the reload for the pack's stream, which this stream could not use
                offloader.drop_resident(transfer)
                return tensor
        except BaseException:
            with offloader.lock:
                if record.reload is transfer:
                    saved.target = record.reload = None
                offloader.drop_resident(transfer)
            raise

    def prefetch(self, view: SavedView) -> None:
        """Reloads a saved tensor early, if there is room in the prefetch window."""
        offloader, record = self._offloader, view.storage.record
        with offloader.lock:
            offloader.poll()
            if not offloader.is_crashed and not offloader.is_captured and self._order.promise(view.use):
                found = Prefetch()
                found.bring, found.drop = [record], []
                self._follow(found, record)

    def drop_all_but(self, needed: SavedStorage) -> None:
        """Frees all prefetched storages but ``needed``."""
        for saved in self.storages():
            if saved is not needed:
                self._drop(saved)

    def hold_source(self, saved: SavedStorage, transfer: Transfer) -> None:
        """Keeps the source of an offloaded storage that is promised, in place of a reload.

        Does nothing if a later save made another ``SavedStorage`` of the same source: at the unpack of that save, the
        source would be alive, and would be taken for a storage that the program still references.
        """
        if saved.target is None and not saved.footprint.gathered and not saved.saved_anew:
            self._hold(saved, saved.source_bytes(), transfer.event, is_source=True)

    def _resident(self, view: SavedView, stream: Stream) -> Tensor | None:
        """Returns the tensor if its bytes are on the device: in the source, with another owner, or reloaded before."""
        saved = view.storage
        original = None if view.original is None else view.original()
        if saved.record.state is not AWAY:
            return view.alias.detach() if original is None else original
        storage, first_byte, nbytes = saved.origin(), saved.footprint.start, saved.footprint.nbytes
        if storage is not None and storage.nbytes() >= first_byte + nbytes:
            # Note only whole storages as alive: the storage of a part may be alive because of other saved parts.
            is_new = not (saved.record.is_unpacked or saved.saved_anew) and saved.target is None
            if is_new and saved.footprint.whole:
                saved.step.log.alive.add(saved.first)
            return view.over(storage, first_byte) if original is None else original
        if original is not None and storage_of(original) is not storage:
            return original  # `tensor.data = ...` replaced its bytes, and autograd would use the new ones
        if saved.returned is not None and stream == saved.stream:
            storage, first_byte = saved.returned.storage(), saved.returned.first_byte
            if storage is not None and storage.nbytes() >= first_byte + nbytes:  # not resized by its owner
                return view.over(storage, first_byte)
        return None

    def _keep(self, saved: SavedStorage) -> None:
        """Keeps a storage whose copy has not started, because backward has reached it."""
        record = saved.record
        if record.state is WAITING:
            self._stay(saved, KeepReason.NEWEST)
            if record.queue is not None:
                record.queue.discard(record)
                record.queue = None
        elif self._offloader.cancel_copy_of(record):
            record.stay(KeepReason.NEWEST)

    def _follow(self, plan: Prefetch, current: StorageRecord) -> None:
        """Carries out the prefetch order's drops and reloads, except for ``current``, which ``fetch`` handles."""
        for record in plan.drop:
            if record is not current:
                self._drop(record())
        for record in plan.bring:
            saved: SavedStorage | None = record()
            if saved is None or record.state is not AWAY or saved.target is not None or saved.origin() is not None:
                continue
            if saved.returned is not None and saved.returned.storage() is not None:
                target = None if saved.footprint.gathered else saved.returned_bytes()
                if target is not None:  # only autograd owns it, and would free it before its next use
                    self._hold(saved, target, saved.returned.event)
                continue
            assert saved.slot is not None
            try:
                back = self._offloader.reload(saved.slot, saved.layout, saved.stream, "prefetch", key=record.key)
            except (torch.OutOfMemoryError, MemoryError):
                return  # a prefetch is a hint: the tensor that is needed now may still fit
            saved.target, record.reload = back

    def _hold(self, saved: SavedStorage, target: Tensor, event: Event, *, is_source: bool = False) -> None:
        """Keeps ``target``, which has the bytes of a promised storage, as the result of a reload."""
        assert saved.slot is not None
        back = Transfer(saved.slot, saved.footprint.nbytes, saved.record.counters)
        back.event = event
        self._offloader.add_resident(back.nbytes, None if is_source else back)
        saved.target, saved.record.reload = target, back

    def _drop(self, saved: SavedStorage | None) -> None:
        """Frees a prefetched storage; a copy in flight holds its target until it ends."""
        if saved is not None and saved.record.reload is not None:
            self._offloader.drop_resident(saved.record.reload)
            saved.target = saved.record.reload = None
