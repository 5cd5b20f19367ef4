"""What autograd holds in place of a saved tensor, and what those handles own.

[Note: lifetime belongs to handles]
    autograd's saved variable -> SavedView -> SavedStorage -> slot, source or reload
Nothing else holds a ``SavedStorage`` strongly: schedules know it by its key, the lane by a weak reference. When
autograd lets go of the last view, whatever the storage owns goes back by itself. There is no phase to be in, no count
that has to reach zero, nothing to be cleared when a context is entered.

A handle never holds the tensor that pack received: an output's ``grad_fn`` owns the handle, and the cycle through C++
is invisible to the garbage collector. ``tensor.detach()`` shares bytes and version counter and has no ``grad_fn``.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Hashable
from dataclasses import dataclass
from enum import Enum, auto
from functools import cache
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from eager_offload._torch import neg_view, weak_storage
from eager_offload.errors import SavedTensorModifiedError
from eager_offload.learning import Forward, Notes
from eager_offload.runtime.base import ALIGNMENT, Event, Layout, Stream
from eager_offload.schedule import DelayLine
from eager_offload.selection import Footprint, root_of
from eager_offload.stats import KeepReason, Tally
from eager_offload.tiers.base import Slot

__all__ = [
    "Keeper",
    "KeptTensor",
    "Reload",
    "Remains",
    "Returned",
    "SavedStorage",
    "SavedView",
    "State",
    "compact",
    "flat_bytes",
]


class Keeper(Protocol):
    """What handles need of the lane that they belong to."""

    #: Where finalizers leave what they know. Appending to a deque takes no lock.
    graveyard: deque[int | Remains | Notes]

    def give(self, view: SavedView) -> Tensor:
        """The saved tensor again, for the stream that is current now."""


class KeptTensor:
    """The handle of a saved tensor that stays where it is."""

    __slots__ = ("reason", "tensor", "version")

    def __init__(self, tensor: Tensor, version: int, reason: KeepReason) -> None:
        self.tensor = tensor
        self.version = version
        self.reason = reason

    def unpack(self) -> Tensor:
        tensor = self.tensor
        if tensor._version != self.version:
            raise modified(tensor, tensor.size(), self.version)
        return tensor


class State(Enum):
    """Where a saved storage is between its pack and the end of its last handle."""

    WAITING = auto()
    """Its source is held; its copy has not started."""
    LEAVING = auto()
    """Its copy is on the way; the source is still held."""
    AWAY = auto()
    """Its bytes rest in a tier, and the source was let go."""
    KEPT = auto()
    """It could not leave (or must not) and stays, for the reason that was counted."""


@dataclass(slots=True)
class Reload:
    """Bytes on their way back, or there: the target, and the event that says when."""

    target: Tensor
    event: Event
    #: The registration that the first wait takes up; ``None`` after that.
    ticket: int | None
    #: Whether its bytes count as held by the library.
    held: bool = True


class Returned(NamedTuple):
    """A reloaded storage that was handed to autograd, and where in it the footprint begins."""

    storage: weakref.ref[torch.UntypedStorage]
    first_byte: int


class Remains(NamedTuple):
    """The accounts of a saved storage that is gone."""

    key: int
    name: Hashable
    logical_bytes: int
    state: State
    asked: bool
    line: DelayLine | None
    reload: Reload | None
    ref: weakref.ref[SavedStorage]
    tally: Tally


class SavedStorage:
    """A storage that was taken, shared by every view of it that autograd saved."""

    __slots__ = (
        "__weakref__",
        "aliases",
        "asked",
        "copied_version",
        "footprint",
        "forward",
        "kept",
        "key",
        "lane",
        "line",
        "logical_bytes",
        "name",
        "number",
        "origin",
        "phase",
        "ref",
        "reload",
        "returned",
        "root",
        "shared_bytes",
        "slot",
        "state",
        "stream",
        "takes",
        "tally",
    )

    def __init__(
        self,
        key: int,
        name: Hashable,
        tensor: Tensor,
        footprint: Footprint,
        lane: Keeper,
        stream: Stream,
        tally: Tally,
        forward: Forward,
        number: int,
    ) -> None:
        storage = tensor.untyped_storage()
        #: Names it in the schedule.
        self.key = key
        #: Names what it covers: further saves of the same bytes are recognised by it.
        self.name = name
        self.origin = weak_storage(storage)
        self.footprint = footprint
        #: The address of the footprint's first byte, modulo the alignment that reloads keep.
        self.phase = (storage.data_ptr() + footprint.start) % ALIGNMENT
        self.lane = lane
        #: The forward that took it, and the number of the save in that.
        self.forward = forward
        self.number = number
        #: Where it is counted.
        self.tally = tally
        #: The compute stream noted at pack: reload targets are allocated on it.
        self.stream = stream
        #: The bytes that the stats count for it: of the view that took it.
        self.logical_bytes = tensor.nbytes
        #: While the source is held: an alias of it for each view. Once released they hold no bytes, only the counters
        #: of the source's versions, and only the views have them.
        self.aliases: list[Tensor] = []
        #: The tensor whose version counter the views share, to recognise further views of it.
        self.root = weakref.ref(root_of(tensor))
        self.copied_version: int | None = None
        #: How many times this storage was taken because it might have been filled anew in between.
        self.takes = 1
        self.state = State.WAITING
        #: Why it stays, once it is in the state ``KEPT``.
        self.kept: KeepReason | None = None
        #: The bytes that its tally counts as shared with it.
        self.shared_bytes = 0
        self.line: DelayLine | None = None
        self.slot: Slot | None = None
        self.reload: Reload | None = None
        #: The reloaded storage after it was handed to autograd: served again for as long as it lives.
        self.returned: Returned | None = None
        self.asked = False
        self.ref = weakref.ref(self)

    def __del__(self) -> None:
        # See [Note: slots give themselves back]: append, and nothing else.
        try:
            remains = Remains(
                self.key,
                self.name,
                self.logical_bytes,
                self.state,
                self.asked,
                self.line,
                self.reload,
                self.ref,
                self.tally,
            )
        except AttributeError:  # `__init__` was interrupted, so nobody knows of it
            return
        self.lane.graveyard.append(remains)

    @property
    def target_layout(self) -> Layout:
        """What a reload target must look like. Gathered elements come back dense and are put in their places later."""
        footprint = self.footprint
        return Layout(footprint.moved) if footprint.gathered else Layout(footprint.nbytes, self.phase)

    def release_source(self) -> None:
        """Lets go of the source's bytes; the aliases that views hold stay, as counters of its versions."""
        for alias in self.aliases:
            alias.data = _nothing(alias.dtype, alias.device)
        self.aliases = []  # not cleared: the keepalive of a copy may share the list

    def source_bytes(self) -> Tensor:
        """The bytes that travel, flat: a range of the storage, or the view's own elements, gathered."""
        alias = self.aliases[0]
        storage = alias.untyped_storage()
        if self.footprint.gathered:
            # Over the storage itself: an alias with the conjugate or negative bit would be copied with the bit applied.
            stored = _nothing(alias.dtype, alias.device).data
            stored.set_(storage, alias.storage_offset(), alias.size(), alias.stride())
            return flat_bytes(compact(stored).clone(memory_format=torch.contiguous_format))
        return _nothing(torch.uint8, alias.device).data.set_(
            storage, self.footprint.start, (self.footprint.nbytes,), (1,)
        )


