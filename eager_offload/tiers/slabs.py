"""Slabs of host memory: how large they are, which bytes of them are free, and the slots in them."""

from __future__ import annotations

import itertools
import sys
from bisect import bisect_left
from collections.abc import Callable, Iterable
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from eager_offload.tiers.base import ByteRegion, Fence, Shortage, Slot, SlotRecord
from eager_offload.tiers.extents import Extent, Extents
from eager_offload.tiers.finalizers import FinalizerRecord
from eager_offload.tiers.memory import PAGE, move, move_if_there, round_up, view_of

_serial = itertools.count()

#: A new shared slab is at most this part of what is held, so that the empty rest of the newest one stays small.
_SHARE = 32
#: Bytes; shared slabs are no smaller: they would cost more in calls than they save in room.
_LEAST_PAGES, _LEAST_LINES = 1 << 20, 1 << 16


# -- how large a slab is --------------------------------------------------------------------------------------------


class SlabSizes(Protocol):
    """How large the slabs are that an arena asks the system for; all sizes in bytes."""

    alone_from: int
    """Requests of so many bytes or more get a slab of their own."""

    def wanted(self, need: int, held: int) -> int:
        """The size of the slab that ``need``, a whole number of grains, calls for while the arena holds ``held``."""

    def within(self, need: int, room: int) -> int:
        """The largest size up to ``room``, or 0 where none holds ``need``."""

    def least(self, need: int) -> int:
        """The smallest size that holds ``need``."""


