"""The disk tier: exact bytes, within its room, through a real file."""

from __future__ import annotations

import gc
import os
from pathlib import Path

import pytest
import torch

from eager_offload.errors import CapacityError
from eager_offload.tiers.arena import anonymous_slab
from eager_offload.tiers.disk import DiskTier
from eager_offload.tiers.memory import PAGE
from tests.tiers.files import Cached, Halting, Picky, Watched
from tests.tiers.rig import MIB, content, noise, open_tier, reserve, stored


@pytest.mark.parametrize("file_type", [Watched, Cached])
def test_h27_the_page_cache_keeps_nothing_even_where_direct_io_is_refused(
    directory: Path, file_type: type[Watched]
) -> None:
    tier, file = open_tier(directory, file_type)
    source = noise(40 * MIB + 5)
    slot = stored(tier, source)
    assert file.written >= source.numel()
    assert file.cached_pages() == 0
    assert torch.equal(content(slot), source)
    assert file.cached_pages() == 0


def test_h27_a_device_that_asks_for_more_alignment_than_the_probe_found_gets_it(directory: Path) -> None:
    tier, file = open_tier(directory, Picky)
    source = anonymous_slab(MIB + 512)[512:].copy_(noise(MIB))
    slot = stored(tier, source)
    again = stored(tier, source)
    assert file.refused <= 1
    assert torch.equal(content(slot), source)
    assert torch.equal(content(again), source)
    assert file.written >= 2 * MIB


@pytest.mark.parametrize("lengths", [(4096,), (8192, 0, 0), (4097,), (5000, 1, 12_288), (1 << 30, 100)])
@pytest.mark.parametrize("nbytes", [4097, 3 * MIB + 3])
def test_h27_short_reads_and_writes_are_continued(directory: Path, nbytes: int, lengths: tuple[int, ...]) -> None:
    tier, file = open_tier(directory, Halting)
    source = anonymous_slab(nbytes).copy_(noise(nbytes))
    slot = reserve(tier, nbytes)
    file.halt(*lengths)
    slot.write(source)
    file.halt()
    assert torch.equal(content(slot), source)
    file.halt(*lengths)
    target = anonymous_slab(nbytes)
    slot.read(target)
    assert torch.equal(target, source)
    assert file.written >= nbytes


def test_the_file_grows_in_steps_within_the_budget(directory: Path) -> None:
    tier, file = open_tier(directory, budget=100 * MIB + 5000)
    one = reserve(tier, 5000)
    assert tier.held_bytes == file.stat.st_size == 64 * MIB
    two = reserve(tier, 90 * MIB)
    assert tier.held_bytes == file.stat.st_size <= 100 * MIB + 5000
    assert tier.reserve(90 * MIB) is None
    three = reserve(tier, 9 * MIB)
    assert tier.used_bytes == 5000 + 99 * MIB
    assert len({one.region, two.region, three.region}) == 3
    assert DiskTier([directory], 0).reserve(1) is None
    assert DiskTier([directory], 4095).reserve(1) is None
    tiny = DiskTier([directory], 8192)
    assert reserve(tiny, 4097).nbytes == 4097
    assert tiny.reserve(1) is not None, "its slot has gone already"


def test_h25_a_thousand_steps_leave_the_file_as_it_was(directory: Path) -> None:
    tier, file = open_tier(directory)
    gc.collect()
    descriptors, seen = len(os.listdir("/proc/self/fd")), set()
    for _ in range(1000):
        step = [reserve(tier, nbytes) for nbytes in (100, 70_000, 3 * MIB)]
        step[0].write(noise(100))
        del step
        seen.add((tier.used_bytes, tier.held_bytes, file.stat.st_blocks, len(os.listdir("/proc/self/fd"))))
    assert seen == {(0, 64 * MIB, next(iter(seen))[2], descriptors)}
    assert file.written >= 1000 * PAGE


def test_measuring_moves_little_and_leaves_no_trace(directory: Path) -> None:
    tier, file = open_tier(directory)
    state = torch.get_rng_state()
    first = tier.measure()
    assert torch.equal(torch.get_rng_state(), state), "the next dropout would differ"
    moved = file.written
    assert 0 < moved <= 65 * MIB
    assert min(first.write, first.read) > 0
    assert tier.used_bytes == 0
    with pytest.raises(CapacityError, match="no room"):
        DiskTier([directory], MIB).measure()
