"""An interrupt while room is handed out: the range comes back the next time, with the fences that it had."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from eager_offload.tiers.arena import Arena, HostSlot
from eager_offload.tiers.disk import DiskSlot, DiskTier
from eager_offload.tiers.extents import Extents
from tests.tiers.files import Watched
from tests.tiers.rig import MIB, content, interrupted, noise, open_tier, reserve, stored
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


@pytest.mark.parametrize("several", [1, 2])
def test_h10_a_file_that_grew_into_an_interrupt_is_used_all_the_same(several: int, directory: Path) -> None:
    class Interrupted(Watched):
        interrupt = False

        def allocate(self, offset: int, nbytes: int) -> None:
            super().allocate(offset, nbytes)
            if self.interrupt:
                raise KeyboardInterrupt

    tier = DiskTier([directory] * several, 512 * MIB, file_type=Interrupted)
    files = list(Watched.opened)
    for file in files:
        assert isinstance(file, Interrupted)
        file.interrupt = True
        with pytest.raises(KeyboardInterrupt):
            tier.reserve(10 * MIB)
        file.interrupt = False
    assert tier.held_bytes == 0
    slot = stored(tier, noise(10 * MIB))
    assert tier.held_bytes == sum(file.stat.st_size for file in files) == 64 * MIB * several
    assert torch.equal(content(slot), noise(10 * MIB))


def test_h10_an_interrupt_between_the_files_and_the_room_in_them_loses_no_room(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier, file = open_tier(directory)
    with monkeypatch.context() as patch:

        def interrupt(self: Extents, nbytes: int, *, gap: int = 0) -> int:
            raise KeyboardInterrupt

        patch.setattr(Extents, "grow", interrupt)
        with pytest.raises(KeyboardInterrupt):
            tier.reserve(10 * MIB)
    assert tier.held_bytes == 64 * MIB
    slot = stored(tier, noise(60 * MIB))
    assert tier.held_bytes == file.stat.st_size == 64 * MIB
    assert torch.equal(content(slot), noise(60 * MIB))
