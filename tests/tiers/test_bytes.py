"""What holds for every tier: exact bytes, at any address, in as many slots and threads as there are."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from eager_offload.tiers.base import Tier
from eager_offload.tiers.memory import anonymous_slab
from tests.threads import on_threads
from tests.tiers.rig import MIB, Made, content, noise, reserve, stored


@pytest.fixture(params=["host", "disk", "page cache"])
def tier(request: pytest.FixtureRequest, directory: Path) -> Tier:
    return Made(request.param, directory).tier


@pytest.mark.parametrize("nbytes", [1, 4095, 4096, 4097, 70_001, 10 * MIB + 3])
def test_bytes_come_back_exact_from_and_to_any_address(tier: Tier, nbytes: int) -> None:
    slot = reserve(tier, nbytes)
    for offset in (0, 1, 7, 32, 63) if nbytes > MIB else range(0, 64, 3):
        source = anonymous_slab(nbytes + 64).copy_(noise(nbytes + 64, offset))[offset : offset + nbytes]
        slot.write(source)
        target = anonymous_slab(nbytes + 64)
        slot.read(target[offset : offset + nbytes])
        assert torch.equal(target[offset : offset + nbytes], source)
        assert not target[:offset].any()
        assert not target[offset + nbytes :].any(), "a transfer stays within its target"
    assert tier.used_bytes == nbytes
    memory = slot.memory()
    assert bytes(memory) == source.numpy().tobytes()
    slot.write(noise(nbytes, 64))
    assert bytes(memory) == noise(nbytes, 64).numpy().tobytes(), "it shows what is written later"


def test_threads_that_transfer_at_once_keep_their_bytes(tier: Tier) -> None:
    def work(seed: int) -> None:
        chance = random.Random(seed)
        for step in range(15):
            source = noise(chance.choice([100, 5000, 70_000, 700_000, 4 * MIB + 64]), 1000 * seed + step)
            assert torch.equal(content(stored(tier, source)), source), (seed, step)

    on_threads(5, work)
    assert tier.used_bytes == 0