class SavedView:
    """The handle of one saved tensor whose storage was taken."""

    __slots__ = (
        "alias",
        "conj",
        "dtype",
        "forward",
        "neg",
        "number",
        "offset",
        "position",
        "size",
        "storage",
        "stride",
        "version",
    )

    def __init__(self, storage: SavedStorage, tensor: Tensor, position: int, forward: Forward, number: int) -> None:
        self.storage = storage
        #: The forward that saved it, and the number of the save in that.
        self.forward = forward
        self.number = number
        #: Names this use of the storage in the prefetch order.
        self.position = position
        self.size = tensor.size()
        self.stride = tensor.stride()
        #: In elements, from the start of the storage.
        self.offset = int(tensor.storage_offset())
        self.dtype = tensor.dtype
        self.conj = tensor.is_conj()
        self.neg = tensor.is_neg()
        self.version: int = tensor._version
        self.alias = tensor.detach()

    def __del__(self) -> None:
        try:
            position = self.position
        except AttributeError:  # `__init__` was interrupted, so nobody knows of it
            return
        self.storage.lane.graveyard.append(position)

    def unpack(self) -> Tensor:
        return self.storage.lane.give(self)

    def check_version(self) -> None:
        """Raises where autograd's own check would, were no hooks installed."""
        if self.alias._version != self.version:
            raise modified(self.alias, self.size, self.version)

    def forget_bytes(self) -> None:
        """The storage has left already: this view needs only the counter of its versions."""
        self.alias.data = _nothing(self.dtype, self.alias.device)

    def over(self, storage: torch.UntypedStorage, first_byte: int) -> Tensor:
        """This view over ``storage``, in which the footprint begins at ``first_byte``.

        It shares the version counter of what was saved, as the tensor that autograd itself would unpack does: should
        backward change it in place, the next unpack finds out. The lane's lock is held.
        """
        alias = self.alias
        offset = self.offset + (first_byte - self.storage.footprint.start) // self.dtype.itemsize
        nothing = _nothing(self.dtype, storage.device)
        view = nothing.data
        view.set_(storage, offset, self.size, self.stride)
        if self.conj:
            view = view.conj()
        if self.neg:
            view = neg_view(view)
        try:
            alias.data = view
            return alias.detach()
        finally:
            alias.data = nothing

    def scatter(self, dense: Tensor, target: Tensor) -> Tensor:
        """This view over the flat ``target``, filled from the elements that were gathered into the flat ``dense``."""
        view = self.over(target.untyped_storage(), int(target.storage_offset()))
        plain = _nothing(self.dtype, target.device).data
        plain.set_(view.untyped_storage(), view.storage_offset(), self.size, self.stride)
        places = compact(plain)
        places.copy_(dense.view(self.dtype).view(places.shape))
        return view


