"""Which bytes of a space are free: a best-fit allocator over numbers alone, no memory, no locks."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable
from typing import NamedTuple

from eager_offload.tiers.base import Fence

__all__ = ["Extent", "Extents"]


class Extent(NamedTuple):
    """A range that was handed out, with the earlier uses of its bytes that are not over yet."""

    start: int
    nbytes: int
    fences: tuple[Fence, ...]


class _Use(NamedTuple):
    """One fence and the bytes that it guards."""

    start: int
    stop: int
    fence: Fence


#: A free range keeps its fences without asking whether they have passed until it has this many, and twice as many as
#: were left the last time: asking costs a call into the driver each, and every merge would repeat it.
_PRUNE_AT = 16


class _Free:
    """A free range that touches no other one."""

    __slots__ = ("nbytes", "prune_at", "uses")

    def __init__(self, nbytes: int, uses: list[_Use]) -> None:
        self.nbytes = nbytes
        self.uses = uses
        self.prune_at = _PRUNE_AT

    def prune(self) -> None:
        self.uses = [use for use in self.uses if not use.fence.passed()]
        self.prune_at = max(_PRUNE_AT, 2 * len(self.uses))


class Extents:
    """The free ranges of ``[0, length)``, in bytes.

    A request takes the start of the smallest range that holds it (the lowest of several), what is released melts
    together with its free neighbours. Fences stay with the exact bytes that they were released with, so that a request
    waits for the last users of its own bytes and for nobody else: otherwise one reload at the end of a long free
    range would hold up every offload into it.

    A training step asks for the sizes of the step before. So ranges that were released lately are kept as they are,
    by size, and serve the next request of the same size without a search; they melt together with their neighbours as
    soon as any other request finds no room, or someone asks about the free ranges.

    Not thread-safe: the owner has a lock anyway.
    """

    __slots__ = ("_by_size", "_by_start", "_by_stop", "_recent", "free_bytes", "length")

    def __init__(self, length: int = 0) -> None:
        #: Where the space ends; bytes.
        self.length = 0
        #: The sum of all free ranges; bytes.
        self.free_bytes = 0
        self._by_start: dict[int, _Free] = {}
        self._by_stop: dict[int, int] = {}
        self._by_size: list[tuple[int, int]] = []
        self._recent: dict[int, list[Extent]] = {}
        if length:
            self.grow(length)

    @property
    def largest_free(self) -> int:
        """The largest request that can be met, in bytes."""
        self._melt()
        return self._by_size[-1][0] if self._by_size else 0

    @property
    def free_at_end(self) -> int:
        """How much of the next request the end of the space could serve already, in bytes."""
        self._melt()
        last = self._by_stop.get(self.length)
        return 0 if last is None else self.length - last

    def grow(self, nbytes: int, *, gap: int = 0) -> int:
        """Adds ``nbytes`` free bytes at the end and returns where they start.

        Args:
            gap: bytes to leave out before them; the new range never melts together with what lies before a gap.
        """
        assert nbytes > 0
        assert gap >= 0
        start = self.length + gap
        self.length = start + nbytes
        self._insert(start, nbytes, [])
        return start

    def withdraw(self, start: int, nbytes: int) -> None:
        """Takes a range out of the space for good; it has to be free, and bounded by gaps or by the ends."""
        self._melt()
        free = self._take(start)
        assert free.nbytes == nbytes, "only a whole free range can be withdrawn"

    def allocate(self, nbytes: int) -> Extent | None:
        """``nbytes`` bytes and the fences to wait for before writing them, or ``None`` if no range is large enough."""
        assert nbytes > 0
        recent = self._recent.get(nbytes)
        if recent:
            start, _, fences = recent[-1]
            passing = tuple([fence for fence in fences if not fence.passed()]) if fences else ()
            recent.pop()
            self.free_bytes -= nbytes
            return Extent(start, nbytes, passing)
        at = bisect_left(self._by_size, (nbytes,))
        if at == len(self._by_size):
            if not self._recent:
                return None
            self._melt()
            at = bisect_left(self._by_size, (nbytes,))
            if at == len(self._by_size):
                return None
        start = self._by_size[at][1]
        stop = start + nbytes
        free = self._by_start[start]
        # Asked while the range is still in its place: that calls into the driver, where an interrupt may come.
        fences = _unique(use for use in free.uses if use.start < stop) if free.uses else ()
        self._take(start)
        if free.nbytes > nbytes:
            # A use that reaches over the cut guards both sides.
            free.uses = [use for use in free.uses if use.stop > stop]
            free.nbytes -= nbytes
            self._put(stop, free)
        return Extent(start, nbytes, fences)

    def release(self, start: int, nbytes: int, fences: Iterable[Fence] = ()) -> None:
        """Takes back a range, or a part of one, that was handed out.

        Args:
            fences: what has to be over before these bytes are written again.
        """
        assert nbytes > 0
        assert 0 <= start <= self.length - nbytes
        self.free_bytes += nbytes
        extent = Extent(start, nbytes, tuple(fences))
        recent = self._recent.get(nbytes)
        if recent is None:
            self._recent[nbytes] = [extent]
        else:
            recent.append(extent)

    def fences(self, start: int) -> tuple[Fence, ...]:
        """What is not over yet of the free range that begins at ``start``."""
        self._melt()
        return _unique(self._by_start[start].uses)

    def _melt(self) -> None:
        """Joins what was released lately with its free neighbours."""
        if not self._recent:
            return
        recent, self._recent = self._recent, {}
        for extents in recent.values():
            for start, nbytes, fences in extents:
                self.free_bytes -= nbytes  # putting it in its place counts it again
                self._insert(start, nbytes, [_Use(start, start + nbytes, fence) for fence in fences])

    def _insert(self, start: int, nbytes: int, uses: list[_Use]) -> None:
        stop = start + nbytes
        assert start not in self._by_start, "a range was released twice"
        assert stop not in self._by_stop, "a range was released twice"
        free = _Free(nbytes, uses)
        if (left := self._by_stop.get(start)) is not None:
            before = self._take(left)
            before.nbytes += nbytes
            before.uses += uses
            start, free = left, before
        if stop in self._by_start:
            after = self._take(stop)
            free.nbytes += after.nbytes
            free.uses += after.uses
        self._put(start, free)
        if len(free.uses) >= free.prune_at:
            free.prune()

    def _put(self, start: int, free: _Free) -> None:
        self._by_start[start] = free
        self._by_stop[start + free.nbytes] = start
        insort(self._by_size, (free.nbytes, start))
        self.free_bytes += free.nbytes

    def _take(self, start: int) -> _Free:
        free = self._by_start.pop(start)
        del self._by_stop[start + free.nbytes]
        del self._by_size[bisect_left(self._by_size, (free.nbytes, start))]
        self.free_bytes -= free.nbytes
        return free


def _unique(uses: Iterable[_Use]) -> tuple[Fence, ...]:
    """The fences that have not passed, each once."""
    return tuple(fence for fence in dict.fromkeys(use.fence for use in uses) if not fence.passed())
