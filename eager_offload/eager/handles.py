"""Handles: the objects that autograd stores in place of saved tensors, and the bytes that they own.

[Note: lifetime belongs to handles]
    autograd's saved variable -> SavedView -> SavedStorage -> slot, source or reload
Everything else, e.g. the schedule, references a ``SavedStorage`` weakly, by its record. When autograd frees the last
view, the storage's slot and memory are returned. No phase is tracked, no count has to reach zero, and entering a
context clears nothing.

A handle must not hold a tensor with a ``grad_fn``: the ``grad_fn`` of an output may own the handle, and the garbage
collector cannot see this cycle through C++. So a handle holds ``tensor.detach()``, which shares bytes and version
counter and has no ``grad_fn``. A leaf has none either, so a leaf that is kept is held itself.
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
    """The saved tensors of one device, as far as handles use them."""

    offloader: DeviceOffloader
    #: The records of storages, by the key that identifies their bytes.
    names: dict[Hashable, StorageRecord]
    order: PrefetchOrder
    keeping: Keeping
    script: StepScript | None

    @property
    def moves(self) -> Moves: ...


class Moves(Protocol):
    """The transfers of saved tensors, as far as handles use them."""

    def fetch(self, view: SavedView) -> Tensor:
        """Returns the tensor, ordered after its reload on the current stream."""

    def prefetch(self, view: SavedView) -> None:
        """Reloads a saved tensor early, if there is room."""

    def drop_all_but(self, needed: SavedStorage) -> None:
        """Frees all prefetched storages but ``needed``."""

    def hold_source(self, saved: SavedStorage, transfer: Transfer) -> None:
        """Keeps the source of an offloaded storage that backward is about to need."""


class KeptTensor:
    """The handle of a saved tensor that stays on the device."""

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
    """Returns the tensor that a ``KeptTensor`` stores for a plain tensor or parameter.

    A leaf is stored itself, so that a later ``leaf.data = ...`` is visible, as under autograd. Any other tensor is
    stored as a detached alias, which avoids the cycle of [Note: lifetime belongs to handles].
    """
    if tensor.is_leaf:
        return tensor
    return tensor.detach() if type(tensor) is Tensor else detached(tensor)


class Returned(NamedTuple):
    """A reloaded storage that autograd received, the offset of the footprint in it, and the event of the reload."""

    storage: weakref.ref[torch.UntypedStorage]
    first_byte: int
    event: Event


class CopyStart(NamedTuple):
    """When the copy of a storage started: the queue and the sequence number of its thread, and the tensor's version."""

    queue: ResidentQueue
    sequence: int | None
    version: int


class StorageRecord(BytesRecord["SavedStorage"]):
    """A weak reference to a saved storage, with the facts that are needed after the storage has died."""

    __slots__ = ("key", "name", "queue", "reload", "saves")
    #: Identifies the storage in traces; increases with each save.
    key: int
    #: Identifies the bytes, so that a further save of the same bytes is recognized.
    name: Hashable
    #: The queue in which the storage waits for its offload.
    queue: ResidentQueue | None
    #: The reload, under way or over; ``SavedStorage.target`` is its destination.
    reload: Transfer | None
    #: Weak, because ``Saves`` holds the record.
    saves: weakref.ref[Any]

    def on_finalized(self) -> None:
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
        self.queue = self.reload = None  # a trace may hold the record

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
        # Free the source. Views keep their aliases, without bytes, as version counters.
        for alias in saved.aliases:
            alias.data = without_bytes(alias.dtype, alias.device, alias.is_conj(), alias.is_neg())
        saved.aliases.clear()


class SavedStorage:
    """A storage that is or will be offloaded; all saved views of it share this object."""

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
        #: Size and alignment of reload targets. The address modulo ``ALIGNMENT`` is that of the source, because kernels
        #: choose their summation order by alignment.
        self.layout = Layout(footprint.moved, (storage.data_ptr() + footprint.start) % ALIGNMENT)
        self.saves = saves
        #: The step of the save, the save's number in the step, and the number of the first save of the same storage.
        self.step = step
        self.number = self.first = number
        #: The stream that was current at pack. Reload targets for it, and for prefetches, are allocated on it.
        self.stream = stream
        #: An alias of the source for each view. When the source is freed, the list is cleared, and each view goes on
        #: holding its own alias, without bytes, as a version counter.
        self.aliases: list[Tensor] = []
        #: The tensor whose version counter the views share.
        self.root: Callable[[], Tensor | None] = weakref.ref(tensor if (base := base_of(tensor)) is None else base)
        self.started: CopyStart | None = None
        #: How many ``SavedStorage`` objects the same bytes have had so far, with this one: a further save makes another
        #: one if the bytes might have changed in between.
        self.times_saved = 1
        #: Whether a later save made another ``SavedStorage``, which may keep this one's source alive.
        self.saved_anew = False
        self.slot: Slot | None = None
        #: The destination of ``record.reload``.
        self.target: Tensor | None = None
        #: The reloaded storage that autograd received: served again while it lives.
        self.returned: Returned | None = None
        #: Tensors that autograd received and this object owns: see the note in originals.py.
        self.given: tuple[Tensor, ...] = ()

    def source_bytes(self) -> Tensor:
        """Returns the footprint's bytes in the source, as a flat tensor."""
        alias = self.aliases[0]
        nothing, storage = without_bytes(torch.uint8, alias.device).data, alias.untyped_storage()
        return set_over(nothing, storage, self.footprint.start, (self.footprint.nbytes,), (1,))

    def returned_bytes(self) -> Tensor | None:
        """Returns the footprint's bytes in the storage that autograd received, if it is alive and was not resized."""
        storage = None if self.returned is None else self.returned.storage()
        if self.returned is None or storage is None:
            return None
        first_byte, nbytes = self.returned.first_byte, self.footprint.nbytes
        if storage.nbytes() < first_byte + nbytes:
            return None
        return set_over(without_bytes(torch.uint8, storage.device).data, storage, first_byte, (nbytes,), (1,))