def compact(view: Tensor) -> Tensor:
    """``view`` with every broadcast dimension narrowed to one element."""
    for dim, stride in enumerate(view.stride()):
        if stride == 0:
            view = view.narrow(dim, 0, 1)
    return view


def flat_bytes(tensor: Tensor) -> Tensor:
    """The bytes of a contiguous tensor."""
    return _nothing(torch.uint8, tensor.device).data.set_(
        tensor.untyped_storage(), tensor.storage_offset() * tensor.itemsize, (tensor.nbytes,), (1,)
    )


def modified(counter: Tensor, size: torch.Size, expected: int) -> SavedTensorModifiedError:
    """What autograd says when it finds a saved tensor changed, in its words."""
    return SavedTensorModifiedError(
        "one of the variables needed for gradient computation has been modified by an inplace operation: "
        f"[{counter.type()} {list(size)}] is at version {counter._version}; expected version {expected} instead. "
        "Save a clone, or change the tensor after backward; torch.autograd.set_detect_anomaly(True) shows where"
    )


@cache
def _nothing(dtype: torch.dtype, device: torch.device) -> Tensor:
    """A tensor without bytes. Its ``.data`` is a new one, in half the time of ``torch.empty``."""
    with torch.inference_mode(False):  # an inference tensor has no version counter to share
        return torch.empty(0, dtype=dtype, device=device)
