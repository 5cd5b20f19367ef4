"""Tiers to test, and exact bytes to put into them."""

from __future__ import annotations

import weakref
from collections.abc import Hashable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from eager_offload.tiers.base import Fence, Slot, Tier
from eager_offload.tiers.disk import DiskTier
from eager_offload.tiers.memory import anonymous_slab
from tests.tiers.files import Watched

MIB = 1 << 20


def noise(nbytes: int, seed: int = 0) -> Tensor:
    return torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def reserve(tier: Tier, nbytes: int) -> Any:
    """A slot of the tier's own class, which has to have room for it."""
    slot = tier.reserve(nbytes)
    assert slot is not None
    return slot


def stored(tier: Tier, source: Tensor) -> Any:
    slot = reserve(tier, source.numel())
    slot.write(source)
    return slot


def content(slot: Slot) -> Tensor:
    target = torch.zeros(slot.nbytes, dtype=torch.uint8)
    slot.read(target)
    return target


def open_tier(
    directory: Path, file_type: type[Watched] = Watched, budget: int = 256 * MIB, *, verify: bool = False
) -> tuple[DiskTier, Watched]:
    tier = DiskTier([directory], budget, verify=verify, file_type=file_type)
    return tier, Watched.opened[-1]


class Verdicts:
    """Answers what a fence asks of a runtime: its event completes when a test says so."""

    def __init__(self) -> None:
        self.over: set[Hashable] = set()

    def query(self, event: Hashable) -> bool:
        return event in self.over

    def fence(self, event: Hashable) -> Fence:
        return Fence(self, event)


class System:
    """What an arena takes its memory from: counts slabs, watches them go, and refuses when a test says so."""

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
