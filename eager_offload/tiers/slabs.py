"""Slabs of host memory: how large they are, and the slots and leases in them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any, ClassVar, TypeAlias

import torch
from torch import Tensor

from eager_offload.tiers.base import Slot, SlotRecord
from eager_offload.tiers.memory import PAGE, move, move_if_there, view_of
from eager_offload.tiers.quotas import Quota
from eager_offload.tiers.ranges import Range, Slab, pending

#: A new shared slab is at most this part of what is held, so that the empty rest of the newest one stays small.
_SHARE = 32
#: Bytes up to which a slab is taken for several requests: smaller ones would cost more in calls than they save in room.
_LEAST = 1 << 20


# -- how large a slab is --------------------------------------------------------------------------------------------


class ExactSizes:
    """How large slabs are, in bytes, where the system gives what is asked for, to the page.

    Args:
        most: bytes; the largest slab that is taken for several requests.
    """

    def __init__(self, most: int) -> None:
        self._most = most

    def wanted(self, need: int, held: int) -> int:
        """Returns the size of the slab that ``need``, in whole pages, calls for while ``held`` are held."""
        most = min(max(held // _SHARE, _LEAST), self._most)
        return max(most // need, 1) * need

    def within(self, need: int, room: int) -> int:
        """Returns the largest size up to ``room``, or 0 where none holds ``need``."""
        return room // need * need

    def least(self, need: int) -> int:
        """Returns the smallest size that holds ``need``."""
        return need


class PowersOfTwo:
    """The same where it rounds everything up to a power of two, as torch's allocator of pinned memory does.

    Nothing is rounded if a power of two is asked for, so every slab is one. What is left over behind the last whole
    multiple of a request serves smaller ones at best, so a slab is so large that this is at most a 20th of it, as long
    as it does not double what is held (nor goes beyond 1 GiB at first): the end of the last slab is empty too.
    """

    _LEAST, _SHARE, _FREELY = 1 << 20, 8, 1 << 30
    _LEFT_OVER = 20

    def wanted(self, need: int, held: int) -> int:
        most = max(self._FREELY, _power_of_two(held + 1) // 2)
        best = size = max(self.least(need), min(max(_power_of_two(held // self._SHARE), self._LEAST), self._FREELY))
        while size <= most:
            if size % need * self._LEFT_OVER <= size:
                return size
            if size % need * best < best % need * size:
                best = size
            size *= 2
        return best

    def within(self, need: int, room: int) -> int:
        size = _power_of_two(room + 1) // 2
        return size if size >= need else 0

    def least(self, need: int) -> int:
        return _power_of_two(need)


#: What a pool asks the system for.
SlabSizes: TypeAlias = ExactSizes | PowersOfTwo


def _power_of_two(nbytes: int) -> int:
    """Returns the smallest one that is not below ``nbytes``, and not below a page."""
    return max(1 << max(nbytes - 1, 0).bit_length(), PAGE)


# -- slabs ----------------------------------------------------------------------------------------------------------


class HostSlab(Slab):
    """Host memory."""

    __slots__ = ("address", "buffer", "slots", "tensor")

    def __init__(self, tensor: Tensor) -> None:
        super().__init__(tensor.numel())
        self.tensor = tensor
        self.address = tensor.data_ptr()
        #: The bytes as a buffer; slices of it keep the memory.
        self.buffer = view_of(self.address, self.nbytes, tensor)
        #: How many slots are alive in it.
        self.slots = 0

    def leave(self) -> None:
        """Lets go of the memory, which the slices of the buffer alone have from now on. Idempotent."""
        with suppress(AttributeError):
            del self.tensor, self.buffer


# -- slots ----------------------------------------------------------------------------------------------------------


class HostSlotRecord(SlotRecord):
    """What a slot leaves behind, or a tensor that owned its bytes."""

    __slots__ = ("quota", "range")
    range: Range[HostSlab]
    quota: Quota | None


class HostSlot(Slot):
    """``nbytes`` bytes of host memory, at a multiple of ``PAGE``."""

    tier: ClassVar[str] = "host"
    writes_storages = True
    __slots__ = ("_slab", "_start")

    def __init__(
        self,
        found: Range[HostSlab],
        nbytes: int,
        on_death: Callable[[Any], object],
        quota: Quota | None,
    ) -> None:
        record = self.record = HostSlotRecord(self, on_death)  # as in `Slot`, whose `__init__` would be a call more
        self.nbytes = record.nbytes = nbytes
        record.fences = found.fences if len(found.fences) < 2 else pending(found.fences)  # what is over does not add up
        record.range, record.quota = found, quota
        self._slab, self._start = found.slab, found.start

    @property
    def address(self) -> int:
        """Where the bytes are; a slot does not move."""
        return self._slab.address + self._start

    @property
    def tensor(self) -> Tensor:
        """The bytes as a flat ``uint8`` CPU tensor, for copies by a stream; it does not keep the slot alive."""
        return self._slab.tensor[self._start : self._start + self.nbytes]

    def write(self, source: Tensor | torch.UntypedStorage) -> None:
        assert not isinstance(source, Tensor) or source.numel() == self.nbytes
        move_if_there(self.address, source.data_ptr(), self.nbytes)

    def read(self, target: Tensor) -> None:
        assert target.numel() == self.nbytes
        move(target.data_ptr(), self.address, self.nbytes)

    def memory(self) -> memoryview:
        return view_of(self.address, self.nbytes, self)


class Lease:
    """``nbytes`` bytes of host memory for a tensor, which owns them: they go back when its storage dies."""

    __slots__ = ("record", "view")

    def __init__(
        self,
        found: Range[HostSlab],
        nbytes: int,
        on_death: Callable[[Any], object],
        quota: Quota | None,
    ) -> None:
        assert not found.fences, "memory that streams copy to and memory for leases come from different pools"
        # The storage holds this very view until it is freed, so the view's death is the storage's.
        view: Any = found.slab.buffer[found.start : found.start + nbytes]
        self.view, record = view, HostSlotRecord(view, on_death)
        self.record = record
        record.nbytes, record.fences, record.range, record.quota = nbytes, (), found, quota