class SavedView:
    """The handle of one saved tensor whose storage is or will be offloaded."""

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
        self.step = step
        #: The number of the save in its step.
        self.number = number
        #: This save's place in the order in which backward needs storages.
        self.use = step.uses.add(number, storage.record, storage.footprint.nbytes)
        self.size = tensor.size()
        self.stride = tensor.stride()
        #: Elements from the start of the storage.
        self.offset = int(tensor.storage_offset())
        self.dtype = tensor.dtype
        self.conj = tensor.is_conj()
        self.neg = tensor.is_neg()
        self.version: int = version_of(tensor)
        self.alias = Tensor.detach(tensor)  # a subclass may override detach
        if storage.record.state is AWAY:  # the source is gone: this view needs only a version counter
            self.alias.data = without_bytes(self.dtype, tensor.device, self.conj, self.neg)
        else:
            storage.aliases.append(self.alias)
        #: The original tensor; ``None`` if autograd would return an alias.
        self.original = None if tensor.requires_grad else original_of(tensor)

    @property
    def shares(self) -> bool:
        """Whether an earlier save created ``storage``."""
        return self.storage.number != self.number or self.storage.step is not self.step

    def unpack(self) -> Tensor:
        """Returns the saved tensor, ordered after its reload on the current stream.

        Raises:
            SavedTensorModifiedError: the tensor was modified in place after the save.
            TransferError, CorruptionError: its bytes could not be reloaded.
            OffloadError: the current stream is being captured.
        """
        saves = self.storage.saves
        offloader, moves, readings = saves.offloader, saves.moves, saves.keeping.readings
        if offloader.can_capture or offloader.lock._is_owned():  # otherwise `refuse_call` would do nothing
            offloader.refuse_call("backward needed a tensor that was offloaded")
        if version_of(self.alias) != self.version:  # as autograd's own check, which hooks switch off
            raise modified(self.alias, self.size, self.version)
        try:
            if readings is not None:
                with offloader.lock:  # steps of other threads use the readings, too
                    readings.note_unpack(self.step.log, self.number)
            if profiler_is_on():
                with profiled("unpack"):
                    tensor: Tensor | None = moves.fetch(self)
            else:
                tensor = moves.fetch(self)
        except (torch.OutOfMemoryError, MemoryError):
            tensor = None  # make room outside of this block: the error's frames hold the memory
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
        """Starts to reload the tensor, if it was offloaded and there is room."""
        saves = self.storage.saves
        saves.offloader.refuse_call("a tensor that was offloaded was to be brought back")
        with saves.offloader.crashing():
            saves.moves.prefetch(self)

    def over(self, storage: torch.UntypedStorage, first_byte: int) -> Tensor:
        """Returns this view over ``storage``, in which the footprint begins at ``first_byte``.

        The view shares the version counter of the saved tensor, as a tensor that autograd unpacks does: if backward
        modifies the view in place, the next unpack raises.
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
    """Returns the error of autograd for a modified saved tensor, in autograd's words."""
    return SavedTensorModifiedError(
        "one of the variables needed for gradient computation has been modified by an inplace operation: "
        f"[{counter.type()} {list(size)}] is at version {version_of(counter)}; expected version {expected} instead. "
        "Save a clone, or change the tensor after backward; torch.autograd.set_detect_anomaly(True) shows where"
    )


@cache
def without_bytes(dtype: torch.dtype, device: torch.device, conj: bool = False, neg: bool = False) -> Tensor:
    """Returns a cached empty tensor. Reading its ``.data`` makes a new empty tensor, faster than ``torch.empty`` does.

    Args:
        conj, neg: the lazy bits. Third-party devices require equal bits in ``tensor.data = ...``.
    """
    with torch.inference_mode(False):  # an inference tensor has no version counter to share
        nothing = torch.empty(0, dtype=dtype, device=device)
        nothing = nothing.conj() if conj else nothing
        return neg_view(nothing) if neg else nothing
