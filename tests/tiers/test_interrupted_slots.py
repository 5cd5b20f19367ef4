"""An interrupt while room is handed out: the range comes back the next time, with the fences that it had."""

from __future__ import annotations

from pathlib import Path

import pytest

from eager_offload.tiers.arena import Arena, HostSlot
from eager_offload.tiers.disk import DiskSlot
from tests.tiers.rig import MIB, interrupted, open_tier, reserve
from tests.tiers.system import System
from tests.tiers.verdicts import Verdicts


def test_h10_memory_that_was_handed_out_into_an_interrupt_comes_back_with_its_fences() -> None:
    system, verdicts = System(), Verdicts()
    arena = Arena(system, slab_bytes=MIB, idle_bytes=0)
    slot = arena.allocate(8192)
    assert slot is not None
    slot.fences += (verdicts.fence("reload"),)
    region = slot.region
    del slot
    with interrupted(HostSlot), pytest.raises(KeyboardInterrupt):
        arena.allocate(8192)
    assert arena.used_bytes == 0
    heir = arena.allocate(8192)
    assert heir is not None
    assert (heir.region, heir.fences) == (region, (verdicts.fence("reload"),))
    assert arena.used_bytes == 8192
    verdicts.over.add("reload")
    del heir
    arena.drain()
    assert not system.alive, "nothing of it is taken"


def test_h10_room_on_disk_that_was_handed_out_into_an_interrupt_comes_back_with_its_fences(directory: Path) -> None:
    verdicts = Verdicts()
    tier, _ = open_tier(directory)
    slot = reserve(tier, 10_000)
    slot.fences += (verdicts.fence("read"),)
    region = slot.region
    del slot
    with interrupted(DiskSlot), pytest.raises(KeyboardInterrupt):
        tier.reserve(10_000)
    assert tier.used_bytes == 0
    heir = reserve(tier, 10_000)
    assert (heir.region, heir.fences) == (region, (verdicts.fence("read"),))
    assert tier.used_bytes == 10_000
