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
from functools import cache, partial
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn import Parameter

from eager_offload.core.schedule import PrefetchOrder, ResidentQueue
from eager_offload.core.selection import Footprint
from eager_offload.core.step_table import Step, StepScript
from eager_offload.eager.keeping import Keeping
from eager_offload.eager.originals import original_of, own_until_taken
from eager_offload.engine.offloader import DeviceOffloader
from eager_offload.engine.transfer import AWAY, LEAVING, WAITING, BytesRecord, Transfer
from eager_offload.errors import OffloadError, SavedTensorModifiedError
from eager_offload.runtime.base import ALIGNMENT, Event, Layout, Stream
from eager_offload.stats import KeepReason
from eager_offload.tiers.base import Slot
from eager_offload.torch_private.autograd import profiled, profiler_is_on
from eager_offload.torch_private.calls import dispatch_modes, set_over
from eager_offload.torch_private.memory import base_of, detached, neg_view, unseen_version, version_of, weak_storage


class Saves(Protocol):
    """The saved tensors of one device, as their handles know them."""

    offloader: DeviceOffloader
    #: Of storages, by what names them.
    names: dict[Hashable, StorageRecord]
    order: PrefetchOrder
    keeping: Keeping
    script: StepScript | None

    @property
    def moves(self) -> Moves: ...


class Moves(Protocol):
    """What knows where the bytes of saved tensors are."""

    def fetch(self, view: SavedView) -> Tensor:
        """Returns the tensor for the current stream once its bytes are there."""

    def prefetch(self, view: SavedView) -> None:
        """Brings back a saved tensor that the caller is about to ask for, if there is room."""

    def drop_all_but(self, needed: SavedStorage) -> None:
        """Lets go of all that was brought back early, but for ``needed``."""

    def hold_source(self, saved: SavedStorage, transfer: Transfer) -> None:
        """Keeps the source of a storage that is promised, and whose bytes have arrived in a tier."""


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


def detached_for_keeping(tensor: Tensor) -> Tensor:
    """What a handle holds of a plain tensor, or a parameter, that stays.

    A leaf is held itself, so that `leaf.data = ...` stays visible, and as autograd does: see the note in originals.py.
    See that above for why nothing else is.
    """
    if tensor.is_leaf:
        return tensor
    return tensor.detach() if type(tensor) is Tensor else detached(tensor)


class Returned(NamedTuple):
    """A reloaded storage that was handed to autograd, where in it the footprint begins, and when it was there."""

    storage: weakref.ref[torch.UntypedStorage]
    first_byte: int
    event: Event


class CopyStart(NamedTuple):
    """When the copy of a storage started: the queue and the sequence number of its thread, and the tensor's version."""

    queue: ResidentQueue
    sequence: int | None
    version: int


class StorageRecord(BytesRecord["SavedStorage"]):
    """A weak reference to a saved storage, and the part of what is known of it that is needed once it is gone."""

    __slots__ = ("key", "name", "queue", "reload", "saves")
    #: Names it in traces; it grows with every save.
    key: int
    #: Names what it covers: further saves of the same bytes are recognised by it.
    name: Hashable
    #: That in which it waits to leave.
    queue: ResidentQueue | None
    #: The copy that brings it back, or has, whose event says when; ``SavedStorage.target`` is where.
    reload: Transfer | None
    #: Who saved it. Weak, since they hold the record.
    saves: weakref.ref[Any]

    def on_finalized(self) -> None:
        """The last view of the storage has died."""
        super().on_finalized()
        if (saves := self.saves()) is None:
            return
        if saves.names.get(self.name) is self:
            del saves.names[self.name]
        if self in saves.order.promised:
            saves.order.forget(self)
        offloader = saves.offloader
        if self.queue is not None:
            nbytes = self.queue.discard(self)
            if self.state is WAITING:
                offloader.resident_bytes -= nbytes
        if self.state is LEAVING and offloader.cancel_copy_of(self):
            self.stay(KeepReason.NEWEST)
        if self.reload is not None:
            offloader.drop_resident(self.reload)
        self.queue = self.reload = None  # a trace may hold it

    def stay(self, reason: KeepReason) -> None:
        super().stay(reason)
        if (saved := self()) is not None:
            saved.slot = None

    def on_transferred(self, transfer: Transfer, failure: OffloadError | None) -> None:
        if failure is not None or (saved := self()) is None:
            return
        saves = saved.saves
        if not saves.offloader.is_crashed:
            if self in saves.order.promised:
                saves.moves.hold_source(saved, transfer)
            if saves.script is not None:
                saves.script.note_moved(saved.step, saved.first)
        # The source's bytes go; the aliases that views hold stay, as counters of its versions.
        for alias in saved.aliases:
            alias.data = without_bytes(alias.dtype, alias.device, alias.is_conj(), alias.is_neg())
        saved.aliases.clear()


