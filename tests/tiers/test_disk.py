"""The disk tier: exact bytes, within its room, through a real file, and what it does where the disk fails."""

from __future__ import annotations

import errno
import os
import re
from pathlib import Path

import pytest
import torch

from eager_offload.errors import CapacityError, TransferError
from eager_offload.tiers.arena import anonymous_slab
from eager_offload.tiers.disk import DiskTier
from eager_offload.tiers.memory import PAGE
from tests.threads import collect
from tests.tiers.files import Cached, Computing, Halting, Picky, Watched, failure
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
    collect()
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


# -- when the disk does not do its part -------------------------------------------------------------------------------

ERRNOS = [
    errno.EIO, errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.ENOMEM, errno.EROFS, errno.EBADF, errno.EINVAL,
    errno.ENXIO, errno.ENODEV, errno.EPERM, errno.ESTALE, errno.ETIMEDOUT, errno.EFAULT, errno.EOVERFLOW,
]  # fmt: skip


@pytest.mark.parametrize("number", ERRNOS, ids=lambda number: errno.errorcode[number])
def test_h27_a_failed_transfer_says_what_where_and_what_to_do(directory: Path, number: int) -> None:
    tier, file = open_tier(directory)
    source, nbytes = noise(100_000), 100_000
    slot = reserve(tier, nbytes)
    file.on_write = failure(number)
    with pytest.raises(TransferError, match=f"write {nbytes} bytes to the spill file in {str(directory)!r}") as raised:
        slot.write(source)
    assert (raised.value.errno, raised.value.tier, raised.value.nbytes) == (number, "disk", nbytes)
    assert os.strerror(number) in str(raised.value)
    assert "What to do: " in str(raised.value)
    assert "disk_budget" not in str(raised.value)
    is_full = number in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
    assert bool(re.search(r", with [\d.,]+ [KMGT]?i?B free\. What to do", str(raised.value))) is is_full
    assert ("lower max_inflight_bytes" if number == errno.ENOMEM else "disk_path") in str(raised.value)
    file.on_write = None
    slot.write(source)
    file.on_read = failure(number)
    with pytest.raises(TransferError, match=f"read {nbytes} bytes from the spill file") as raised:
        content(slot)
    assert (raised.value.errno, raised.value.tier, raised.value.nbytes) == (number, "disk", nbytes)
    file.on_read = None
    assert torch.equal(content(slot), source), "the tier goes on working"
    assert file.written >= nbytes


def test_h27_calls_that_move_nothing_end_in_an_error(directory: Path) -> None:
    tier, file = open_tier(directory, Halting)
    slot = stored(tier, noise(10_000))
    file.halt(0)
    for transfer in (slot.write, slot.read):
        with pytest.raises(TransferError, match="Input/output error") as raised:
            transfer(noise(10_000))
        assert raised.value.errno == errno.EIO


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO])
def test_h27_a_disk_that_is_full_is_no_room_and_room_once_it_is_not(directory: Path, number: int) -> None:
    tier, file = open_tier(directory)
    slot = stored(tier, noise(60 * MIB))
    file.on_allocate = failure(number)
    assert tier.reserve(10 * MIB) is None
    assert tier.held_bytes == file.stat.st_size == 64 * MIB
    small = stored(tier, noise(MIB, 1))
    assert torch.equal(content(small), noise(MIB, 1)), "what the file has already can still be used"
    file.on_allocate = None
    assert reserve(tier, 10 * MIB).nbytes == 10 * MIB
    assert torch.equal(content(slot), noise(60 * MIB))


def test_h27_a_filesystem_that_cannot_promise_room_is_used_all_the_same(directory: Path) -> None:
    tier, file = open_tier(directory)
    file.on_allocate = failure(errno.EOPNOTSUPP)
    source = noise(MIB)
    assert torch.equal(content(stored(tier, source)), source)
    assert file.stat.st_size == tier.held_bytes == 64 * MIB
    assert file.written >= MIB


def test_h27_more_than_the_disk_has_is_never_asked_for(directory: Path) -> None:
    tier, file = open_tier(directory, budget=1 << 60)
    assert tier.reserve(1 << 50) is None
    assert file.stat.st_size == 0


def test_h33_a_neighbour_that_changes_while_it_leaves_is_not_taken_for_a_fault_of_the_disk(directory: Path) -> None:
    # The storage of a GRU's gates leaves for one gate while the next one is still computed in place.
    tier, file = open_tier(directory, Computing, verify=True)
    source = noise(100_000)
    saved, slot = source.clone(), reserve(tier, 100_000)
    assert isinstance(file, Computing)
    file.goes_on = lambda: source[50_000:].add_(1)
    slot.write(source)
    assert not torch.equal(source, saved)
    assert torch.equal(content(slot), saved)
    assert file.written >= 100_000
