"""Which bytes of a slab are free, for host memory and for spill files alike."""

from __future__ import annotations

import itertools
from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from operator import attrgetter
from typing import Generic, TypeVar

from eager_offload.tiers.base import Fence

_serial = itertools.count()


class Slab:
    """Bytes from the system, of which ranges are cut."""

    __slots__ = ("nbytes", "serial")

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self.serial = next(_serial)


S = TypeVar("S", bound=Slab)


@dataclass(slots=True, eq=False)
class Range(Generic[S]):
    """Bytes of a slab, with the earlier uses of them that may not be over yet; a slot has it, or ``Ranges``."""

    slab: S
    start: int
    nbytes: int
    fences: tuple[Fence, ...] = ()


#: By slab and start, in C.
_place = attrgetter("slab.serial", "start")


class Ranges(Generic[S]):
    """The free ranges of slabs. Not thread-safe: the lock of its owner guards it.

    [Note: which bytes a request gets]
    A training step asks for the sizes of the step before. So a range that comes back is kept as it is, by size, with
    the uses of it that may not be over. A request takes

    1. the range of exactly its size that came back last: ``back[nbytes][-1]``;
    2. else a part of the smallest free range that holds it and that nothing uses (the first of several);
    3. else the same, once ranges that came back and whose uses are over have been joined with their neighbours;
    4. else a part of the smallest range that is still in use: it waits for the uses of that range alone. If all were
       joined first, one reload at the end of a long free range would hold up every offload into it;
    5. else the same, once all that is free has been joined, whether it is in use or not.

    ``fit`` makes 2 to 5 a case of 1. The owner pops the range once its new owner is written down: until then an
    interrupt could lose the uses of it.
    """

    __slots__ = ("_free", "back")

    def __init__(self) -> None:
        #: What came back and was not joined yet, by size. The owner appends what comes back, and what is new.
        self.back: defaultdict[int, list[Range[S]]] = defaultdict(list)
        #: What nothing uses, in order: size, serial number of the slab, start.
        self._free: list[tuple[int, int, int, Range[S]]] = []

    @property
    def fences(self) -> tuple[Fence, ...]:
        """The uses that are not over of what is free."""
        return pending([fence for same in self.back.values() for one in same for fence in one.fences])

    def fit(self, nbytes: int) -> list[Range[S]]:
        """Returns ``back[nbytes]``, where a range that was found for it is the last; empty if none is large enough."""
        for joined in ("nothing", "what is at rest", "all"):
            if joined != "nothing":
                self.join(used=joined == "all")
            same, at = self.back[nbytes], bisect_left(self._free, (nbytes,))
            if at < len(self._free):
                same.append(self._free.pop(at)[3])
            elif joined == "nothing":
                continue
            elif sizes := [size for size, others in self.back.items() if size >= nbytes and others]:
                same.append(self.back[min(sizes)].pop())
            else:
                continue
            one = same[-1]
            if one.nbytes > nbytes:
                rest = Range(one.slab, one.start + nbytes, one.nbytes - nbytes, one.fences)
                if one.fences:
                    self.back[rest.nbytes].append(rest)
                else:
                    insort(self._free, (rest.nbytes, rest.slab.serial, rest.start, rest))
                one.nbytes = nbytes
            return same
        return []

    def free_before(self, stop: int) -> int:
        """Returns the bytes that are free right before ``stop`` of the only slab, where ``fit`` has found no range."""
        free = [one for same in self.back.values() for one in same] + [one for *_, one in self._free]
        return max([one.nbytes for one in free if one.start + one.nbytes == stop], default=0)

    def withdraw(self, slab: S) -> bool:
        """Takes out a slab that is free as a whole, if nothing uses it; after a ``join``."""
        at = bisect_left(self._free, (slab.nbytes, slab.serial))
        if at == len(self._free) or self._free[at][:2] != (slab.nbytes, slab.serial):
            return False
        del self._free[at]
        return True

    def join(self, *, used: bool = False) -> None:
        """Joins what came back with its free neighbours, if its uses are over; or whether they are or not."""
        left, found = defaultdict[int, list[Range[S]]](list), list[Range[S]]()
        for nbytes, same in self.back.items():
            for at, one in enumerate(same):
                if one.fences and not used:
                    one.fences = pending(one.fences)
                    if one.fences:  # later ones are in use for longer, and each question is a call of the driver
                        left[nbytes] = same[at:]
                        break
                found.append(one)
        if not found:
            return
        joined = list[Range[S]]()
        for one in sorted([*found, *[free for *_, free in self._free]], key=_place):
            before = joined[-1] if joined else None
            if before is not None and before.slab is one.slab and before.start + before.nbytes == one.start:
                before.nbytes += one.nbytes
                before.fences += one.fences
            else:
                assert before is None or before.slab is not one.slab or before.start + before.nbytes < one.start, (
                    "twice"
                )
                joined.append(one)
        for one in joined:
            if one.fences:
                one.fences = pending(one.fences)
                if one.fences:
                    left[one.nbytes].append(one)
        self._free = sorted([(one.nbytes, one.slab.serial, one.start, one) for one in joined if not one.fences])
        self.back = left


def pending(fences: Iterable[Fence]) -> tuple[Fence, ...]:
    """Returns the fences that have not passed, each once."""
    return tuple([fence for fence in dict.fromkeys(fences) if not fence.passed()])
