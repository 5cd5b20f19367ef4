"""Which bytes of a space are free: a best-fit allocator over numbers alone, no memory, no locks."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable
from operator import itemgetter
from typing import NamedTuple

from eager_offload.tiers.base import Fence

_START = itemgetter(0)


class Extent(NamedTuple):
    """A range of bytes, with the earlier uses of them that are not over yet."""

    start: int
    nbytes: int
    fences: tuple[Fence, ...] = ()

    @property
    def stop(self) -> int:
        return self.start + self.nbytes


class Extents:
    """The free ranges of ``[0, length)``, in bytes.

    A training step asks for the sizes of the step before. So a range that is released is kept as it is, by size, and
    serves the next request of exactly that size: a dict lookup and a pop. Any other request takes the start of the
    smallest range that holds it (the lowest of several) and that nothing uses any more: released ranges are coalesced
    with their free neighbours once their fences have passed. Where there is none, it takes a part of a released range,
    and waits for the last uses of that range alone; only where that does not do either, all that is free is coalesced.
    Otherwise one reload at the end of a long free range would hold up every offload into it. The rest of the range that
    was cut last stands beside the ordered ones: a first step cuts one slab up for all its requests.

    Not thread-safe: the owner has a lock anyway. Where a change is interrupted, the owner makes the extents anew
    (``free_but_for``): no fence that has not passed is missing in ``fences`` then.
    """

    __slots__ = ("_by_size", "_by_start", "_by_stop", "_cut", "_cut_stop", "_last", "_released", "length")

    def __init__(self, length: int = 0) -> None:
        #: Where the space ends; bytes.
        self.length = 0
        #: The free ranges that touch no other one, in three orders.
        self._by_start: dict[int, Extent] = {}
        self._by_stop: dict[int, Extent] = {}
        self._by_size: list[tuple[int, int]] = []
        #: The rest of the range that was cut last, from where to where; nothing uses it.
        self._cut = self._cut_stop = 0
        #: What was released and not coalesced yet, by size.
        self._released: dict[int, list[Extent]] = {}
        #: What was handed out or coalesced last: in the midst of a change, nothing else may know of its fences.
        self._last = Extent(0, 0)
        if length:
            self.grow(length)

    @property
    def free_bytes(self) -> int:
        """The sum of all free ranges; bytes."""
        released = sum(nbytes * len(extents) for nbytes, extents in self._released.items())
        return released + sum(nbytes for nbytes, _ in self._by_size) + self._cut_stop - self._cut

    @property
    def free_at_end(self) -> int:
        """How much of the next request the end of the space could serve already, in bytes."""
        self._coalesce(pending=True)
        last = self._by_stop.get(self.length)
        return 0 if last is None else last.nbytes

    @property
    def fences(self) -> tuple[Fence, ...]:
        """The uses that are not over of what is free or was handed out last."""
        extents = [self._last, *self._by_start.values(), *[one for same in self._released.values() for one in same]]
        return _pending(fence for extent in extents for fence in extent.fences)

    def smallest_free(self, nbytes: int) -> int | None:
        """The size of the smallest free range that holds ``nbytes``, in bytes."""
        if self._released.get(nbytes):
            return nbytes
        self._coalesce()
        at = bisect_left(self._by_size, (nbytes,))
        sizes = [size for size, extents in self._released.items() if size >= nbytes and extents]
        return min([*sizes, *[size for size, _ in self._by_size[at : at + 1]]], default=None)

    def is_at_rest(self, start: int, nbytes: int) -> bool:
        """Whether a range between two gaps is free as a whole and no use of it goes on."""
        self._coalesce()
        free = self._by_start.get(start)
        return free is not None and free.nbytes == nbytes and not _pending(free.fences)

    def grow(self, nbytes: int, *, gap: int = 0) -> int:
        """Adds ``nbytes`` free bytes at the end and returns where they start.

        Args:
            gap: bytes to leave out before them; the new range is never coalesced with what lies before a gap.
        """
        assert nbytes > 0
        assert gap >= 0
        start = self.length + gap
        self._put_back()
        self._insert(Extent(start, nbytes))
        self.length = start + nbytes
        return start

    def withdraw(self, start: int, nbytes: int) -> None:
        """Takes a range out of the space for good; it has to be at rest."""
        assert self.is_at_rest(start, nbytes), "only a whole free range can be withdrawn"
        self._remove(self._by_start[start])

    def allocate(self, nbytes: int) -> Extent | None:
        """``nbytes`` bytes and the fences to wait for before writing them, of which one may have passed.

        Returns:
            ``None`` if no range is large enough.
        """
        assert nbytes > 0
        same_size = self._released.get(nbytes)
        if same_size:
            found = self._last = same_size[-1]
            same_size.pop()
            if len(found.fences) > 1:  # so that those that have passed do not add up
                return Extent(found.start, nbytes, _pending(found.fences))
            return found
        at, cut, rest = bisect_left(self._by_size, (nbytes,)), self._cut, self._cut_stop - self._cut
        if rest >= nbytes and (at == len(self._by_size) or (rest, cut) < self._by_size[at]):
            self._cut = cut + nbytes
            return Extent(cut, nbytes)
        if not self._fits(nbytes):
            self._coalesce()
        if not self._fits(nbytes):
            larger = min([size for size, extents in self._released.items() if size > nbytes and extents], default=0)
            if larger:
                whole = self._last = self._released[larger][-1]
                self._released[larger].pop()
                self.release(Extent(whole.start + nbytes, larger - nbytes, whole.fences))
                return Extent(whole.start, nbytes, _pending(whole.fences))
            self._coalesce(pending=True)
            if not self._fits(nbytes):
                return None
        free = self._last = self._by_start[self._by_size[bisect_left(self._by_size, (nbytes,))][1]]
        self._remove(free)
        fences = _pending(free.fences)
        if fences:
            if free.nbytes > nbytes:
                self._add(Extent(free.start + nbytes, free.nbytes - nbytes, fences))
        else:
            self._put_back()
            self._cut, self._cut_stop = free.start + nbytes, free.stop
        return Extent(free.start, nbytes, fences)

    def release(self, extent: Extent) -> None:
        """Takes back a range, or a part of one, that was handed out, with what has to be over before it is written."""
        assert extent.nbytes > 0
        assert 0 <= extent.start <= self.length - extent.nbytes
        self._released.setdefault(extent.nbytes, []).append(extent)

    def free_but_for(self, taken: Iterable[Extent], ranges: Iterable[Extent]) -> Extents:
        """New extents of the same length: what is free in them are ``ranges``, but for what is ``taken``.

        All of it waits for each fence that is known here.
        """
        extents, fences = Extents(), self.fences
        extents.length = self.length
        starts = sorted(taken)
        for whole in ranges:
            at = whole.start
            for extent in starts[bisect_left(starts, (at,)) : bisect_left(starts, (whole.stop,))]:
                if extent.start > at:
                    extents.release(Extent(at, extent.start - at, fences))
                at = extent.stop
            if whole.stop > at:
                extents.release(Extent(at, whole.stop - at, fences))
        return extents

    def _fits(self, nbytes: int) -> bool:
        return bool(self._by_size) and self._by_size[-1][0] >= nbytes

    def _coalesce(self, *, pending: bool = False) -> None:
        """Joins what was released with its free neighbours, once nothing uses it any more, or all of it."""
        self._put_back()
        loose, left = [], {}
        for nbytes, extents in self._released.items():
            for at, (start, _, fences) in enumerate(extents):
                uses = _pending(fences) if fences else ()
                if uses and not pending:  # later ones are in use for longer, and each question is a call of the driver
                    left[nbytes] = extents[at:]
                    break
                loose.append((start, nbytes, uses))
        joined: list[Extent] = []
        first = last = 0
        for start, nbytes, uses in sorted(loose, key=_START):  # a step's neighbours go in as one
            if start == last and not uses and first < last:
                last += nbytes
                continue
            if first < last:
                joined.append(Extent(first, last - first))
            first, last = start, start + nbytes
            if uses:
                joined.append(Extent(start, nbytes, uses))
                first = last
        if first < last:
            joined.append(Extent(first, last - first))
        for extent in joined:
            self._insert(extent)
        self._released = left

    def _insert(self, extent: Extent) -> None:
        """Puts a free range in its place, together with its free neighbours."""
        assert extent.start not in self._by_start, "a range was released twice"
        assert extent.stop not in self._by_stop, "a range was released twice"
        before, after = self._by_stop.get(extent.start), self._by_start.get(extent.stop)
        for other in (before, after):
            if other is not None:
                nbytes = extent.nbytes + other.nbytes
                fences = _pending(extent.fences + other.fences)
                extent = self._last = Extent(min(extent.start, other.start), nbytes, fences)
                self._remove(other)
        self._add(extent)

    def _put_back(self) -> None:
        """Puts the rest of the range that was cut last among the others."""
        if self._cut < self._cut_stop:
            rest = Extent(self._cut, self._cut_stop - self._cut)
            self._cut = self._cut_stop
            self._insert(rest)

    def _add(self, extent: Extent) -> None:
        self._by_start[extent.start] = self._by_stop[extent.stop] = extent
        insort(self._by_size, (extent.nbytes, extent.start))

    def _remove(self, extent: Extent) -> None:
        del self._by_size[bisect_left(self._by_size, (extent.nbytes, extent.start))]
        del self._by_start[extent.start], self._by_stop[extent.stop]


def _pending(fences: Iterable[Fence]) -> tuple[Fence, ...]:
    """The fences that have not passed, each once."""
    return tuple([fence for fence in dict.fromkeys(fences) if not fence.passed()])
