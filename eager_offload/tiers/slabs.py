"""Slabs: what an arena takes from the system, and where it keeps those that are shared and those that are idle."""

from __future__ import annotations

import itertools
from bisect import bisect_left, bisect_right
from typing import Protocol

from torch import Tensor

from eager_offload.tiers.base import Fence
from eager_offload.tiers.extents import Extents
from eager_offload.tiers.memory import PAGE, round_up, view_of

__all__ = ["ExactSizes", "Idle", "PowersOfTwo", "Slab", "SlabSizes", "Space"]

_serial = itertools.count()

#: A new shared slab is at most this part of what is held, so that the empty rest of the newest one stays small.
_SHARE = 32
#: Bytes; shared slabs are no smaller: they would cost more in calls than they save in room.
_LEAST_PAGES, _LEAST_LINES = 1 << 20, 1 << 16


# -- how large a slab is --------------------------------------------------------------------------------------------


class SlabSizes(Protocol):
    """How large the slabs are that an arena asks the system for; all sizes in bytes."""

    def alone(self, nbytes: int) -> bool:
        """Whether a request gets a slab of its own."""

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

    def alone(self, nbytes: int) -> bool:
        return nbytes >= self._most // 2

    def wanted(self, need: int, held: int) -> int:
        if self.alone(need):
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

    def alone(self, nbytes: int) -> bool:
        return False

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
        slab = Slab(tensor, self, self.extents.length + PAGE)
        start = self.extents.grow(slab.nbytes, gap=PAGE)
        # No call in between: a range without its slab would be taken for one of the slab before.
        self._starts += [start]
        self._slabs += [slab]

    def remove(self, slab: Slab) -> None:
        """Takes a slab out that is free from end to end; again, if that was interrupted."""
        at = bisect_left(self._starts, slab.start)
        if at < len(self._starts) and self._slabs[at] is slab:
            self.extents.withdraw(slab.start, slab.nbytes)
            del self._starts[at], self._slabs[at]

    def slab_at(self, position: int) -> Slab:
        return self._slabs[bisect_right(self._starts, position) - 1]


class Idle:
    """The slabs without slots, the one that has been idle for longest first. All changes may be made twice."""

    def __init__(self) -> None:
        self.nbytes = 0
        self._slabs: dict[Slab, None] = {}
        #: Those that serve one slot at a time, by size; the serial number makes the order total.
        self._whole: list[tuple[int, int, Slab]] = []

    def add(self, slab: Slab) -> None:
        if slab.space is None:
            at = bisect_left(self._whole, (slab.nbytes, slab.serial))
            if at == len(self._whole) or self._whole[at][2] is not slab:
                self._whole.insert(at, (slab.nbytes, slab.serial, slab))
        if slab not in self._slabs:
            self._slabs[slab] = None
            self.nbytes += slab.nbytes

    def remove(self, slab: Slab) -> None:
        if slab.space is None:
            at = bisect_left(self._whole, (slab.nbytes, slab.serial))
            if at < len(self._whole) and self._whole[at][2] is slab:
                del self._whole[at]
        if slab in self._slabs:
            del self._slabs[slab]
            self.nbytes -= slab.nbytes

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
            if slab.slots == 0 and slab.at_rest():  # an interrupt may have come while one was handed out
                found.append(slab)
                excess -= slab.nbytes
        return found

    def __contains__(self, slab: Slab) -> bool:
        return slab in self._slabs
