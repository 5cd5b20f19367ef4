"""What holds for every tier: exact bytes, no byte in two slots, and room that comes back with its fences."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from eager_offload.tiers.arena import Arena
from eager_offload.tiers.base import Tier
from eager_offload.tiers.disk import DiskTier
from eager_offload.tiers.host import HostTier
from eager_offload.tiers.memory import anonymous_slab
from tests.threads import collect, on_threads
from tests.tiers.files import Cached, Watched
from tests.tiers.rig import MIB, Verdicts, content, noise, reserve, stored


class Made:
    """A tier, and what a test does in the midst of its next call to the system, with its lock held."""

    def __init__(self, kind: str, directory: Path) -> None:
        self.meanwhile: Callable[[], object] = lambda: None
        made = self

        class Meeting(Cached if kind == "page cache" else Watched):  # type: ignore[misc]
            def allocate(self, offset: int, nbytes: int) -> None:
                made.meanwhile()
                super().allocate(offset, nbytes)

        def allocate(nbytes: int) -> Tensor:
            made.meanwhile()
            return anonymous_slab(nbytes)

        self.tier: Tier
        if kind == "host":
            self.tier = HostTier(Arena(allocate, slab_bytes=MIB, idle_bytes=MIB), 256 * MIB)
        else:
            several = 2 if kind == "two disks" else 1
            self.tier = DiskTier([directory] * several, 256 * MIB, file_type=Meeting)


@pytest.fixture(params=["host", "disk", "page cache", "two disks"])
def made(request: pytest.FixtureRequest, directory: Path) -> Made:
    return Made(request.param, directory)


@pytest.fixture
def tier(made: Made) -> Tier:
    return made.tier


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
    assert bytes(slot.memory()) == source.numpy().tobytes()


def test_slots_that_live_together_share_no_byte(tier: Tier) -> None:
    chance = random.Random(0)
    slots: list[tuple[Any, Tensor]] = []
    for seed in range(100):
        if slots and chance.random() < 0.4:
            slot, source = slots.pop(chance.randrange(len(slots)))
            assert torch.equal(content(slot), source)
            del slot
        source = noise(chance.choice([1, 100, 4096, 5000, 70_000, 600_000, 4 * MIB + 1]), seed)
        slots.append((stored(tier, source), source))
    assert all(torch.equal(content(slot), source) for slot, source in slots)
    assert tier.used_bytes == sum(source.numel() for _, source in slots) > MIB
    assert len({slot.region for slot, _ in slots}) == len(slots)
    slots.clear()
    assert tier.used_bytes == 0


def test_threads_that_transfer_at_once_keep_their_bytes(tier: Tier) -> None:
    def work(seed: int) -> None:
        chance = random.Random(seed)
        for step in range(15):
            source = noise(chance.choice([100, 5000, 70_000, 700_000, 4 * MIB + 64]), 1000 * seed + step)
            assert torch.equal(content(stored(tier, source)), source), (seed, step)

    on_threads(5, work)
    assert tier.used_bytes == 0


def test_h18_a_slot_carries_the_fences_of_its_range(tier: Tier) -> None:
    verdicts = Verdicts()
    slot = reserve(tier, 600_000)
    slot.fences += (verdicts.fence("read"),)
    cycle: list[object] = [slot]
    cycle.append(cycle)
    del slot, cycle
    collect()
    heir = reserve(tier, 600_000)
    assert heir.fences == (verdicts.fence("read"),)
    del heir
    assert reserve(tier, 600_000).fences == (verdicts.fence("read"),), "an heir that was never used hands it on"
    verdicts.over.add("read")
    for number in range(5):
        slot = reserve(tier, 600_000)
        assert all(fence.passed() for fence in slot.fences)
        assert len(slot.fences) <= 1, "those that have passed do not add up"
        slot.fences += (verdicts.fence(number),)
        verdicts.over.add(number)
        del slot


def test_a_finalizer_that_runs_in_a_locked_section_does_not_deadlock(made: Made) -> None:
    doomed = [reserve(made.tier, 5000), reserve(made.tier, 5000)]
    called = []

    def meanwhile() -> None:
        called.append(len(doomed))
        doomed.clear()

    made.meanwhile = meanwhile
    slot = reserve(made.tier, 129 * MIB)
    assert called[0] == 2
    assert made.tier.used_bytes == slot.nbytes
