"""The system that an arena takes its memory from, under a test's eyes."""

from __future__ import annotations

import weakref

from torch import Tensor

from eager_offload.tiers.arena import anonymous_slab


class System:
    """Hands out slabs, counts them, watches them go, and refuses when told to."""

    def __init__(self) -> None:
        self.sizes: list[int] = []
        self.alive: weakref.WeakSet[Tensor] = weakref.WeakSet()
        self.refuse = False

    def __call__(self, nbytes: int) -> Tensor:
        if self.refuse:
            raise MemoryError("none left")
        slab = anonymous_slab(nbytes)
        self.sizes.append(nbytes)
        self.alive.add(slab)
        return slab
