"""Following a step plan: what autograd saves goes the way that it went in a step like this one, checked save by save.

[Note: following]
A forward that follows is a ``Run``. What is decided anew in an unknown step is looked up in one that is known:

    pack      the save is as the plan has it   -> its handle, and the copies whose turn it is
    unpack    it is the one that comes next    -> its tensor, and the reloads whose turn it is

A run has no names of storages, logs nothing and has no finalizer for each handle: one for all of it. Its slots were
reserved at once, in the step before or when it began, and go back to the plan when the last handle is gone.

The plan is a hint. At the first save or unpack that differs the run is over: ``SavedTensors.adopt`` takes each handle
that lives over, in the state that it is in, and from there on the step is unknown. What makes bits right is not looked
up but asked each time, here as there: versions, the autograd sequence number, whether a shared storage is the same one.
"""

from __future__ import annotations

import sys
import weakref
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import Parameter

from eager_offload import marks
from eager_offload._torch import autograd_sequence, has_own_memory, storage_of, version_of, weak_storage
from eager_offload.codecs.names import CodecRules
from eager_offload.eager.device_budget import DeviceBudget
from eager_offload.eager.followed import FollowedRecord, FollowedStorage, RunRecord
from eager_offload.eager.handles import Keeper, KeptTensor, Reload, Returned, SavedView, what_stays_of
from eager_offload.eager.packing import Packed, let_go, packed, unpacked, unpacked_at_once
from eager_offload.eager.plans import KnownPlan, Staying, StepPlans, Turn
from eager_offload.engine.offloader import FoundSlot, Lack
from eager_offload.engine.transfer import AWAY, KEPT, LEAVING, WAITING, Transfer
from eager_offload.errors import OffloadError
from eager_offload.learning import Forward, LearnedForwards
from eager_offload.marks import Mark
from eager_offload.runtime.base import Event, Layout
from eager_offload.schedule import ResidentQueue
from eager_offload.selection import is_parameter, root_of
from eager_offload.stats import KeepReason
from eager_offload.step_plan import Ask, Fate, Save
from eager_offload.tiers.base import MustGrow, Slot


class Adopter(Keeper, Protocol):
    """What a run needs of the saved tensors that it belongs to."""

    plans: StepPlans
    rules: CodecRules
    min_bytes: int
    budget: DeviceBudget | None

    def kept_newest(self) -> int:
        """Bytes of the newest that stay now, of all threads. The lock is held."""

    def begin_step(self, queue: ResidentQueue) -> None:
        """What is saved next is another step's, in the same context; ``queue`` is the calling thread's."""

    def adopt(self, run: Run) -> None:
        """From here on the step is unknown. The lock is held."""

    def make_room(self, nbytes: int) -> None:
        """Ends promises that are overdue, so that a run may promise ``nbytes``. The lock is held."""

    def adopt_view(self, view: SavedView, run: Run) -> None:
        """A handle of a run that is over is as one of an unknown step. The lock is held."""


# To ask the class for its member takes longer than to compare.
_PARAMETER, _NEWEST = KeepReason.PARAMETER, KeepReason.NEWEST
_DECIDE, _SHARE = Fate.DECIDE, Fate.SHARE
_STRIDED = torch.strided  # of other layouts some have no number of bytes


def _no_storage() -> None:
    """In place of a weak reference."""


def _is_like(tensor: Tensor, staying: Staying) -> bool:
    """Whether a tensor is as one that has stayed: of a larger storage it may be a part of what has left.

    To stay is right for any tensor, so nothing is asked that would say only that the step is another one.
    """
    kind, (nbytes, storage_nbytes, reason, _) = type(tensor), staying
    try:
        if kind is Parameter and reason is _PARAMETER:  # which stays whatever storage it is of
            return tensor.nbytes == nbytes
        return (
            has_own_memory(kind)
            and tensor.nbytes == nbytes
            and tensor.untyped_storage().nbytes() == storage_nbytes
            and (reason is not _PARAMETER or is_parameter(tensor))
        )
    except (NotImplementedError, RuntimeError):  # a layout without bytes, or a wrapper inside a transform
        return False


def _at_once(view: SavedView, storage: Any) -> Tensor:
    return unpacked_at_once(view, storage, storage.stream)


