"""A step that is captured: its warm-ups are written down, and the capture follows what was written, strictly.

[Note: captured steps]
A graph has every decision in it, so in a capture none is left to make: a ``CapturedRun`` does what a step plan says.

    pack      the save is as the plan has it   -> its handle, the copies out whose turn it is, the sources that go
    unpack    it is the one that comes next    -> its tensor, the copies back whose turn it is
    finish    the step is over                 -> both streams of copies join

It differs from what eager code does in what a graph is. A plan is no hint here: the first
save or unpack that differs raises. No event of a capture is ever over, so a source goes once compute has waited for its
copy, where the plan saw it go: where the window had no room for the next copy, or at the end of forward. What was still
there when backward began goes one by one, a source for each unpack, and what backward would come to before that stays.
The engine knows of none of these copies, since nothing runs: they are on streams of captures, and what they need stays
with the run until compute has waited for them. Slots are parts of one slab that belongs to the graph. A forward that
comes after another's backward uses the same ones: its copies out come behind compute, which has waited for each copy
back.

What the warm-ups have rounded is rounded: packed by kernels of the graph when its copy is due, so that the source goes
at once and the packed bytes do when the plan saw the source go. A replay rounds to the same numbers. What changes no
bit travels as it is, since a graph can look at no value.
"""

from __future__ import annotations

import weakref
from collections import Counter, deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor

from eager_offload._torch import autograd_sequence, storage_of, version_of, weak_storage
from eager_offload.config import OffloadConfig
from eager_offload.eager.captured_plan import Fate, Save, StepPlan
from eager_offload.eager.coding import Coding, codings_of
from eager_offload.eager.handles import KeptTensor, Returned, SavedStorage, SavedView, what_stays_of
from eager_offload.eager.ownership import own_until_taken
from eager_offload.eager.packing import pack_into, unpack_into
from eager_offload.eager.warm_ups import late_releases, mismatch, said, slots_of
from eager_offload.engine.transfer import AWAY, LEAVING, WAITING
from eager_offload.errors import CaptureStateError, OffloadError
from eager_offload.marks import codec_here
from eager_offload.runtime.accelerator import AcceleratorRuntime
from eager_offload.runtime.base import ALIGNMENT, Event, Layout
from eager_offload.selection import logical_bytes, reason_to_stay, root_of, whole
from eager_offload.stats import Accounts, KeepReason
from eager_offload.step_table import Step, StepTables


class _Back(NamedTuple):
    """Bytes on their way back; of a ``Reload`` the part that ``resident`` looks at."""

    target: Tensor
    event: Event


class _Leaving(NamedTuple):
    """Bytes on their way out: compute waits for the event before they may go."""

    source: Tensor
    event: Event


class CapturedStorage(SavedStorage):
    """A storage that a captured step saves, and that leaves, or stays until backward asks for it."""

    __slots__ = ("packed_at", "started_in", "state")
    #: In place of what a storage of an unknown step has, which nothing of a captured one is asked for: another type.
    reload: _Back | None  # type: ignore[assignment]  # of its own
    #: What unpacks its handles.
    saves: CapturedRun  # type: ignore[assignment]  # likewise

    def __init__(
        self, tensor: Tensor, number: int, run: CapturedRun, stream: torch.Stream, coding: Coding | None
    ) -> None:
        storage = tensor.untyped_storage()
        self.number, self.saves, self.step, self.stream = number, run, run.step, stream
        self.footprint = whole(storage.nbytes())
        self.alignment_offset = storage.data_ptr() % ALIGNMENT
        self.origin, self.root = weak_storage(storage), weakref.ref(root_of(tensor))
        self.aliases, self.reload, self.returned, self.given = [], None, None, ()
        self.coding, self.packed = coding, None
        self.state = WAITING
        #: The thread's autograd sequence number, at the last save before the copy started and when that was, then with
        #: the version.
        self.packed_at = autograd_sequence()
        self.started_in: tuple[int | None, int] | None = None

    def drop_reload(self) -> None:
        self.reload = None


def _nowhere() -> None:
    """In place of a weak reference."""