class ExactSizes:
    """For a system that gives what is asked for, to the page.

    Args:
        most: bytes; the largest slab that is shared. Half of it or more gets a slab of its own.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self.alone_from = most // 2

    def wanted(self, need: int, held: int) -> int:
        if need >= self.alone_from:
            return round_up(need, PAGE)
        least = _LEAST_PAGES if need >= PAGE else _LEAST_LINES
        most = min(max(held // _SHARE, least), self._most)
        return round_up(max(most // need, 1) * need, PAGE)

    def within(self, need: int, room: int) -> int:
        room = room // PAGE * PAGE
        return round_up(room // need * need, PAGE) if room >= need else 0

    def least(self, need: int) -> int:
        return round_up(need, PAGE)


class PowersOfTwo:
    """For a system that rounds everything up to a power of two, as torch's allocator of pinned memory does.

    Nothing is rounded if a power of two is asked for, so every slab is one and all requests share them. What is left
    over behind the last whole multiple of a request serves smaller ones at best, so a slab is so large that this is at
    most a 20th of it, as long as it does not double what is held (nor goes beyond 1 GiB at first): the end of the last
    slab is empty too.
    """

    _LEAST, _SHARE, _FREELY = 1 << 20, 8, 1 << 30
    _LEFT_OVER = 20
    alone_from = sys.maxsize

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


def _power_of_two(nbytes: int) -> int:
    """The smallest one that is not below ``nbytes``, and not below a page."""
    return max(1 << max(nbytes - 1, 0).bit_length(), PAGE)


# -- slabs ----------------------------------------------------------------------------------------------------------


class Slab:
    """Memory from the system, for one slot or cut up for many."""

    __slots__ = ("address", "buffer", "is_left", "kind", "nbytes", "serial", "slots", "start", "tensor")

    def __init__(self, tensor: Tensor, kind: str, start: int) -> None:
        self.tensor = tensor
        self.address = tensor.data_ptr()
        self.nbytes = tensor.numel()
        #: The bytes as a buffer; slices of it keep the memory.
        self.buffer = view_of(self.address, self.nbytes, tensor)
        #: Of which ``Slabs`` it is one, and where it begins among them.
        self.kind = kind
        self.start = start
        #: How many slots are alive in it.
        self.slots = 0
        self.serial = next(_serial)
        #: Whether only the tensors that own bytes in it have its memory any more.
        self.is_left = False

    def leave(self) -> None:
        """Lets go of the memory, which serves nothing else from now on."""
        if not self.is_left:
            self.is_left = True
            del self.tensor, self.buffer


class Slabs:
    """All slabs that are cut in one way, laid out with gaps so that best fit looks at all at once.

    Args:
        kind: what its slabs say that they are; they do not refer to it, so that none is in a cycle of garbage.
        alignment: bytes; what sizes are rounded up to.
    """

    def __init__(self, kind: str, alignment: int) -> None:
        self.kind = kind
        self.alignment = alignment
        self.extents = Extents()
        #: In the order of their starts.
        self.slabs: list[Slab] = []
        self.starts: list[int] = []

    def add(self, tensor: Tensor) -> Slab:
        """Takes up what the system has given."""
        slab = Slab(tensor, self.kind, self.extents.grow(tensor.numel(), gap=PAGE))
        self.slabs.append(slab)
        self.starts.append(slab.start)
        return slab

    def remove(self, slab: Slab) -> None:
        """Takes out a slab that is at rest."""
        self.extents.withdraw(slab.start, slab.nbytes)
        at = bisect_left(self.starts, slab.start)
        del self.slabs[at], self.starts[at]

    def free_but_for(self, taken: Iterable[Extent]) -> list[Slab]:
        """Makes anew what is free, after a change that was interrupted; returns the slabs."""
        ranges = [Extent(slab.start, slab.nbytes) for slab in self.slabs]
        self.extents = self.extents.free_but_for(taken, ranges)
        self.starts = [slab.start for slab in self.slabs]
        return self.slabs


# -- slots ----------------------------------------------------------------------------------------------------------


class Quota:
    """What one tier holds of an arena, and the most that it may hold; the arena's lock guards it. All in bytes.

    Args:
        budget: the most.
        pooled: quotas that are pooled may come to the largest of their budgets together. Those that are not add up.
    """

    __slots__ = ("__weakref__", "budget", "held_bytes", "overdraft", "peak_bytes", "pooled", "refusal", "used_bytes")

    def __init__(self, budget: int, *, pooled: bool) -> None:
        self.budget = budget
        self.pooled = pooled
        #: The most that ``used_bytes`` has been.
        self.peak_bytes = 0
        #: Why the machine should not give all of the budget, once it has given more than it should.
        self.overdraft: Shortage | None = None
        self.reset()

    def reset(self) -> None:
        """Forgets the slots that there are."""
        #: In slots that are alive, as they were asked for; and with rounding.
        self.used_bytes = self.held_bytes = 0
        #: Why it was last given nothing, if it was not for its budget.
        self.refusal: Shortage | None = None


class HostSlotRecord(SlotRecord):
    """What a slot leaves behind, or a tensor that owned its bytes."""

    __slots__ = ("extent", "quota", "slab")
    slab: Slab
    extent: Extent
    quota: Quota | None


class HostSlot(Slot):
    """``nbytes`` bytes of host memory, at a multiple of 4096 (of 64 where there are fewer than 4096 of them)."""

    tier: ClassVar[str] = "host"
    writes_storages = True
    __slots__ = ("_slab", "_start")

    def __init__(
        self,
        slab: Slab,
        extent: Extent,
        nbytes: int,
        fences: tuple[Fence, ...],
        on_death: Callable[[FinalizerRecord[Slot]], object],
    ) -> None:
        super().__init__(nbytes, fences, HostSlotRecord(self, on_death))
        self._slab = slab
        #: Within the slab; bytes.
        self._start = extent.start - slab.start

    @property
    def address(self) -> int:
        """Where the bytes are; a slot does not move."""
        return self._slab.address + self._start

    @property
    def tensor(self) -> Tensor:
        """The bytes as a flat ``uint8`` CPU tensor, for copies by a stream; it does not keep the slot alive."""
        return self._slab.tensor[self._start : self._start + self.nbytes]

    @property
    def region(self) -> ByteRegion:
        return ByteRegion(("host slab", self._slab.serial), self._start, self._start + self.nbytes)

    def write(self, source: Tensor | torch.UntypedStorage) -> None:
        assert not isinstance(source, Tensor) or source.numel() == self.nbytes
        move_if_there(self.address, source.data_ptr(), self.nbytes)

    def read(self, target: Tensor) -> None:
        assert target.numel() == self.nbytes
        move(target.data_ptr(), self.address, self.nbytes)

    def memory(self) -> memoryview:
        return view_of(self.address, self.nbytes, self)