def resident(view: SavedView, storage: Any, unpack: Callable[[SavedView, Any], Tensor] = _at_once) -> Tensor | None:
    """The tensor, if its bytes are on the device: not gone yet, kept alive by another owner, or back already.

    Args:
        unpack: what unpacks it, where what it was packed to is still there.
    """
    original = None if view.original is None else view.original()
    if storage.state is not AWAY and storage.packed is None:
        return view.alias.detach() if original is None else original
    nbytes = storage.footprint.nbytes
    found = storage.origin()
    if found is not None and found.nbytes() >= nbytes and not storage.rounds:
        return view.over(found, 0) if original is None else original
    if original is not None and storage_of(original) is not found:
        return original  # it was given other bytes, `tensor.data = ...`, and autograd looks at those
    if storage.returned is not None:
        found, first_byte = storage.returned.storage(), storage.returned.first_byte
        if found is not None and found.nbytes() >= first_byte + nbytes:  # else its owner has resized it
            return view.over(found, first_byte)
    if storage.reload is not None:
        target = storage.reload.target
        if target.untyped_storage().nbytes() < target.storage_offset() + target.numel():
            storage.drop_reload()  # it was handed out before, and its new owner has resized it
    return None if storage.packed is None else unpack(view, storage)


class Run:
    """One forward of one thread on one device that follows a plan, and its backward.

    Its handles hold it, and while it packs so does its thread.
    """

    __slots__ = (
        "__weakref__",
        "_ahead",
        "_asks",
        "_counted",
        "_due",
        "_has_one_stream",
        "_keep",
        "_note_end",
        "_offloader",
        "_only_staying",
        "_saves",
        "_starts",
        "_staying",
        "_storages",
        "asked",
        "forward",
        "is_over",
        "is_past",
        "keeper",
        "known",
        "packed",
        "queue",
        "record",
        "stream",
        "turn",
        "views",
    )

    def __init__(
        self,
        known: KnownPlan,
        slots: list[Slot | None],
        keeper: Adopter,
        keep: Callable[[Tensor, KeepReason, int], KeptTensor],
        queue: ResidentQueue,
        sequence: int,
    ) -> None:
        self.known, self.turn = known, Turn(known)
        self.stream = keeper.offloader.runtime.current_stream(keeper.offloader.device)
        self._has_one_stream = keeper.offloader.runtime.has_one_stream
        #: What its thread has for an unknown step: the newest bytes, and the name of its forward.
        self.queue, self.forward = queue, Forward(sequence, LearnedForwards())
        queue.largest = max(queue.largest, known.largest)
        self._saves, self._asks = known.plan.saves, known.plan.asks
        self._staying, self._only_staying, self._starts = known.staying, known.only_staying, known.starts
        self.keeper, self._offloader, self._keep = keeper, keeper.offloader, keep
        self._note_end = keeper.offloader.numbered.append
        #: How many tensors were packed and unpacked.
        self.packed = self.asked = 0
        #: How many of the first saves are counted, if they stay and are counted later.
        self._counted = 0
        #: Whether the rest of the step is unknown.
        self.is_over = False
        #: Whether the next step has begun: something was saved behind its last save, when all was asked for.
        self.is_past = False
        # By number of save; weak, since bytes belong to handles.
        self._storages: list[Callable[[], FollowedStorage | None]] = [_no_storage] * len(self._saves)
        self.views: list[weakref.ref[SavedView]] = []
        #: The saves whose copies are to start.
        self._due: deque[int] = deque()
        #: The saves whose storages are expected next, as far as there was no room to bring them back.
        self._ahead: deque[int] = deque()
        self.record = record = RunRecord(self, self._offloader.on_death)
        record.saves, record.counters = weakref.ref(keeper), self._offloader.accounts.counters
        record.known, record.slots = known, slots
        record.unsettled, record.kept, record.unasked, record.returning = {}, {}, {}, {}
        record.promised, record.due, record.waiting = {}, [0] * len(self._saves), set()
        record.waiting_bytes, record.is_spoiled = 0, False
        self._offloader.records.add(record)

    @property
    def waiting_bytes(self) -> int:
        """Bytes that are yet to leave, or stay as the newest until backward asks for them."""
        return self.record.waiting_bytes

    @property
    def kept_bytes(self) -> int:
        """Bytes of those that were to leave and stay."""
        return sum(self.record.kept.values())

    @property
    def is_complete(self) -> bool:
        """Whether forward and backward are over."""
        return self.packed == len(self._saves) and self.asked == len(self._asks)

    @property
    def is_mostly_gone(self) -> bool:
        """Whether its forward is over, and less than half of the bytes that it has slots for are asked for yet."""
        if self.packed < len(self._saves):
            return False
        alive = sum(storage.moved for weak in self._storages if (storage := weak()) is not None)
        return 2 * alive < sum(self.known.plan.slots)

    def release_slots(self) -> bool:
        """Gives back the slots of what is gone; whether there were any. Any thread may call it."""
        slots, found = self.record.slots, False
        for weak, save in zip(self._storages, self._saves, strict=True):
            if save.slot >= 0 and weak is not _no_storage and weak() is None and slots and slots[save.slot] is not None:
                self.record.is_spoiled, slots[save.slot], found = True, None, True
        return found

    # -- forward ----------------------------------------------------------------------------------------------------

    def pack(self, tensor: Tensor) -> KeptTensor | SavedView | None:
        """The handle of the next save; ``None`` where that is to be decided anew, or the run is over or complete."""
        number = self.packed
        if (staying := self._only_staying[number]) is not None and not (self._due or self.is_over or marks.standing):
            nbytes, _, reason, _ = staying
            if type(tensor) is Parameter and reason is _PARAMETER:  # as most of what stays, which is why it is here
                if tensor.layout is _STRIDED and tensor.nbytes == nbytes:
                    self.packed = number + 1
                    held = tensor if tensor.is_leaf else what_stays_of(tensor)
                    return KeptTensor(held, version_of(tensor), reason)
            elif _is_like(tensor, staying):
                self.packed = number + 1
                return self._stay(tensor, staying)
        offloader = self._offloader
        if number == len(self._saves):
            with offloader.lock:
                self.is_past = not self.is_over and self.is_complete
                if not (self.is_over or self.is_past):
                    self.miss("more")
                self.count_kept()
                return None
        try:
            with offloader.lock:
                if self.is_over:
                    self.count_kept()
                    return None
                if offloader.can_capture and offloader.is_capturing():
                    self.miss("capture")
                    return None
                if offloader.is_crashed or offloader.accounts.observer is not None:
                    self.miss("interrupt" if offloader.is_crashed else "trace")
                    return None
                save = self._saves[number]
                self.packed = number + 1
                found = self._pack(tensor, number, save)
                if isinstance(found, str):
                    self._count_kept(number)  # and not this one
                    self._counted = number + 1
                    self.miss(found)
                    return None
                self._due += self._starts[number]
                if self.keeper.plans.measures.is_close and self._staying[number] is None:
                    self.keeper.plans.saw(self, self.known, number, is_ask=False)
                if self.keeper.budget is not None:
                    self.keeper.budget.note_save()
                lack = self._start_due(autograd_sequence()) if self._due else None
            if lack is not None:
                offloader.go_on(lack, partial(self._start_due, autograd_sequence()))
        except OffloadError:
            raise
        except BaseException:
            offloader.crash()
            raise
        return found

    def _stay(self, tensor: Tensor, staying: Staying) -> KeptTensor:
        if staying.is_counted_later:
            return KeptTensor(what_stays_of(tensor), version_of(tensor), staying.reason)
        return self._keep(tensor, staying.reason, staying.nbytes)

    def count_kept(self) -> None:
        """Counts what has stayed as the plan says, since this was called last. The lock is held."""
        self._count_kept(self.packed)

    def _count_kept(self, after: int) -> None:
        """The same of the saves before ``after``. The thread that packs goes on without the lock meanwhile."""
        if after > (first := self._counted):
            self._counted = after
            self._offloader.accounts.counters.kept_as_planned(*self.known.kept_between(first, after))

    def _pack(self, tensor: Tensor, number: int, save: Save) -> KeptTensor | SavedView | str | None:
        """The handle of save ``number``, ``None`` where it is decided anew, or what differs."""
        fate, kind = save.fate, type(tensor)
        if fate is _DECIDE:
            return None
        if (staying := self._staying[number]) is not None:
            if not _is_like(tensor, staying):
                return "size"
            may_leave = staying.reason is not _PARAMETER and marks.any_marks()  # a parameter stays in any case
            if may_leave and marks.mark_of(tensor.untyped_storage()) is Mark.PREFER:  # it has one, as what it is like
                self._count_kept(number)
                self._counted = number + 1  # it is to leave, which is done as if no plan knew of it
                return None
            return self._stay(tensor, staying)
        if kind is not Tensor and not has_own_memory(kind):
            return "layout"
        try:
            if tensor.nbytes != save.nbytes:
                return "size"
            storage, address = tensor.untyped_storage(), tensor.data_ptr()
        except (NotImplementedError, RuntimeError):  # a layout without bytes, or a wrapper inside a transform
            return "layout"
        offloader = self._offloader
        if tensor.requires_grad != save.requires_grad:
            return "requires_grad"
        if not self._has_one_stream and offloader.runtime.current_stream(offloader.device) != self.stream:
            return "stream"
        if marks.in_force() and self._contradicts(storage, save):
            return "marks"
        if (codec := marks.codec_here(self.keeper.rules)) != save.codec:
            return "codec"
        if not address or address % tensor.itemsize or tensor.layout is not torch.strided or tensor.is_nested:
            return "layout"
        if fate is _SHARE:
            if number in self.known.releases:
                offloader.poll()
            return self._share(tensor, storage, number, save, codec)
        if storage.nbytes() != save.storage_nbytes or tensor.device != offloader.device:
            return "size"
        if tensor.is_quantized or is_parameter(tensor):
            return "layout"
        offloader.poll()
        coding = self.known.codings[number]
        if coding is not None and not coding.suits(tensor, codec, self.keeper.min_bytes):
            return "codec"
        followed = FollowedStorage(storage, self.known.footprints[number], number, self.record, self.stream, coding)
        if number in self.known.shared:
            followed.root = weakref.ref(root_of(tensor))
        counters, record = offloader.accounts.counters, self.record
        followed.save(counters, save.nbytes, _NEWEST, save.storage_nbytes, save.autograd_bytes)
        self.queue.movable += save.storage_nbytes
        record.unsettled[number] = save.autograd_bytes
        record.waiting.add(number)
        record.waiting_bytes += save.storage_nbytes
        self._storages[number] = weak = FollowedRecord(followed, self._note_end)
        weak.number, weak.run = number, record
        offloader.hold(save.storage_nbytes)
        return self._view(followed, tensor, number)

    def _contradicts(self, storage: torch.UntypedStorage, save: Save) -> bool:
        """Whether the user has said something else of ``storage`` than the plan does."""
        mark = marks.mark_of(storage)
        if mark is Mark.KEEP or marks.in_no_offload_region():
            return True
        return mark is Mark.PREFER and self._saves[save.owner].fate is Fate.KEEP

    def _share(
        self, tensor: Tensor, storage: torch.UntypedStorage, number: int, save: Save, codec: str
    ) -> SavedView | str:
        """See [Note: sharing] in ``saving.py``: the same rule."""
        followed = self._storages[save.owner]()
        if followed is None or followed.origin() is not storage:
            return "share"
        coding = followed.coding
        if coding is not None and not coding.serves(tensor, codec, self.keeper.min_bytes):
            return "codec"
        sequence, state = autograd_sequence(), followed.state
        if state is WAITING:
            followed.packed_at = max(followed.packed_at, sequence)
        elif (state is not KEPT or followed.packed is not None) and not (
            tensor.requires_grad
            and followed.started == (self.queue, sequence, version_of(tensor))
            and followed.root() is root_of(tensor)
        ):
            return "share"
        counters = self._offloader.accounts.counters
        if state is KEPT:
            counters.kept(followed.kept, save.nbytes)
        else:
            counters.shared(save.nbytes)
            if counters is followed.counters:
                followed.shared_bytes += save.nbytes
        return self._view(followed, tensor, number)

    def _view(self, storage: FollowedStorage, tensor: Tensor, number: int) -> SavedView:
        view = SavedView(storage, tensor, 0, self.forward, number, self)
        self.views.append(weakref.ref(view))
        if storage.state is AWAY or storage.packed is not None:
            view.forget_bytes()
        else:
            storage.aliases.append(view.alias)
        return view

    def leave(self, *, waits: bool, is_outermost: bool) -> None:
        """The context is left, with this forward in it: every operator has run."""
        offloader = self._offloader
        with offloader.crashing():
            with offloader.lock:
                self.count_kept()
                if self.is_over or offloader.is_crashed or offloader.is_capturing():
                    return
                offloader.poll()
                if self.packed == len(self._saves):
                    self._due += [number for number in self.known.plan.end if number not in self._due]
                elif is_outermost:
                    self.miss("fewer")
                    return
                lack = self._start_due(None)
            if lack is not None:
                offloader.go_on(lack, partial(self._start_due, None), waits=waits)

    def _start_due(self, sequence: int | None, found: FoundSlot | None = None) -> Lack | None:
        """Starts the copies whose turn it is.

        Args:
            sequence: the thread's autograd sequence number, ``None`` where every operator has run: see [Note: final
                bytes] in ``schedule.py``.
            found: what the first of them lacked.

        Returns:
            What the rest waits for, if anything; see ``DeviceOffloader.go_on``.
        """
        if self.is_over:  # since the lock was held before
            return None
        offloader, due = self._offloader, self._due
        computed: Event = None  # stands behind what computes all that starts here: one for all of it
        while due:
            storage = self._storages[due[0]]()
            if storage is not None and storage.state is WAITING:
                if sequence is not None and storage.packed_at >= sequence:
                    return None
                nbytes = storage.footprint.nbytes if storage.coding is None else storage.moved
                if not offloader.has_room(nbytes):
                    offloader.poll()
                    if not offloader.has_room(nbytes):
                        return Lack(0)
                if computed is None:
                    computed = offloader.runtime.record(self.stream)
                try:
                    self._start(storage, sequence, computed, found)
                except MustGrow:
                    return Lack(storage.footprint.nbytes)
            due.popleft()
        return None

    def _start(self, storage: FollowedStorage, sequence: int | None, computed: Event, found: FoundSlot | None) -> None:
        """Starts a copy, or finds that the storage stays; ``found``: a slot for what its codec cannot hold.

        Raises:
            MustGrow: that has none.
        """
        source, offloader, coding = storage.aliases[0].untyped_storage(), self._offloader, storage.coding
        if source.nbytes() < storage.footprint.nbytes:
            storage.stay(KeepReason.LAYOUT)  # resized since it was saved
            return
        if marks.standing and marks.any_marks():
            if marks.mark_of(source) is Mark.KEEP:
                storage.stay(KeepReason.MARKED)
                return
            marks.clear_mark(source)
        slot, packing = self.record.slots[self._saves[storage.number].slot], None
        if coding is not None:
            packing = packed(offloader, storage, coding)
            if packing is None:
                storage.stay(KeepReason.FAILED)
                return
            if packing.is_refused:
                storage.counters.refuse(coding.codec.name)
                self.known.refuse()
                storage.coding = packing = None
        if packing is None and self.known.codings[storage.number] is not None:  # the plan's slot is for what is packed
            slot = offloader.slot_for(storage.footprint.nbytes, found)
            if slot is None:
                storage.stay(KeepReason.BUDGET)
                return
        assert slot is not None
        storage.started = (self.queue, sequence, version_of(storage.aliases[0]))
        storage.slot = slot
        if packing is not None:
            self._start_packed(storage, slot, packing)
            return
        transfer = Transfer(slot, storage.footprint.nbytes, storage.counters, storage, source)
        self.record.waiting.discard(storage.number)  # `waits_no_more`, which would be a call
        self.record.waiting_bytes -= storage.footprint.nbytes
        whole = source if offloader.runtime.copies_storages else storage.source_bytes()
        offloader.offload(whole, slot, self.stream, transfer, computed=computed)

    def _start_packed(self, storage: FollowedStorage, slot: Slot, packing: Packed) -> None:
        """Starts the copy of a storage that a codec has packed."""
        offloader, coding = self._offloader, storage.coding
        assert coding is not None
        transfer = Transfer(slot, storage.footprint.nbytes, storage.counters, storage)
        transfer.codec, transfer.holds = coding.codec.name, packing.holds
        self.record.waits_no_more(storage.number)
        source = storage.aliases[0].untyped_storage()
        offloader.offload(packing.packed, slot, self.stream, transfer, keepalive=source)
        if packing.holds is None:
            let_go(offloader, storage, transfer, packing.packed)

    # -- backward ---------------------------------------------------------------------------------------------------

    def unpack(self, view: SavedView) -> Tensor | None:
        """The saved tensor again, for the stream that is current now; ``None`` where the step is unknown by now."""
        offloader = self._offloader
        with offloader.lock:
            offloader.poll()
            if self.is_over:
                self.keeper.adopt_view(view, self)
                return None
            rank = self.asked
            storage: Any = view.storage  # `Any` in place of a `cast`, which would be a call
            if offloader.is_crashed or rank == len(self._asks) or self._asks[rank].save != view.number:
                self.miss("interrupt" if offloader.is_crashed else "order")
                return None
            if not self._has_one_stream and offloader.runtime.current_stream(offloader.device) != self.stream:
                self.miss("stream")
                return None
            ask = self._asks[rank]
            tensor = resident(view, storage)
            if tensor is None and storage.reload is None:
                self._bring(storage, "reload")
            self.asked = rank + 1
            record, order = self.record, self.keeper.order
            order.unpacks += 1
            if (budget := self.keeper.budget) is not None:
                if rank == 0:  # all that has to leave has begun to
                    budget.note_kept(self.keeper.kept_newest())
                budget.note_ask(is_last=self.asked == len(self._asks))
            ahead, reload = self._ahead, storage.reload  # which may be given up meanwhile, if more of it was expected
            if not ask.keep:
                if promised := record.promised.pop(storage.number, 0):  # `unpromise`, which would be a call
                    order.followed_bytes -= promised
                elif ahead and storage.number in ahead:
                    ahead.remove(storage.number)
            self._count_ask(storage, resident=tensor is not None, last=ask.last)
            for number in ask.drop:
                self._expect_no_more(number)
            if ask.bring or ahead:
                self._expect(ask.bring)
            if self.keeper.plans.measures.is_close:
                self.keeper.plans.saw(self, self.known, rank, is_ask=True)
            if self.asked == len(self._asks):
                self.keeper.plans.done(self.known)
            if tensor is not None:
                if storage.number not in record.promised:
                    storage.drop_reload()
                return tensor
            assert reload is not None
            if offloader.runtime.query(reload.transfer.event):  # so that the host waits for nothing with the lock held
                return self._wait_for(view, storage, reload, ask, is_there=True)
        return self._wait_for(view, storage, reload, ask)

    def is_out_of_memory(self, view: SavedView) -> None:
        """The device had none for what ``view`` needs: from here on the step is unknown."""
        with self._offloader.lock:
            if not self.is_over:
                self.miss("memory")
            self.keeper.adopt_view(view, self)

    def _wait_for(
        self, view: SavedView, storage: FollowedStorage, reload: Reload, ask: Ask, *, is_there: bool = False
    ) -> Tensor:
        """What was brought back belongs to autograd from here on, unless more of it is asked for soon.

        Args:
            is_there: whether its copy is known to be over, so that no stall is to be counted.
        """
        offloader, target = self._offloader, reload.target
        try:
            if is_there:
                offloader.runtime.wait(self.stream, reload.transfer.event)  # which raises what made it fail
            else:
                offloader.wait(reload.transfer, self.stream, "reload")
            with offloader.lock:
                offloader.take_up(reload.transfer)
                if reload.is_packed:
                    target = unpacked(offloader, storage, target, self.stream)
                first_byte, source = int(target.storage_offset()), target.untyped_storage()
                tensor = view.over(source, first_byte)
                serves = None if ask.last else Returned(weak_storage(source), first_byte)
                if reload.is_packed:
                    storage.returned = serves
                if storage.number not in self.record.promised:
                    self._hand_over(storage, reload, serves)
                return tensor
        except BaseException:
            with offloader.lock:
                self._hand_over(storage, reload, None)
            raise

    def _hand_over(self, storage: FollowedStorage, reload: Reload, returned: Returned | None) -> None:
        """The library holds a reload no more."""
        self._offloader.release(reload.transfer)
        if self.record.returning.get(storage.number) is reload.transfer:
            del self.record.returning[storage.number]
        if storage.reload is reload:
            storage.reload = None
            storage.returned = storage.returned if returned is None else returned
        adopted = storage.adopted  # another thread may have ended the run meanwhile
        if adopted is not None and adopted.reload is reload:
            adopted.reload = adopted.record.reload = None
            adopted.returned = adopted.returned if returned is None else returned

    def _bring(self, storage: FollowedStorage, what: str) -> None:
        """Starts a reload into a new target."""
        assert storage.slot is not None
        layout = self.known.layouts[storage.number]
        if storage.alignment_offset:
            layout = Layout(layout.nbytes, storage.alignment_offset)
        if storage.coding is not None:
            layout = storage.target_layout
        back = self._offloader.reload(storage.slot, layout, self.stream, what)
        storage.reload = Reload(*back, storage.coding is not None)
        self.record.returning[storage.number] = storage.reload.transfer

    def _count_ask(self, storage: FollowedStorage, *, resident: bool, last: bool) -> None:
        """Settles what became of a storage that is asked for, the first time; ``last``: autograd lets go of it now."""
        record, number = self.record, storage.number
        if storage.state is AWAY:
            if not storage.asked:
                record.unasked.pop(number, None)
                storage.ask(resident=resident)
        else:
            self._count_ask_of_source(storage)
        if last:
            live = record.counters.live
            live.without_offload -= storage.autograd_bytes
            storage.autograd_bytes = 0
            if number in record.promised:  # which ends later
                record.unsettled[number] = 0
            else:
                record.unsettled.pop(number, None)
            if storage.state is KEPT:
                live.kept -= storage.device_bytes
                record.kept.pop(number, None)
                storage.device_bytes = 0

    def _count_ask_of_source(self, storage: FollowedStorage) -> None:
        """The same of a storage whose source is held."""
        if storage.state is LEAVING and self._offloader.cancel_copy_of(storage):
            storage.slot = None
            storage.stay(_NEWEST)
        if storage.state is WAITING:  # backward has come to it, so that to move it now would be in vain
            storage.stay(_NEWEST)
        elif storage.state is LEAVING and not storage.asked:
            storage.ask(resident=True)

    def _expect(self, numbers: tuple[int, ...]) -> None:
        """The storages of these saves are asked for soon: they are promised in turn, as there is room for them.

        The room is that of all forwards of the device: see ``PrefetchOrder``.
        """
        ahead, order, record = self._ahead, self.keeper.order, self.record
        ahead += numbers
        while ahead:
            number = ahead[0]
            storage = self._storages[number]()
            if storage is not None and number not in record.promised:
                nbytes = storage.moved
                if not order.has_room(nbytes):
                    if not (order.promised_bytes or order.is_late):
                        return  # nothing is overdue
                    self.keeper.make_room(nbytes)
                    if not order.has_room(nbytes):
                        return
                record.promised[number] = nbytes
                record.due[number] = due = order.unpacks - self.asked + self.known.last_asks[number]
                if number not in record.unsettled:
                    record.unsettled[number] = 0
                order.followed_bytes += nbytes
                if due < order.followed_due:
                    order.followed_due = due
            ahead.popleft()
            if storage is None or storage.state is not AWAY or storage.reload is not None:
                continue
            is_back = storage.returned is not None and storage.returned.storage() is not None
            if is_back or storage.origin() is not None:
                continue
            try:
                self._bring(storage, "prefetch")
            except (torch.OutOfMemoryError, MemoryError):
                return  # what is needed now may still fit

    def _expect_no_more(self, number: int) -> None:
        if number in self._ahead:
            self._ahead.remove(number)
        storage = self._storages[number]()
        if storage is not None:
            self.record.unpromise(number)
            storage.drop_reload()

    # -- the end ----------------------------------------------------------------------------------------------------

    def drop_reloads(self) -> None:
        """Lets go of what was brought back early. The lock is held."""
        for weak in self._storages:
            if (storage := weak()) is not None:
                storage.drop_reload()

    def give_up(self, before: int) -> int:
        """Ends the promises that were due before that unpack of the device; by which one the next is, if any.

        The lock is held.
        """
        promised, due = self.record.promised, self.record.due
        for number in [number for number in promised if due[number] < before]:
            self.record.unpromise(number)
            if (storage := self._storages[number]()) is not None:
                storage.drop_reload()
        return min((due[number] for number in promised), default=sys.maxsize)

    def miss(self, what: str) -> None:
        """The step differs from the plan by ``what``. The lock is held."""
        self.count_kept()
        self.turn.decide(None)
        self.keeper.plans.missed(self.known, what)
        self.keeper.adopt(self)