class SavedStorage:
    """A storage that was offloaded or is to be, shared by every view of it that autograd saved."""

    __slots__ = (
        "__weakref__",
        "aliases",
        "first",
        "footprint",
        "given",
        "layout",
        "number",
        "origin",
        "record",
        "returned",
        "root",
        "saved_anew",
        "saves",
        "slot",
        "started",
        "step",
        "stream",
        "target",
        "times_saved",
    )

    def __init__(
        self,
        key: int,
        name: Hashable,
        tensor: Tensor,
        storage: torch.UntypedStorage,
        footprint: Footprint,
        saves: Saves,
        stream: Stream,
        step: Step,
        number: int,
    ) -> None:
        self.record = record = StorageRecord(self, saves.offloader.on_death)
        record.key, record.name, record.queue, record.reload = key, name, None, None
        record.saves = weakref.ref(saves)
        self.origin = weak_storage(storage)
        self.footprint = footprint
        #: What memory must look like that its bytes come back to: at the address of the footprint's first byte, modulo
        #: the alignment that reloads keep.
        self.layout = Layout(footprint.moved, (storage.data_ptr() + footprint.start) % ALIGNMENT)
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
        self.root: Callable[[], Tensor | None] = weakref.ref(tensor if (base := base_of(tensor)) is None else base)
        self.started: CopyStart | None = None
        #: How many times this storage was saved as a new one, because it might have been written in between.
        self.times_saved = 1
        #: Whether that has happened since, so that the library itself may hold what this one was copied from.
        self.saved_anew = False
        self.slot: Slot | None = None
        #: What ``record.reload`` brings it back to.
        self.target: Tensor | None = None
        #: The reloaded storage after it was handed to autograd: served again for as long as it lives.
        self.returned: Returned | None = None
        #: What it owns of that: see the note in originals.py.
        self.given: tuple[Tensor, ...] = ()

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

    def __init__(self, storage: SavedStorage, tensor: Tensor, step: Step, number: int) -> None:
        self.storage = storage
        #: The step that saved it, and the number of the save in that.
        self.step = step
        self.number = number
        #: This save of the storage, in the order of need.
        self.use = step.uses.add(number, storage.record, storage.footprint.nbytes)
        self.size = tensor.size()
        self.stride = tensor.stride()
        #: In elements, from the start of the storage.
        self.offset = int(tensor.storage_offset())
        self.dtype = tensor.dtype
        self.conj = tensor.is_conj()
        self.neg = tensor.is_neg()
        self.version: int = version_of(tensor)
        self.alias = Tensor.detach(tensor)  # a subclass may have one of its own
        if storage.record.state is AWAY:  # the storage has left: this view needs only the counter of its versions
            self.alias.data = without_bytes(self.dtype, tensor.device, self.conj, self.neg)
        else:
            storage.aliases.append(self.alias)
        #: What was saved; ``None`` where autograd would make an alias of it.
        self.original = None if tensor.requires_grad else original_of(tensor)

    @property
    def shares(self) -> bool:
        """Whether an earlier save has brought the storage in."""
        return self.storage.number != self.number or self.storage.step is not self.step

    def unpack(self) -> Tensor:
        """Returns the saved tensor again, for the stream that is current now.

        Raises:
            SavedTensorModifiedError: it was changed in place after it was saved.
            TransferError, CorruptionError: its bytes did not come back.
            OffloadError: the current stream is being captured.
        """
        saves = self.storage.saves
        offloader, moves, readings = saves.offloader, saves.moves, saves.keeping.readings
        if offloader.can_capture or offloader.lock._is_owned():  # else nothing is refused
            offloader.refuse_call("backward asked for a tensor that was offloaded")
        if version_of(self.alias) != self.version:  # where autograd's own check would, were no hooks installed
            raise modified(self.alias, self.size, self.version)
        try:
            if readings is not None:
                with offloader.lock:  # which other threads' steps read too
                    readings.note_ask(self.step.log, self.number)
            if profiler_is_on():
                with profiled("unpack"):
                    tensor: Tensor | None = moves.fetch(self)
            else:
                tensor = moves.fetch(self)
        except (torch.OutOfMemoryError, MemoryError):
            tensor = None  # not while the error is handled, whose frames hold what is to go
        except OffloadError:
            raise
        except BaseException:
            offloader.crash()
            raise
        if tensor is None:
            with offloader.crashing():
                offloader.make_room(partial(moves.drop_all_but, self.storage))
                tensor = moves.fetch(self)
        if self.step.is_over and readings is not None and readings.awaits_end:
            with offloader.lock:
                readings.note_end()
        if self.original is not None and tensor is not self.original():
            tensor = self.original.like(tensor)
            own_until_taken(self.storage, tensor)
        return tensor

    def prefetch(self) -> None:
        """Starts to bring the tensor back, if it is away and there is room."""
        saves = self.storage.saves
        saves.offloader.refuse_call("a tensor that was offloaded was to be brought back")
        with saves.offloader.crashing():
            saves.moves.prefetch(self)

    def over(self, storage: torch.UntypedStorage, first_byte: int) -> Tensor:
        """This view over ``storage``, in which the footprint begins at ``first_byte``.

        It shares the version counter of what was saved, as the tensor that autograd itself would unpack does: should
        backward change it in place, the next unpack finds out.
        """
        alias = self.alias
        offset = self.offset + (first_byte - self.storage.footprint.start) // self.dtype.itemsize
        view = without_bytes(self.dtype, storage.device).data if self.conj or self.neg else alias.data
        put = set_over if dispatch_modes() else Tensor.set_
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


@cache
def without_bytes(dtype: torch.dtype, device: torch.device, conj: bool = False, neg: bool = False) -> Tensor:
    """Returns a tensor without bytes. Its ``.data`` is a new one, in half the time of ``torch.empty``.

    Args:
        conj, neg: its lazy bits: what becomes the ``.data`` of a tensor must have the same, on some devices.
    """
    with torch.inference_mode(False):  # an inference tensor has no version counter to share
        nothing = torch.empty(0, dtype=dtype, device=device)
        nothing = nothing.conj() if conj else nothing
        return neg_view(nothing) if neg else nothing
