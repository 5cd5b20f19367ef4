"""Which saved storages of one device leave now, where the bytes of each are, and when they come back.

    start_due   the resident queue says what is due; a slot, a copy out
    fetch       resident? else a reload; the look-ahead says what comes early and what goes

What is here needs the lock, but for ``fetch``, which takes it.
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
    """The saved storages of one device, on their way out and back."""

    def __init__(self, offloader: DeviceOffloader, order: PrefetchOrder, keeping: Keeping) -> None:
        self._offloader, self._order, self._keeping = offloader, order, keeping

    def storages(self) -> list[SavedStorage]:
        """Returns every storage that has a living handle, in the order of their saves."""
        records = [record for record in self._offloader.records if isinstance(record, StorageRecord)]
        records.sort(key=attrgetter("key"))
        return [saved for record in records if (saved := record()) is not None]

    # -- out --------------------------------------------------------------------------------------------------------

    def start_due(
        self, queue: ResidentQueue, sequence: int | None, found: ReservedSlot | None = None
    ) -> Shortage | None:
        """Starts what has to leave ``queue`` now; see ``ResidentQueue.due``.

        Args:
            found: what the first of them lacked.

        Returns:
            What the rest waits for, if anything; see ``DeviceOffloader.go_on``.
        """
        offloader = self._offloader
        if not offloader.windows.is_known:
            self._keeping.grow(queue)
        record = queue.due(sequence)
        while record is not None:
            saved: SavedStorage | None = record()
            if saved is None:  # it died a moment ago
                offloader.resident_bytes -= queue.discard(record)
                record = queue.due(sequence)
                continue
            area, storage = saved.footprint, saved.aliases[0].untyped_storage()
            reason: KeepReason | None = None
            slot: Slot | None = None
            gathered: Tensor | None = None
            if storage.nbytes() < area.start + area.nbytes:
                reason = KeepReason.LAYOUT  # resized since it was saved
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
                if marks.standing:  # a mark is in force until the copy starts
                    marks.clear_mark(storage)
            record.queue, following = None, queue.due(sequence, without=record)
            saved.started = CopyStart(queue, sequence, version_of(saved.aliases[0]))
            if slot is None or reason is not None:
                self._stay(saved, reason or KeepReason.BUDGET)
                record = following
                continue
            saved.slot = slot  # before the copy starts: once that is over, the bytes are nowhere else
            counters = offloader.accounts.counters
            if gathered is None:
                transfer = Transfer(slot, area.nbytes, counters, record, storage)
                source = storage if area.whole and offloader.runtime.copies_storages else saved.source_bytes()
                offloader.offload(source, slot, saved.stream, transfer, key=record.key)
            else:
                transfer = Transfer(slot, area.nbytes + area.moved, counters, record)
                offloader.add_resident(area.moved, transfer)
                # The stream may still have to gather when the handle, and with it the source, goes.
                offloader.offload(gathered, slot, saved.stream, transfer, keepalive=storage, key=record.key)
            record = following
        return None

    def _stay(self, saved: SavedStorage, reason: KeepReason) -> None:
        """Counts a storage that has not started to leave as kept, and with it every save that shares it."""
        saved.record.stay(reason)
        self._offloader.resident_bytes -= saved.footprint.nbytes

    # -- back -------------------------------------------------------------------------------------------------------

    def fetch(self, view: SavedView) -> Tensor:
        """Returns the tensor for the current stream once its bytes are there; brings early what is expected next."""
        offloader, order, saved, step = self._offloader, self._order, view.storage, view.step
        runtime, record = offloader.runtime, saved.record
        if offloader.is_captured:
            offloader.send_one(lambda one: one is record or one in order.promised)
        with offloader.lock:
            offloader.poll()
            stream = runtime.current_stream(offloader.device)
            tensor = self._resident(view, stream)
            # 1. What is not resident comes back: for the stream of the pack as its own, for another one beside that.
            target, transfer, is_own = None, None, stream == saved.stream
            if tensor is None and is_own and (target := saved.target) is not None:
                transfer = record.reload
                if target.untyped_storage().nbytes() < target.storage_offset() + target.numel():
                    self._drop(saved)  # it was handed out before, and its new owner has resized it
                    target = transfer = None
            if tensor is None and transfer is None:
                # It is away: the host knows that its bytes have arrived, so no stream has to wait for that.
                assert saved.slot is not None
                target, transfer = offloader.reload(saved.slot, saved.layout, stream, "reload", key=record.key)
                if is_own:
                    saved.target, record.reload = target, transfer
            # 2. The look-ahead, along the table's order, says what is brought early and what goes.
            if not offloader.is_crashed:
                if record.state is LEAVING or record.state is WAITING:
                    self._keep(saved)
                if record.state is not KEPT:
                    record.on_unpack(resident=transfer is None)
                expected = step.asked(view.number, runtime.timestamp())
                if expected is not None:  # other than before
                    order.arrange(step.uses, expected)
                backward = current_backward()
                again = transfer is not None and transfer is record.reload and backward >= 0 and keeps_graph()
                plan = order.on_unpack(step.uses, view.use, backward, again=again)
                if plan.drop or plan.bring:
                    self._follow(plan, record)
            if transfer is None:
                if record not in order.promised:
                    self._drop(saved)
                assert tensor is not None
                return tensor
        # 3. Compute waits without the lock: a wait of the host would stop the thread of the copy, which polls.
        assert target is not None
        try:
            has_waited = not runtime.query(transfer.event) or runtime.may_have_failed(transfer.event)
            if has_waited:
                offloader.wait(transfer, stream, "reload")
            with offloader.lock:
                if has_waited:
                    offloader.mark_consumed(transfer)
                # 4. Autograd owns what was reloaded from here on, unless more of it is expected to be asked for.
                place = scatter(offloader, view, target, stream) if saved.footprint.gathered else target
                storage, first_byte = place.untyped_storage(), int(place.storage_offset())
                tensor, is_expected = view.over(storage, first_byte), record in order.promised
                if record.reload is transfer:
                    saved.returned = Returned(weak_storage(storage), first_byte, transfer.event)
                    if is_expected:
                        return tensor
                    saved.target = record.reload = None
                elif not is_expected:
                    self._drop(saved)  # the one on the stream of the pack, which this stream could not use
                offloader.drop_resident(transfer)
                return tensor
        except BaseException:
            with offloader.lock:
                if record.reload is transfer:
                    saved.target = record.reload = None
                offloader.drop_resident(transfer)
            raise

    def prefetch(self, view: SavedView) -> None:
        """Brings back a saved tensor that the caller is about to ask for, if there is room."""
        offloader, record = self._offloader, view.storage.record
        with offloader.lock:
            offloader.poll()
            if not offloader.is_crashed and not offloader.is_captured and self._order.promise(view.use):
                found = Prefetch()
                found.bring, found.drop = [record], []
                self._follow(found, record)

    def drop_all_but(self, needed: SavedStorage) -> None:
        """Lets go of all that was brought back early, but for ``needed``."""
        for saved in self.storages():
            if saved is not needed:
                self._drop(saved)

    def hold_source(self, saved: SavedStorage, transfer: Transfer) -> None:
        """Keeps the source of a storage that is promised, as if its bytes, which rest in a tier, had come back.

        Not where the storage was saved anew: that save would be taken for one that something else keeps alive.
        """
        if saved.target is None and not saved.footprint.gathered and not saved.saved_anew:
            self._hold(saved, saved.source_bytes(), transfer.event, is_source=True)

    def _resident(self, view: SavedView, stream: Stream) -> Tensor | None:
        """Returns the tensor if its bytes are on the device: not gone yet, kept by another owner, or back already."""
        saved = view.storage
        original = None if view.original is None else view.original()
        if saved.record.state is not AWAY:
            return view.alias.detach() if original is None else original
        storage, first_byte, nbytes = saved.origin(), saved.footprint.start, saved.footprint.nbytes
        if storage is not None and storage.nbytes() >= first_byte + nbytes:
            # A part of a storage tells nothing: other parts of it that were saved may hold all of it.
            is_new = not (saved.record.asked or saved.saved_anew) and saved.target is None
            if is_new and saved.footprint.whole:
                saved.step.log.alive.add(saved.first)
            return view.over(storage, first_byte) if original is None else original
        if original is not None and storage_of(original) is not storage:
            return original  # it was given other bytes, `tensor.data = ...`, and autograd looks at those
        if saved.returned is not None and stream == saved.stream:
            storage, first_byte = saved.returned.storage(), saved.returned.first_byte
            if storage is not None and storage.nbytes() >= first_byte + nbytes:  # else its owner has resized it
                return view.over(storage, first_byte)
        return None

    def _keep(self, saved: SavedStorage) -> None:
        """Keeps a storage whose copy has not started: backward has come to it, so to move it would be in vain."""
        record = saved.record
        if record.state is WAITING:
            self._stay(saved, KeepReason.NEWEST)
            if record.queue is not None:
                record.queue.discard(record)
                record.queue = None
        elif self._offloader.cancel_copy_of(record):
            record.stay(KeepReason.NEWEST)

    def _follow(self, plan: Prefetch, current: StorageRecord) -> None:
        """Carries out what the prefetch order says; ``current`` is being handed out and sees to itself."""
        for record in plan.drop:
            if record is not current:
                self._drop(record())
        for record in plan.bring:
            saved: SavedStorage | None = record()
            if saved is None or record.state is not AWAY or saved.target is not None or saved.origin() is not None:
                continue
            if saved.returned is not None and saved.returned.storage() is not None:
                target = None if saved.footprint.gathered else saved.returned_bytes()
                if target is not None:  # a node has it, with which it would go
                    self._hold(saved, target, saved.returned.event)
                continue
            assert saved.slot is not None
            try:
                back = self._offloader.reload(saved.slot, saved.layout, saved.stream, "prefetch", key=record.key)
            except (torch.OutOfMemoryError, MemoryError):
                return  # prefetch is a hint: what is needed now may still fit
            saved.target, record.reload = back

    def _hold(self, saved: SavedStorage, target: Tensor, event: Event, *, is_source: bool = False) -> None:
        """Keeps ``target``, in which the bytes of a storage are that is promised, as what was reloaded is kept."""
        assert saved.slot is not None
        back = Transfer(saved.slot, saved.footprint.nbytes, saved.record.counters)
        back.event = event
        self._offloader.add_resident(back.nbytes, None if is_source else back)
        saved.target, saved.record.reload = target, back

    def _drop(self, saved: SavedStorage | None) -> None:
        """Lets go of what was brought back early and is not expected soon any more; a copy on its way holds its
        target."""
        if saved is not None and saved.record.reload is not None:
            self._offloader.drop_resident(saved.record.reload)
            saved.target = saved.record.reload = None
