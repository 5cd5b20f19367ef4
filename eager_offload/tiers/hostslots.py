"""What an arena hands out: slots and leases, and how they come back."""

from __future__ import annotations

import weakref
from collections import deque
from typing import ClassVar, NamedTuple

from torch import Tensor

from eager_offload.tiers.base import Fence, Region, Shortage, Slot
from eager_offload.tiers.extents import Extent
from eager_offload.tiers.memory import move, view_of
from eager_offload.tiers.slabs import Slab

__all__ = ["HostSlot", "Lease", "Remains", "Returns", "Share"]


class Share:
    """What one tier holds of an arena, and the most that it may hold; the arena's lock guards it. All in bytes.

    Args:
        budget: the most.
        pooled: shares that are pooled may come to the largest of their budgets together. Those that are not add up.
    """

    __slots__ = ("__weakref__", "budget", "held_bytes", "pooled", "refusal", "used_bytes")

    def __init__(self, budget: int, *, pooled: bool) -> None:
        self.budget = budget
        self.pooled = pooled
        self.reset()

    def reset(self) -> None:
        """Forgets the slots that there are."""
        #: In slots that are alive, as they were asked for; and with rounding.
        self.used_bytes = self.held_bytes = 0
        #: Why it was last given nothing, if it was not for its budget.
        self.refusal: Shortage | None = None


class Remains(NamedTuple):
    """What a slot leaves behind."""

    slab: Slab
    start: int
    held: int
    nbytes: int
    fences: tuple[Fence, ...]
    share: Share | None


class Lease(weakref.ref[memoryview]):
    """Watches the view that a leased tensor's storage holds, and owns the slot under it."""

    __slots__ = ("slot",)
    slot: HostSlot
    # By identity: a weak reference hashes what it refers to, and a writable memoryview has no hash.
    __hash__ = object.__hash__
    __eq__ = object.__eq__


class Returns:
    """Where slots and leases end up; see [Note: slots give themselves back] in ``tiers/base.py``."""

    __slots__ = ("leases", "slots")

    def __init__(self) -> None:
        self.slots: deque[Remains] = deque()
        self.leases: deque[weakref.ref[memoryview]] = deque()


class HostSlot(Slot):
    """``nbytes`` bytes of host memory, at a multiple of 4096 (of 64 where there are fewer than 4096 of them)."""

    tier: ClassVar[str] = "host"
    __slots__ = ("_returns", "_share", "_slab", "_start", "held")
    #: Bytes with rounding. Set when it is handed out; one without was lost to an interrupt before, and gives nothing
    #: back.
    held: int

    def __init__(self, slab: Slab, extent: Extent, nbytes: int, returns: Returns, share: Share | None) -> None:
        super().__init__(nbytes, extent.fences)
        self._slab = slab
        #: Within the slab; bytes.
        self._start = extent.start - slab.start
        self._returns = returns
        self._share = share

    @property
    def address(self) -> int:
        """Where the bytes are; a slot does not move."""
        return self._slab.address + self._start

    @property
    def tensor(self) -> Tensor:
        """The bytes as a flat ``uint8`` CPU tensor, for copies by a stream; it does not keep the slot alive."""
        return self._slab.tensor[self._start : self._start + self.nbytes]

    @property
    def region(self) -> Region:
        return Region(("host slab", self._slab.serial), self._start, self._start + self.nbytes)

    def write(self, source: Tensor) -> None:
        assert source.numel() == self.nbytes
        move(self.address, source.data_ptr(), self.nbytes)

    def read(self, target: Tensor) -> None:
        assert target.numel() == self.nbytes
        move(target.data_ptr(), self.address, self.nbytes)

    def memory(self) -> memoryview:
        return view_of(self.address, self.nbytes, self)

    def view(self) -> memoryview:
        """The bytes as a buffer that keeps the slab, but not the slot."""
        return self._slab.buffer[self._start : self._start + self.nbytes]

    def __del__(self) -> None:
        try:
            remains = Remains(self._slab, self._start, self.held, self.nbytes, self.fences, self._share)
        except AttributeError:
            return
        self._returns.slots.append(remains)
