"""Slabs: what an arena takes from the system, and where it keeps those that are shared and those that are idle."""

from __future__ import annotations

import itertools
from bisect import bisect_left, bisect_right, insort

from torch import Tensor

from eager_offload.tiers.base import Fence
from eager_offload.tiers.extents import Extents
from eager_offload.tiers.memory import PAGE, view_of

__all__ = ["Idle", "Slab", "Space"]

_serial = itertools.count()


class Slab:
    """Memory from the system: whole for one slot, or, where it has a ``space``, a part of that, cut up for many."""

    __slots__ = ("address", "buffer", "fences", "nbytes", "serial", "slots", "space", "start", "tensor")

    def __init__(self, tensor: Tensor, space: Space | None, start: int) -> None:
        self.tensor = tensor
        self.address = tensor.data_ptr()
        self.nbytes = tensor.numel()
        #: The bytes as a buffer; slices of it keep the memory.
        self.buffer = view_of(self.address, self.nbytes, tensor)
        self.space = space
        #: Where the slab begins in its space.
        self.start = start
        #: How many slots are alive in it.
        self.slots = 0
        #: Earlier uses of a whole slab; those of a shared one are known to its space.
        self.fences: tuple[Fence, ...] = ()
        self.serial = next(_serial)

    def at_rest(self) -> bool:
        """Whether no transfer can touch the slab any more; only asked while it is idle."""
        fences = self.fences if self.space is None else self.space.extents.fences(self.start)
        return all(fence.passed() for fence in fences)


class Space:
    """All slabs that are cut to multiples of ``grain``, laid out with gaps so that best fit looks at all at once."""

    def __init__(self, grain: int) -> None:
        self.grain = grain
        self.extents = Extents()
        self._starts: list[int] = []
        self._slabs: list[Slab] = []

    def add(self, tensor: Tensor) -> None:
        start = self.extents.grow(tensor.numel(), gap=PAGE)
        self._starts.append(start)
        self._slabs.append(Slab(tensor, self, start))

    def remove(self, slab: Slab) -> None:
        self.extents.withdraw(slab.start, slab.nbytes)
        at = bisect_left(self._starts, slab.start)
        del self._starts[at], self._slabs[at]

    def slab_at(self, position: int) -> Slab:
        return self._slabs[bisect_right(self._starts, position) - 1]


class Idle:
    """The slabs without slots, the one that has been idle for longest first."""

    def __init__(self) -> None:
        self.nbytes = 0
        self._slabs: dict[Slab, None] = {}
        #: Those that serve one slot at a time, by size; the serial number makes the order total.
        self._whole: list[tuple[int, int, Slab]] = []

    def add(self, slab: Slab) -> None:
        self._slabs[slab] = None
        self.nbytes += slab.nbytes
        if slab.space is None:
            insort(self._whole, (slab.nbytes, slab.serial, slab))

    def remove(self, slab: Slab) -> None:
        del self._slabs[slab]
        self.nbytes -= slab.nbytes
        if slab.space is None:
            del self._whole[bisect_left(self._whole, (slab.nbytes, slab.serial))]

    def smallest_whole(self, nbytes: int) -> Slab | None:
        """The smallest that holds ``nbytes`` and is not shared."""
        at = bisect_left(self._whole, (nbytes,))
        return self._whole[at][2] if at < len(self._whole) else None

    def oldest_at_rest(self, keep: int) -> list[Slab]:
        """Those that have to go so that ``keep`` bytes are left, as far as none is in use by a transfer."""
        excess, found = self.nbytes - keep, []
        for slab in self._slabs:
            if excess <= 0:
                break
            if slab.at_rest():
                found.append(slab)
                excess -= slab.nbytes
        return found

    def __contains__(self, slab: Slab) -> bool:
        return slab in self._slabs
