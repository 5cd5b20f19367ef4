"""What stands between an offload and its reload: a host tensor, and the parcel that its storage owns.

[Note: the host tensor]
Between the forward graph and the backward graph only tensors can travel. An offload returns a CPU tensor of the
source's size and strides over the very memory of its slot: pinned or plain memory, or a mapping of the spill file,
which takes no memory as long as nobody reads it. Its storage owns a :class:`Parcel`, and when it goes the slot goes
back. So lifetime belongs to autograd here too: ``retain_graph``, several backwards and graphs that are never run
backward need no more than that. Only a reload knows where the bytes are: after a failed write they are elsewhere, and
on an accelerator the wait is a stream's, not that of whoever reads host memory. On a CPU, a host tensor whose bytes did
arrive shows them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from eager_offload.runtime.base import ALIGNMENT, Event
from eager_offload.stats import Tally
from eager_offload.tiers.base import Slot
from eager_offload.tiers.memory import view_of

if TYPE_CHECKING:
    from eager_offload.transfers import Transfers

__all__ = [
    "Arrival",
    "Parcel",
    "Remains",
    "flat_bytes",
    "host_tensor",
    "like_host",
    "own",
    "owned_by",
    "parcel_of",
    "resolved",
    "span_bytes",
]

#: The attribute of a storage that holds what it owns.
_OWNED = "_eager_offload"


class Remains(NamedTuple):
    """The accounts of a parcel that is gone."""

    tally: Tally
    logical_bytes: int
    is_kept: bool
    was_asked: bool


class Parcel:
    """The bytes that a host tensor stands for. Its storage owns it, and nothing else does."""

    __slots__ = (
        "_graveyard",
        "event",
        "is_pending",
        "kept",
        "logical_bytes",
        "nbytes",
        "phase",
        "recorded",
        "slot",
        "tally",
        "ticket",
        "transfers",
        "was_asked",
    )

    def __init__(self, transfers: Transfers, slot: Slot | None, source: Tensor, tally: Tally) -> None:
        self.transfers = transfers
        self.slot = slot
        self.tally = tally
        self.nbytes = span_bytes(source)
        self.logical_bytes = source.nbytes
        #: The address of the first byte, modulo the alignment that reloads keep.
        self.phase = source.data_ptr() % ALIGNMENT
        #: The transfer out, once it has started.
        self.event: Event = None
        self.ticket: int | None = None
        #: Whether its wait has not come yet.
        self.is_pending = True
        #: The bytes of one that could not leave.
        self.kept: Tensor | None = None
        self.was_asked = False
        #: What a trace has of it; goes when this goes.
        self.recorded: object | None = None
        self._graveyard = transfers.graveyard

    def __del__(self) -> None:
        # See [Note: slots give themselves back]: append, and nothing else.
        try:
            remains = Remains(self.tally, self.logical_bytes, self.kept is not None, self.was_asked)
        except AttributeError:  # `__init__` was interrupted, so nobody knows of it
            return
        self._graveyard.append(remains)


class Arrival:
    """A reload that a graph has asked for and not waited for yet; the target's storage owns it."""

    __slots__ = ("event", "is_pending", "nbytes", "ticket", "transfers")

    def __init__(self, transfers: Transfers | None, nbytes: int) -> None:
        #: Who knows of the transfer; ``None`` where the bytes are there already.
        self.transfers = transfers
        self.nbytes = nbytes
        self.event: Event = None
        self.ticket: int | None = None
        #: Whether its wait has not come yet.
        self.is_pending = True


def parcel_of(host: Tensor) -> Parcel | None:
    """What ``host`` stands for; ``None`` for a tensor that no offload has returned."""
    parcel = owned_by(host)
    return parcel if isinstance(parcel, Parcel) else None


def resolved(tensor: Tensor) -> Tensor:
    """``tensor``, or a copy of the same strides if its bytes are not its values: the bits for that do not travel."""
    if not (tensor.is_conj() or tensor.is_neg()):
        return tensor
    plain = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device=tensor.device)
    return plain.copy_(tensor)


def span_bytes(tensor: Tensor) -> int:
    """Bytes from the first to the last element of ``tensor``, both counted."""
    if tensor.numel() == 0:
        return 0
    last = sum((size - 1) * stride for size, stride in zip(tensor.size(), tensor.stride(), strict=True))
    return (last + 1) * tensor.itemsize


def flat_bytes(tensor: Tensor) -> Tensor:
    """The bytes that ``tensor`` spans, flat."""
    flat = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    storage = tensor.untyped_storage()
    return flat.set_(storage, int(tensor.storage_offset()) * tensor.itemsize, (span_bytes(tensor),), (1,))


def host_tensor(memory: memoryview, source: Tensor, parcel: Parcel) -> Tensor:
    """A CPU tensor like ``source`` over ``memory``; its storage owns ``parcel``."""
    storage = torch.frombuffer(memory, dtype=torch.uint8).untyped_storage()
    own(storage, parcel)
    return torch.empty(0, dtype=source.dtype).set_(storage, 0, source.size(), source.stride())


def like_host(target: Tensor, host: Tensor) -> Tensor:
    """A tensor like ``host``, which may be a view of what was offloaded, over the flat ``target``."""
    if target.storage_offset() and target.device.type == "cpu":
        # Compiled code counts from the beginning of a storage.
        target = torch.frombuffer(view_of(target.data_ptr(), target.numel(), target), dtype=torch.uint8)
    offset = int(target.storage_offset()) // host.itemsize + int(host.storage_offset())
    return torch.empty(0, dtype=host.dtype, device=target.device).set_(
        target.untyped_storage(), offset, host.size(), host.stride()
    )


def own(storage: torch.UntypedStorage, owned: Parcel | Arrival) -> None:
    """``owned`` lives as long as ``storage`` does: torch keeps the Python object of a storage, with all it has."""
    storage.__dict__[_OWNED] = owned


def owned_by(tensor: Tensor) -> object:
    return tensor.untyped_storage().__dict__.get(_OWNED)
