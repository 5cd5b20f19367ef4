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

    [Note: interrupted halfway]
    What is free is what ``_by_start`` and ``_recent`` say. They change last, in statements without a call between them,
    where no KeyboardInterrupt can come; the indexes over ``_by_start`` change before, and are made anew where that was
    interrupted. An owner that does as much after ``allocate`` or before ``release`` returns loses no range.
    """

    __slots__ = ("_by_size", "_by_start", "_by_stop", "_indexed", "_recent", "free_bytes", "length")

    def __init__(self, length: int = 0) -> None:
        #: Where the space ends; bytes.
        self.length = 0
        #: The sum of all free ranges; bytes.
        self.free_bytes = 0
        self._by_start: dict[int, _Free] = {}
        self._by_stop: dict[int, int] = {}
        self._by_size: list[tuple[int, int]] = []
        self._recent: dict[int, list[Extent]] = {}
        #: Whether the indexes agree with ``_by_start``.
        self._indexed = True
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
        if not self._indexed:
            self._index_anew()
        start = self.length + gap
        self._insert(start, nbytes, [], [])
        self.free_bytes += nbytes
        self.length = start + nbytes
        return start

    def withdraw(self, start: int, nbytes: int) -> None:
        """Takes a range out of the space for good; it has to be free, and bounded by gaps or by the ends."""
        self._melt()
        assert self._by_start[start].nbytes == nbytes, "only a whole free range can be withdrawn"
        self._indexed = False
        self._unindex(start, nbytes)
        del self._by_start[start]
        self.free_bytes -= nbytes
        self._indexed = True

    def allocate(self, nbytes: int) -> Extent | None:
        """``nbytes`` bytes and the fences to wait for before writing them, or ``None`` if no range is large enough."""
        assert nbytes > 0
        recent = self._recent.get(nbytes)
        if recent:
            start, _, fences = recent[-1]
            passing = tuple([fence for fence in fences if not fence.passed()]) if fences else ()
            extent = Extent(start, nbytes, passing)
            del recent[-1]
            self.free_bytes -= nbytes
            return extent
        if not self._indexed:
            self._index_anew()
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
        extent = Extent(start, nbytes, _unique(use for use in free.uses if use.start < stop) if free.uses else ())
        rest: _Free | None = None
        if free.nbytes > nbytes:
            # A use that reaches over the cut guards both sides.
            rest = _Free(free.nbytes - nbytes, [use for use in free.uses if use.stop > stop])
            rest.prune_at = free.prune_at
        self._indexed = False
        self._unindex(start, free.nbytes)
        if rest is not None:
            self._index(stop, rest.nbytes)
            self._by_start[stop] = rest
        del self._by_start[start]
        self.free_bytes -= nbytes
        self._indexed = True
        return extent

    def release(self, start: int, nbytes: int, fences: Iterable[Fence] = ()) -> None:
        """Takes back a range, or a part of one, that was handed out.

        Args:
            fences: what has to be over before these bytes are written again.
        """
        assert nbytes > 0
        assert 0 <= start <= self.length - nbytes
        extent = Extent(start, nbytes, tuple(fences))
        recent = self._recent.get(nbytes)
        self.free_bytes += nbytes
        if recent is None:
            self._recent[nbytes] = [extent]
        else:
            recent += [extent]

    def fences(self, start: int) -> tuple[Fence, ...]:
        """What is not over yet of the free range that begins at ``start``, if there is one."""
        self._melt()
        free = self._by_start.get(start)
        return () if free is None else _unique(free.uses)

    def _melt(self) -> None:
        """Joins what was released lately with its free neighbours."""
        if not self._indexed:
            self._index_anew()
        while self._recent:
            nbytes, extents = next(iter(self._recent.items()))
            while extents:
                start, _, fences = extents[-1]
                self._insert(start, nbytes, [_Use(start, start + nbytes, fence) for fence in fences], extents)
            del self._recent[nbytes]

    def _insert(self, start: int, nbytes: int, uses: list[_Use], source: list[Extent]) -> None:
        """Puts a range in its place, from the end of ``source`` if that is not empty."""
        stop = start + nbytes
        assert start not in self._by_start, "a range was released twice"
        assert stop not in self._by_stop, "a range was released twice"
        left = self._by_stop.get(start)
        before, after = None if left is None else self._by_start[left], self._by_start.get(stop)
        free = _Free(nbytes, uses)
        self._indexed = False
        if left is not None and before is not None:
            free = _Free(before.nbytes + nbytes, before.uses + uses)
            free.prune_at = before.prune_at
            self._unindex(left, before.nbytes)
        if after is not None:
            free.nbytes += after.nbytes
            free.uses = free.uses + after.uses
            self._unindex(stop, after.nbytes)
        if len(free.uses) >= free.prune_at:
            free.prune()
        self._index(start if left is None else left, free.nbytes)
        # See [Note: interrupted halfway]: no call from here on.
        self._by_start[start if left is None else left] = free
        if after is not None:
            del self._by_start[stop]
        if source:
            del source[-1]
        self._indexed = True

    def _index(self, start: int, nbytes: int) -> None:
        insort(self._by_size, (nbytes, start))
        self._by_stop[start + nbytes] = start

    def _unindex(self, start: int, nbytes: int) -> None:
        del self._by_stop[start + nbytes]
        del self._by_size[bisect_left(self._by_size, (nbytes, start))]

    def _index_anew(self) -> None:
        self._by_stop = {start + free.nbytes: start for start, free in self._by_start.items()}
        self._by_size = sorted((free.nbytes, start) for start, free in self._by_start.items())
        self._indexed = True


def _unique(uses: Iterable[_Use]) -> tuple[Fence, ...]:
    """The fences that have not passed, each once."""
    return tuple(fence for fence in dict.fromkeys(use.fence for use in uses) if not fence.passed())
