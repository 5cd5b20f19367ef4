"""The disk tier: exact bytes, within its room, through a real file."""

from __future__ import annotations

import gc
import os
import random
import threading
from pathlib import Path

import pytest
import torch
from torch import Tensor

from eager_offload.errors import CapacityError
from eager_offload.tiers.arena import anonymous_slab
from eager_offload.tiers.disk import DiskSlot, DiskTier
from eager_offload.tiers.memory import PAGE
from tests.tiers.files import Cached, Halting, Picky, Watched
from tests.tiers.rig import MIB, content, noise, open_tier, reserve, stored
from tests.tiers.verdicts import Verdicts

SIZES = [1, 4095, 4096, 4097, 70_001, 10 * MIB + 3]


@pytest.mark.parametrize("file_type", [Watched, Cached])
@pytest.mark.parametrize("nbytes", SIZES)
def test_bytes_come_back_exact_from_and_to_any_address(directory: Path, nbytes: int, file_type: type[Watched]) -> None:
    tier, file = open_tier(directory, file_type)
    slot = reserve(tier, nbytes)
    for phase in (0, 1, 7, 32, 63) if nbytes > MIB else range(64):
        pages = anonymous_slab(nbytes + 64).copy_(noise(nbytes + 64, phase))
        source = pages[phase : phase + nbytes]
        before = file.written, file.read
        slot.write(source)
        target = anonymous_slab(nbytes + 64)
        slot.read(target[phase : phase + nbytes])
        assert torch.equal(target[phase : phase + nbytes], source)
        assert not target[:phase].any()
        assert not target[phase + nbytes :].any(), "a transfer stays within its target"
        assert file.written - before[0] >= nbytes
        assert file.read - before[1] >= nbytes
    assert tier.used_bytes == nbytes


def test_slots_that_live_together_share_no_byte(directory: Path) -> None:
    (tier, file), chance = open_tier(directory), random.Random(0)
    slots: list[tuple[DiskSlot, Tensor]] = []
    for seed in range(150):
        if slots and chance.random() < 0.4:
            slot, source = slots.pop(chance.randrange(len(slots)))
            assert torch.equal(content(slot), source)
            del slot
        source = noise(chance.choice([1, 4096, 5000, 70_000, 600_000]), seed)
        slots.append((stored(tier, source), source))
    assert all(torch.equal(content(slot), source) for slot, source in slots)
    assert tier.used_bytes == sum(source.numel() for _, source in slots) > MIB
    assert len({slot.region for slot, _ in slots}) == len(slots)
    assert file.written > tier.used_bytes
    slots.clear()
    assert tier.used_bytes == 0
    assert tier.held_bytes == file.stat.st_size == 64 * MIB


def test_threads_that_transfer_at_once_keep_their_bytes(directory: Path) -> None:
    (tier, file), failures = open_tier(directory), []

    def work(seed: int) -> None:
        for step in range(10):
            source = noise(3 * MIB + 1 + 64 * seed, 1000 * seed + step)
            if not torch.equal(content(stored(tier, source)), source):
                failures.append((seed, step))

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(7)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert file.read >= 70 * 3 * MIB
    assert tier.used_bytes == 0


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
    assert isinstance(file, Picky)
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
    assert isinstance(file, Halting)
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


def test_a_slot_carries_the_fences_of_its_range(directory: Path) -> None:
    verdicts = Verdicts()
    tier, _ = open_tier(directory)
    slot = reserve(tier, 10_000)
    slot.fences += (verdicts.fence("read"),)
    cycle: list[object] = [slot]
    cycle.append(cycle)
    del slot, cycle
    gc.collect()
    heir = reserve(tier, 12_000)
    assert heir.fences == (verdicts.fence("read"),)
    del heir
    assert reserve(tier, 64 * MIB).fences == (verdicts.fence("read"),), "an heir that was never used hands it on"
    verdicts.over.add("read")
    assert reserve(tier, 12_000).fences == ()


def test_a_finalizer_that_runs_in_a_locked_section_does_not_deadlock(directory: Path) -> None:
    doomed: list[object] = []

    class Dropping(Watched):
        def allocate(self, offset: int, nbytes: int) -> None:  # called with the tier's lock held
            doomed.clear()
            super().allocate(offset, nbytes)

    tier, _ = open_tier(directory, Dropping)
    doomed += [reserve(tier, 5000), reserve(tier, 5000)]
    slot = reserve(tier, 65 * MIB)
    assert tier.used_bytes == slot.nbytes


def test_measuring_moves_little_is_remembered_and_leaves_no_trace(directory: Path) -> None:
    tier, file = open_tier(directory)
    state = torch.get_rng_state()
    first = tier.measure()
    assert torch.equal(torch.get_rng_state(), state), "the next dropout would differ"
    moved = file.written
    assert 0 < moved <= 65 * MIB
    assert min(first.write, first.read) > 0
    assert tier.measure() is first
    assert file.written == moved
    assert tier.used_bytes == 0
    with pytest.raises(CapacityError, match="no room"):
        DiskTier([directory], MIB).measure()
