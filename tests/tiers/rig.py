"""Tiers to test, and exact bytes to put into them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch import Tensor

from eager_offload.tiers.base import Slot
from eager_offload.tiers.disk import DiskSlot, DiskTier
from tests.tiers.files import Watched

MIB = 1 << 20


def noise(nbytes: int, seed: int = 0) -> Tensor:
    return torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def reserve(tier: DiskTier, nbytes: int) -> DiskSlot:
    slot = tier.reserve(nbytes)
    assert slot is not None
    return slot


def stored(tier: DiskTier, source: Tensor) -> DiskSlot:
    slot = reserve(tier, source.numel())
    slot.write(source)
    return slot


def content(slot: DiskSlot) -> Tensor:
    target = torch.zeros(slot.nbytes, dtype=torch.uint8)
    slot.read(target)
    return target


def open_tier(
    directory: Path, file_type: type[Watched] = Watched, budget: int = 256 * MIB, *, verify: bool = False
) -> tuple[DiskTier, Watched]:
    tier = DiskTier([directory], budget, verify=verify, file_type=file_type)
    return tier, Watched.opened[-1]


@contextmanager
def interrupted(kind: type[Slot]) -> Iterator[None]:
    """Within it, a KeyboardInterrupt comes when a slot has been made and nobody has it yet."""
    make = kind.__init__

    def make_and_interrupt(*arguments: object) -> None:
        make(*arguments)  # type: ignore[arg-type]
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kind, "__init__", make_and_interrupt)
        yield
