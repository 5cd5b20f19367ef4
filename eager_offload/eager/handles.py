"""What autograd holds in place of a saved tensor, and what those handles own.

[Note: lifetime belongs to handles]
    autograd's saved variable -> SavedView -> SavedStorage -> slot, source or reload
Nothing else holds a ``SavedStorage`` strongly: everything else, schedules too, has a weak reference, its record. When
autograd lets go of the last view, whatever the storage owns goes back by itself. There is no phase to be in, no count
that has to reach zero, nothing to be cleared when a context is entered.

A handle never holds the tensor that pack received: an output's ``grad_fn`` owns the handle, and the cycle through C++
is invisible to the garbage collector. ``tensor.detach()`` shares bytes and version counter and has no ``grad_fn``.
A leaf has none either, and is held where it stays.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple, Protocol, TypeAlias

import torch
from torch import Tensor
from torch.nn import Parameter

from eager_offload._torch import detached, dispatch_modes, neg_view, set_over, unseen_version, version_of, weak_storage
from eager_offload.eager.originals import original_of
from eager_offload.engine.transfer import BytesRecord, Transfer
from eager_offload.engine.transfers import Transfers
from eager_offload.errors import OffloadError, SavedTensorModifiedError
from eager_offload.runtime.base import ALIGNMENT, Event, Layout, Stream
from eager_offload.schedule import ResidentQueue, Use
from eager_offload.selection import Footprint, root_of
from eager_offload.stats import KeepReason
from eager_offload.step_table import Step
from eager_offload.tiers.base import Slot


class Keeper(Protocol):
    """The saved tensors of one device, as their handles know them."""

    transfers: Transfers

    def unpack(self, view: SavedView) -> Tensor:
        """Returns the saved tensor again, for the stream that is current now."""

    def forget_storage(self, record: StorageRecord) -> None:
        """Forgets a storage whose last view has died."""

    def on_arrival(self, saved: SavedStorage, transfer: Transfer) -> None:
        """Takes note that the bytes of a storage rest in a tier; its source is about to go."""


class KeptTensor:
    """The handle of a saved tensor that stays where it is."""

    __slots__ = ("__weakref__", "reason", "tensor", "version")

    def __init__(self, tensor: Tensor, version: int, reason: KeepReason) -> None:
        self.tensor = tensor
        self.version = version
        self.reason = reason

    def unpack(self) -> Tensor:
        tensor, kind = self.tensor, type(self.tensor)
        version = version_of if kind is Tensor or kind is Parameter else unseen_version
        if version(tensor) != self.version:
            raise modified(tensor, tensor.size(), self.version)
        return tensor


def what_stays_of(tensor: Tensor) -> Tensor:
    """What a handle holds of a plain tensor, or a parameter, that stays.

    A leaf is held itself, so that `leaf.data = ...` stays visible, and as autograd does: see the note in ownership.py.
    See that above for why nothing else is.
    """
    if tensor.is_leaf:
        return tensor
    return tensor.detach() if type(tensor) is Tensor else detached(tensor)


@dataclass(slots=True, eq=False)
class Reload:
    """Bytes on their way back, or there: the target, and the transfer whose event says when."""

    target: Tensor
    transfer: Transfer


class Returned(NamedTuple):
    """A reloaded storage that was handed to autograd, where in it the footprint begins, and when it was there."""

    storage: weakref.ref[torch.UntypedStorage]
    first_byte: int
    event: Event


#: When the copy of a storage started: while an operator saved, whose number the thread of a queue had just counted,
#: and in which version.
Started: TypeAlias = tuple[ResidentQueue, int | None, int]


class StorageRecord(BytesRecord["SavedStorage"]):
    """A weak reference to a saved storage, and the part of what is known of it that is needed once it is gone."""

    __slots__ = ("key", "name", "queue", "reload", "saves")
    #: Names it in traces; it grows with every save.
    key: int
    #: Names what it covers: further saves of the same bytes are recognised by it.
    name: Hashable
    #: That in which it waits to leave.
    queue: ResidentQueue | None
    #: The copy that brings it back, or has.
    reload: Transfer | None
    #: Who saved it. Weak, since they hold the record.
    saves: weakref.ref[Any]

    def on_finalized(self) -> None:
        if (saves := self.saves()) is not None:
            saves.forget_storage(self)
        super().on_finalized()

    def stay(self, reason: KeepReason) -> None:
        super().stay(reason)
        if (saved := self()) is not None:
            saved.slot = None

    def on_transferred(self, transfer: Transfer, failure: OffloadError | None) -> None:
        saved = self()
        if failure is not None:
            self.stay(KeepReason.FAILED)
            return
        if saved is not None:
            saved.saves.on_arrival(saved, transfer)
        self.arrive()
        if saved is not None:
            saved.release_source()


class SavedStorage:
    """A storage that was offloaded or is to be, shared by every view of it that autograd saved."""

    __slots__ = (
        "__weakref__",
        "aliases",
        "alignment_offset",
        "first",
        "footprint",
        "given",
        "number",
        "origin",
        "record",
        "reload",
        "returned",
        "root",
        "saved_anew",
        "saves",
        "slot",
        "started",
        "step",
        "stream",
        "times_saved",
    )

    def __init__(
        self,
        key: int,
        name: Hashable,
        tensor: Tensor,
        storage: torch.UntypedStorage,
        footprint: Footprint,
        saves: Keeper,
        stream: Stream,
        step: Step,
        number: int,
    ) -> None:
        self.record = record = StorageRecord(self, saves.transfers.on_death)
        record.key, record.name, record.queue, record.reload = key, name, None, None
        record.saves = weakref.ref(saves)
        self.origin = weak_storage(storage)
        self.footprint = footprint
        #: The address of the footprint's first byte, modulo the alignment that reloads keep.
        self.alignment_offset = (storage.data_ptr() + footprint.start) % ALIGNMENT
        self.saves = saves
        #: The step that saved it, the number of the save in that, and that of the first save of the same storage.
        self.step = step
        self.number = self.first = number
        #: The compute stream noted at pack: reload targets are allocated on it.
        self.stream = stream
        #: While the source is held: an alias of it for each view. Once released they hold no bytes, only the counters
        #: of the source's versions, and only the views have them.
        self.aliases: list[Tensor] = []
        #: The tensor whose version counter the views share, to recognise further views of it.
        self.root: Callable[[], Tensor | None] = weakref.ref(root_of(tensor))
        self.started: Started | None = None
        #: How many times this storage was saved as a new one, because it might have been written in between.
        self.times_saved = 1
        #: Whether that has happened since, so that the library itself may hold what this one was copied from.
        self.saved_anew = False
        self.slot: Slot | None = None
        #: Its transfer is known to the record as well.
        self.reload: Reload | None = None
        #: The reloaded storage after it was handed to autograd: served again for as long as it lives.
        self.returned: Returned | None = None
        #: What it owns of that: see the note in ownership.py.
        self.given: tuple[Tensor, ...] = ()

    @property
    def layout(self) -> Layout:
        """What memory must look like that its bytes are to be in again."""
        return Layout(self.footprint.nbytes, self.alignment_offset)

    def release_source(self) -> None:
        """Lets go of the source's bytes; the aliases that views hold stay, as counters of its versions."""
        for alias in self.aliases:
            if alias.is_conj() or alias.is_neg():
                alias.data = _empty_like(alias)
            else:  # a call less
                alias.data = without_bytes(alias.dtype, alias.device)
        self.aliases.clear()

    def source_bytes(self) -> Tensor:
        """The range of the storage that it is about, flat."""
        alias = self.aliases[0]
        nothing, storage = without_bytes(torch.uint8, alias.device).data, alias.untyped_storage()
        return set_over(nothing, storage, self.footprint.start, (self.footprint.nbytes,), (1,))

    def returned_bytes(self) -> Tensor | None:
        """The same of what autograd was given, as long as that holds it and it was not resized."""
        storage = None if self.returned is None else self.returned.storage()
        if self.returned is None or storage is None:
            return None
        first_byte, nbytes = self.returned.first_byte, self.footprint.nbytes
        if storage.nbytes() < first_byte + nbytes:
            return None
        return set_over(without_bytes(torch.uint8, storage.device).data, storage, first_byte, (nbytes,), (1,))