class CapturedRun:
    """One step that is captured on the current stream, and follows ``plans``, a forward and backward each.

    Args:
        slab: flat pinned memory of ``slot_bytes(plans)``, which lives as long as the graph does.
        config: that of the ``Offload``.
    """

    def __init__(
        self,
        plans: Sequence[StepPlan],
        slab: Tensor | None,
        runtime: AcceleratorRuntime,
        device: torch.device,
        config: OffloadConfig,
    ) -> None:
        self._rules, self._min_bytes = config.codec_rules, config.size("min_bytes")
        #: Bytes as saved of what stays on the device, by why.
        self.kept: Counter[KeepReason] = Counter()
        self._runtime, self._device, self._slab = runtime, device, slab
        self._stream = runtime.current_stream(device)
        self._out, self._in = runtime.capture_streams(device)
        self._has_left = self._has_come_back = False
        #: The first difference, or what else ended it.
        self._failure: OffloadError | None = None
        self._is_finished = False
        self._plans = deque(plans)
        self._forward_number = -1
        self._begin_forward(self._plans.popleft() if self._plans else StepPlan(()))

    def _begin_forward(self, plan: StepPlan) -> None:
        self._plan, self._slots = plan, slots_of(plan)
        self._forward_number += 1
        self.step = Step(self._forward_number, StepTables(False, Accounts()))
        self._starts = plan.starts()
        self._codings = codings_of(plan, self._rules)
        #: The saves whose sources go before each save, and when forward is over.
        self._releases: list[list[int]] = [[] for _ in range(len(plan.saves) + 1)]
        for number, save in enumerate(plan.saves):
            if save.fate is Fate.OFFLOAD and save.release >= 0:
                self._releases[save.release].append(number)
        self._late_releases = late_releases(plan)
        self._packed = self._asked = 0
        self._storages: list[Callable[[], CapturedStorage | None]] = [_nowhere] * len(plan.saves)
        #: The saves whose copies are to start, and those whose sources are to go, once they have.
        self._due: deque[int] = deque()
        self._going: deque[int] = deque()
        #: What compute has not waited for, by number of save.
        self._leaving: dict[int, _Leaving] = {}
        self._returning: dict[int, _Back] = {}

    # -- forward ----------------------------------------------------------------------------------------------------

    def pack(self, tensor: Tensor) -> KeptTensor | SavedView:
        """The handle of the next save.

        Raises:
            ScheduleMismatchError: the plan has another one here.
        """
        is_over = self._packed == len(self._plan.saves) and self._asked == len(self._plan.asks)
        if is_over and self._plans:
            self._release_all()  # the slots, too, may be written to again from here on
            self._begin_forward(self._plans.popleft())
        number, saves = self._packed, self._plan.saves
        if number == len(saves):
            self._differ(f"save {number}", "none", _seen(tensor))
        save = saves[number]
        self._check(tensor, number, save)
        self._going += self._releases[number]
        self._release_going()
        handle: KeptTensor | SavedView
        if save.owner >= 0:
            handle = self._view(tensor, number, save)
        elif save.reason is not None:
            handle = self._keep(tensor, save.reason)
        else:
            handle = self._keep(tensor, reason_to_stay(tensor, self._min_bytes) or KeepReason.REGION)
        self._packed = number + 1
        self._due += self._starts[number]
        self._start_due(autograd_sequence())
        return handle

    def _check(self, tensor: Tensor, number: int, save: Save) -> None:
        """Whether ``tensor`` is the save that comes next."""
        if (logical_bytes(tensor), tensor.requires_grad) != (save.nbytes, save.requires_grad):
            self._differ(f"save {number}", said(save), _seen(tensor))
        if save.owner < 0:
            return
        here = self._runtime.current_stream(self._device)
        if here != self._stream:
            self._differ(f"save {number}", f"{said(save)} on {self._stream}", f"one on {here}")
        reason = reason_to_stay(tensor, 0, preferred=True)
        is_here = reason is None and tensor.device == self._device
        if not is_here or not tensor.data_ptr() or tensor.data_ptr() % tensor.itemsize:
            why = "" if reason is None else f" ({reason.value})"
            stays = f"a {type(tensor).__name__} that stays{why}, on {tensor.device}"
            self._differ(f"save {number}", f"{said(save)} of which the memory may leave", stays)
        if (codec := codec_here(self._rules)) != save.codec:
            self._differ(f"save {number}", f"{said(save)} with the codec {save.codec}", codec)
        if (coding := self._codings[number]) is not None and not coding.suits(tensor, codec, self._min_bytes):
            self._differ(f"save {number}", f"one that {coding.codec.name} may round", _seen(tensor))
        if save.owner == number and tensor.untyped_storage().nbytes() != save.storage_nbytes:
            there = f"{tensor.untyped_storage().nbytes():,}"
            self._differ(f"the storage of save {number}", f"{save.storage_nbytes:,} bytes", f"{there} bytes")

    def _keep(self, tensor: Tensor, reason: KeepReason) -> KeptTensor:
        self.kept[reason] += logical_bytes(tensor)
        return KeptTensor(what_stays_of(tensor), version_of(tensor), reason)

    def _view(self, tensor: Tensor, number: int, save: Save) -> SavedView:
        """The handle of a save whose storage leaves, stays as one of the newest, or is that of an earlier save."""
        if self._plan.saves[save.owner].fate is Fate.KEEP:
            self.kept[KeepReason.NEWEST] += save.nbytes
        if save.fate is Fate.SHARE:
            storage = self._shared(tensor, number, save)
        else:
            storage = CapturedStorage(tensor, number, self, self._stream, self._codings[number])
            self._storages[number] = weakref.ref(storage)
        view = SavedView(storage, tensor, 0, self.step, number)
        if storage.state is AWAY or storage.packed is not None:
            view.forget_bytes()
        else:
            storage.aliases.append(view.alias)
        return view

    def _shared(self, tensor: Tensor, number: int, save: Save) -> CapturedStorage:
        """See [Note: sharing] in ``saving.py``: the same rule."""
        storage = self._storages[save.owner]()
        if storage is None or storage.origin() is not tensor.untyped_storage():
            self._differ(f"save {number}", f"the storage of save {save.owner}", "another one")
        if storage.coding is not None and not storage.coding.serves(tensor, save.codec, self._min_bytes):
            self._differ(f"save {number}", f"one that {storage.coding.codec.name} may round", _seen(tensor))
        if storage.state is WAITING:
            storage.packed_at = max(storage.packed_at, autograd_sequence())
        elif not (
            tensor.requires_grad
            and storage.started_in == (autograd_sequence(), version_of(tensor))
            and storage.root() is root_of(tensor)
        ):
            self._differ(f"save {number}", f"the storage of save {save.owner} as it left", "it at a later time")
        return storage

    def _start_due(self, sequence: int | None) -> None:
        """Starts the copies whose turn it is; ``sequence`` is ``None`` where every operator has run."""
        while self._due:
            storage = self._storages[self._due[0]]()
            if storage is not None and storage.state is WAITING:
                if sequence is not None and storage.packed_at >= sequence:
                    break
                self._start(storage, sequence)
            self._due.popleft()
        self._release_going()

    def _start(self, storage: CapturedStorage, sequence: int | None) -> None:
        number, nbytes = storage.number, storage.footprint.nbytes
        if storage.aliases[0].untyped_storage().nbytes() < nbytes:
            self._differ(f"the storage of save {number}", f"{nbytes:,} bytes when it left", "fewer: it was resized")
        storage.started_in = (sequence, version_of(storage.aliases[0]))
        source = storage.source_bytes() if storage.coding is None else self._pack(storage, storage.coding)
        computed = self._runtime.record(self._stream)
        event = self._runtime.copy_in_capture(self._slot(number), source, self._out, [computed])
        self._leaving[number] = _Leaving(source, event)
        storage.state = LEAVING
        self._has_left = True

    def _pack(self, storage: CapturedStorage, coding: Coding) -> Tensor:
        """What travels in place of a storage, of which the source goes."""
        out = self._runtime.allocate(Layout(coding.nbytes), self._device, self._stream)
        pack_into(out, storage, coding)
        storage.packed = out
        storage.release_source()
        return out

    def _slot(self, number: int) -> Tensor:
        save = self._plan.saves[number]
        start = self._slots[save.slot]
        assert self._slab is not None
        return self._slab[start : start + save.slot_nbytes]

    def _release_going(self) -> None:
        """Lets go of the sources whose turn it is, as far as their copies have started."""
        for _ in range(len(self._going)):
            number = self._going.popleft()
            storage = self._storages[number]()
            if number in self._leaving:
                self._release(number)
            elif storage is not None and storage.state is WAITING:
                self._going.append(number)

    def _release(self, number: int) -> None:
        """Lets go of a source, whose memory may have a new owner at once: compute waits for the copy first."""
        source = self._leaving.pop(number)
        self._runtime.wait(self._stream, source.event)
        if (storage := self._storages[number]()) is not None:
            storage.state, storage.packed = AWAY, None
            storage.release_source()

    def _release_all(self) -> None:
        """The graph of this forward has gone: what it left on its way is waited for."""
        for number in list(self._leaving):
            self._release(number)
        for back in self._returning.values():
            self._runtime.wait(self._stream, back.event)
        self._returning.clear()

    def leave(self, *, waits: bool, is_outermost: bool) -> None:
        """A context is left, of which the outermost is around all of the step; ``waits``: not by an exception."""
        if waits and not is_outermost and self._packed == len(self._plan.saves):
            self._due += [number for number in self._plan.end if number not in self._due]
            self._end_forward()

    def _end_forward(self) -> None:
        """Every operator has run: starts what is due, and lets go of what has gone at the end of forward."""
        self._going += self._releases[-1]
        self._releases[-1] = []
        self._start_due(None)

    def miss(self, what: str) -> None:
        """Something is saved that no plan can say."""
        self._differ(f"save {self._packed}", "what a plan can say", f"what none can ({what})")

    # -- backward ---------------------------------------------------------------------------------------------------

    def unpack(self, view: SavedView) -> Tensor:
        """The saved tensor again.

        Raises:
            SavedTensorModifiedError: it was changed in place after it was saved.
            ScheduleMismatchError: the plan has another unpack here.
            CaptureStateError: the capture is over.
        """
        view.check_version()
        if self._is_finished:
            raise CaptureStateError(
                "backward asked for a tensor that a captured step has saved, after the capture: the tensor is in the "
                "graph alone. Run backward inside of the step"
            )
        rank, asks, storage = self._asked, self._plan.asks, view.storage
        assert isinstance(storage, CapturedStorage)
        if view.step is not self.step or rank == len(asks) or asks[rank].save != view.number:
            said = "none" if rank == len(asks) else f"save {asks[rank].save}"
            self._differ(f"unpack {rank}", said, f"save {view.number}")
        here = self._runtime.current_stream(self._device)
        if here != self._stream:
            self._differ(f"unpack {rank}", f"save {view.number} on {self._stream}", f"it on {here}")
        ask = asks[rank]
        self._asked = rank + 1
        self._end_forward()
        if (going := self._late_releases.get(rank)) in self._leaving:
            self._release(going)
        tensor = self._resident(view, storage)
        if tensor is None and storage.reload is None:
            self._bring(storage)
        for number in ask.drop:
            self._drop(number)
        for number in ask.bring:
            self._expect(number)
        if tensor is None:
            tensor = self._take(view, storage, keep=ask.keep, last=ask.last)
        elif not ask.keep:
            self._drop(storage.number)
        if view.original is not None and tensor is not view.original():
            tensor = view.original.like(tensor)
            own_until_taken(storage, tensor)
        return tensor

    def _resident(self, view: SavedView, storage: CapturedStorage) -> Tensor | None:
        """The tensor, if its bytes are on the device: not gone yet, kept alive by another owner, or back already."""
        original = None if view.original is None else view.original()
        if storage.state is not AWAY and storage.packed is None:
            return view.alias.detach() if original is None else original
        nbytes, found = storage.footprint.nbytes, storage.origin()
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
        return None if storage.packed is None else self._unpack_at_once(view, storage)

    def _bring(self, storage: CapturedStorage) -> None:
        """Starts a copy back into a new target."""
        target = self._runtime.allocate(storage.target_layout, self._device, self._stream)
        # Behind the block's last owner, and behind the copy out, which compute has waited for.
        allocated = self._runtime.record(self._stream)
        event = self._runtime.copy_in_capture(target, self._slot(storage.number), self._in, [allocated])
        storage.reload = self._returning[storage.number] = _Back(target, event)
        self._has_come_back = True

    def _expect(self, number: int) -> None:
        """The storage of save ``number`` is asked for soon."""
        storage = self._storages[number]()
        if storage is None or storage.state is not AWAY:
            return
        if storage.reload is not None or storage.origin() is not None:
            return
        if storage.returned is None or storage.returned.storage() is None:
            self._bring(storage)

    def _drop(self, number: int) -> None:
        """The storage of save ``number`` is not asked for soon any more: compute waits before its target goes."""
        storage = self._storages[number]()
        if storage is not None:
            storage.reload = None
        if (back := self._returning.pop(number, None)) is not None:
            self._runtime.wait(self._stream, back.event)

    def _take(self, view: SavedView, storage: CapturedStorage, *, keep: bool, last: bool) -> Tensor:
        """What was brought back belongs to autograd from here on, unless more of it is asked for soon."""
        target, event = storage.reload or self._returning[storage.number]
        self._runtime.wait(self._stream, event)
        self._returning.pop(storage.number, None)
        if storage.coding is not None:
            target = self._unpack(storage, target)
        first_byte, source = int(target.storage_offset()), target.untyped_storage()
        if not keep or storage.coding is not None:
            storage.returned = None if last else Returned(weak_storage(source), first_byte)
        if not keep:
            storage.reload = None
        return view.over(source, first_byte)

    def _unpack(self, storage: CapturedStorage, packed: Tensor) -> Tensor:
        """New memory with the bytes of a storage, of what it was packed to."""
        place = self._runtime.allocate(storage.layout, self._device, self._stream)
        unpack_into(place, storage, packed)
        return place

    def _unpack_at_once(self, view: SavedView, storage: Any) -> Tensor:
        """``view``, of what was packed and is still there."""
        place = self._unpack(storage, storage.packed)
        storage.returned = Returned(weak_storage(place.untyped_storage()), int(place.storage_offset()))
        return view.over(place.untyped_storage(), int(place.storage_offset()))

    # -- the end ----------------------------------------------------------------------------------------------------

    def finish(self) -> None:
        """The step is over: both streams of copies join that of the capture.

        Raises:
            ScheduleMismatchError: it has done less than the plan says, or something else before.
        """
        if self._failure is not None:
            raise self._failure  # which the step has swallowed
        plan = self._plan
        if self._packed < len(plan.saves):
            self._differ(f"save {self._packed}", said(plan.saves[self._packed]), "none")
        if self._asked < len(plan.asks):
            self._differ(f"unpack {self._asked}", f"save {plan.asks[self._asked].save}", "none")
        if self._plans:
            self._differ(f"the forward after {self._forward_number + 1}", f"{len(self._plans[0].saves)} saves", "none")
        self._release_all()
        for stream, is_forked in ((self._out, self._has_left), (self._in, self._has_come_back)):
            if is_forked:
                self._runtime.wait(self._stream, self._runtime.record(stream))
        self.close()

    def close(self) -> None:
        """Nothing more is captured. What is on its way in a capture that has failed never runs."""
        self._is_finished = True
        self._leaving, self._returning, self._slab = {}, {}, None

    def _differ(self, where: str, warm_up: str, capture: str) -> NoReturn:
        self._failure = mismatch(where, warm_up, capture, "the warm-up had", "the capture has")
        raise self._failure


def _seen(tensor: Tensor) -> str:
    said = f"a tensor of {logical_bytes(tensor):,} bytes{', requires grad' if tensor.requires_grad else ''}"
    return f"{said} ({', '.join(map(str, tensor.shape))}; {tensor.dtype})"