class SavedView:
    """The handle of one saved tensor whose storage was offloaded or is to be."""

    __slots__ = (
        "__weakref__",
        "alias",
        "conj",
        "dtype",
        "neg",
        "number",
        "offset",
        "original",
        "size",
        "step",
        "storage",
        "stride",
        "use",
        "version",
    )

    def __init__(self, storage: SavedStorage, tensor: Tensor, use: Use, step: Step, number: int) -> None:
        self.storage = storage
        #: The step that saved it, and the number of the save in that.
        self.step = step
        self.number = number
        #: This save of the storage, in the order of need.
        self.use = use
        self.size = tensor.size()
        self.stride = tensor.stride()
        #: In elements, from the start of the storage.
        self.offset = int(tensor.storage_offset())
        self.dtype = tensor.dtype
        self.conj = tensor.is_conj()
        self.neg = tensor.is_neg()
        self.version: int = version_of(tensor)
        self.alias = Tensor.detach(tensor)  # a subclass may have one of its own
        #: What was saved; ``None`` where autograd would make an alias of it.
        self.original = None if tensor.requires_grad else original_of(tensor)

    @property
    def shares(self) -> bool:
        """Whether an earlier save has brought the storage in."""
        return self.storage.number != self.number or self.storage.step is not self.step

    def unpack(self) -> Tensor:
        return self.storage.saves.unpack(self)

    def check_version(self) -> None:
        """Raises where autograd's own check would, were no hooks installed."""
        if version_of(self.alias) != self.version:
            raise modified(self.alias, self.size, self.version)

    def forget_bytes(self) -> None:
        """The storage has left already: this view needs only the counter of its versions."""
        self.alias.data = _empty_like(self.alias)

    def over(self, storage: torch.UntypedStorage, first_byte: int) -> Tensor:
        """This view over ``storage``, in which the footprint begins at ``first_byte``.

        It shares the version counter of what was saved, as the tensor that autograd itself would unpack does: should
        backward change it in place, the next unpack finds out.
        """
        alias = self.alias
        offset = self.offset + (first_byte - self.storage.footprint.start) // self.dtype.itemsize
        view = without_bytes(self.dtype, storage.device).data if self.conj or self.neg else alias.data
        put = set_over if dispatch_modes() else Tensor.set_  # a call less for each reload
        put(view, storage, offset, self.size, self.stride)
        if self.conj:
            view = view.conj()
        if self.neg:
            view = neg_view(view)
        tensor = alias.detach()
        tensor.data = view
        return tensor


def modified(counter: Tensor, size: torch.Size, expected: int) -> SavedTensorModifiedError:
    """What autograd says when it finds a saved tensor changed, in its words."""
    return SavedTensorModifiedError(
        "one of the variables needed for gradient computation has been modified by an inplace operation: "
        f"[{counter.type()} {list(size)}] is at version {version_of(counter)}; expected version {expected} instead. "
        "Save a clone, or change the tensor after backward; torch.autograd.set_detect_anomaly(True) shows where"
    )


def _empty_like(alias: Tensor) -> Tensor:
    """What ``alias.data`` can be without bytes: on a device that torch does not know its lazy bits have to be alike."""
    nothing = without_bytes(alias.dtype, alias.device)
    if alias.is_conj():
        nothing = nothing.conj()
    return neg_view(nothing) if alias.is_neg() else nothing


@cache
def without_bytes(dtype: torch.dtype, device: torch.device) -> Tensor:
    """A tensor without bytes. Its ``.data`` is a new one, in half the time of ``torch.empty``."""
    with torch.inference_mode(False):  # an inference tensor has no version counter to share
        return torch.empty(0, dtype=dtype, device=device)
