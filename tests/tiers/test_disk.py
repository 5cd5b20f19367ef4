"""The disk tier: exact bytes, within its room, through a real file, and what it does where the disk fails."""

from __future__ import annotations

import errno
import os
import re
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch

from eager_offload.errors import ConfigError, TransferError
from eager_offload.tiers.disk import DiskTier
from eager_offload.tiers.memory import anonymous_slab
from eager_offload.tiers.spill import FLOOR_BYTES, FLOOR_SHARE, Usage
from tests.simulation.log import region_of
from tests.tiers.files import Cached, Halting, Picky, Watched, failure
from tests.tiers.rig import MIB, content, equal, noise, open_tier, reserve, stored

GIB = 1 << 30

# -- bytes ------------------------------------------------------------------------------------------------------------


class Pretending(Watched):
    """A filesystem that takes direct I/O and does not do it."""

    direct = False

    def set_direct(self, direct: bool) -> None:
        self.direct = direct

    def forget(self, offset: int, nbytes: int) -> None:
        assert not self.direct
        super().forget(offset, nbytes)


@pytest.mark.parametrize("file_type", [Watched, Cached, Pretending])
def test_h27_the_page_cache_keeps_nothing_even_without_direct_io(directory: Path, file_type: type[Watched]) -> None:
    tier, file = open_tier(directory, file_type)
    assert tier.direct_io == (file_type is Watched)
    source = noise(40 * MIB + 5)
    slot = stored(tier, source)
    assert file.written >= source.numel()
    assert file.cached_pages() == 0
    assert torch.equal(content(slot), source)
    assert file.cached_pages() == 0


def test_h27_a_device_that_asks_for_more_alignment_than_the_probe_found_gets_it(directory: Path) -> None:
    tier, file = open_tier(directory, Picky)
    source = anonymous_slab(MIB + 512)[512:].copy_(noise(MIB))
    slots = [stored(tier, source), stored(tier, source)]
    assert file.refused <= 1
    assert equal(slots, (0, 0))
    assert file.written >= 2 * MIB


@pytest.mark.parametrize("lengths", [(4096,), (8192, 0, 0), (4097,), (5000, 1, 12_288), (1 << 30, 100)])
@pytest.mark.parametrize("nbytes", [4097, 3 * MIB + 3])
def test_h27_short_reads_and_writes_are_continued(directory: Path, nbytes: int, lengths: tuple[int, ...]) -> None:
    tier, file = open_tier(directory, Halting)
    source, target = anonymous_slab(nbytes).copy_(noise(nbytes)), anonymous_slab(nbytes)
    slot = reserve(tier, nbytes)
    file.halt(*lengths)
    slot.write(source)
    file.halt()
    assert torch.equal(content(slot), source)
    file.halt(*lengths)
    slot.read(target)
    assert torch.equal(target, source)
    assert file.written >= nbytes
    file.halt(0)
    for transfer in (slot.write, slot.read):
        with pytest.raises(TransferError, match="Input/output error"):
            transfer(source)


@pytest.mark.parametrize("number", [errno.EINTR, errno.EAGAIN])
def test_h27_a_call_that_asks_to_be_repeated_is_repeated_but_not_for_ever(directory: Path, number: int) -> None:
    tier, file = open_tier(directory)
    slot, source, left = reserve(tier, 10_000), noise(10_000), 0

    def strike() -> None:
        nonlocal left
        left -= 1
        if left >= 0:
            raise failure(number)

    file.on_write = file.on_read = strike
    for transfer in (slot.write, slot.read):
        for left in (5, 50):
            with pytest.raises(TransferError, match="Input/output error") if left > 5 else nullcontext():
                transfer(source)
    left = 5
    slot.write(source)
    assert equal([slot], [0])
    assert file.written >= 10_000


def test_h33_a_neighbour_that_changes_while_it_leaves_is_not_taken_for_a_fault_of_the_disk(directory: Path) -> None:
    # The storage of a GRU's gates leaves for one gate while the next one is still computed in place.
    tier, file = open_tier(directory, verify=True)
    # A page's address: it is written in two calls, and changes after the first.
    source, slot = anonymous_slab(100_000).copy_(noise(100_000)), reserve(tier, 100_000)
    file.on_write = lambda: source[50_000:].add_(1)
    slot.write(source)
    assert not torch.equal(source, noise(100_000))
    assert equal([slot], [0])
    assert file.written >= 100_000


# -- room -------------------------------------------------------------------------------------------------------------


def test_the_file_grows_in_steps_within_the_budget(directory: Path) -> None:
    tier, file = open_tier(directory, budget=100 * MIB + 5000)
    slots = [reserve(tier, 5000)]
    assert tier.held_bytes == file.stat.st_size == 64 * MIB
    slots.append(reserve(tier, 90 * MIB))
    assert tier.held_bytes == file.stat.st_size <= 100 * MIB + 5000
    assert tier.reserve(90 * MIB) is None
    slots.append(reserve(tier, 9 * MIB))
    assert tier.used_bytes == 5000 + 99 * MIB
    assert len({region_of(slot) for slot in slots}) == 3
    assert tier.reserve(MIB) is None
    assert tier.shortage == ("all of disk_budget is in use: 100.0 MiB", "raise disk_budget")
    for budget, nbytes in ((0, 1), (4095, 1), (8192, 8193)):
        assert DiskTier(directory, budget).reserve(nbytes) is None
    assert reserve(DiskTier(directory, 8192), 4097).nbytes == 4097


class Sized(Watched):
    """On a disk that is as large and as full as a test says."""

    total, free = 40 * GIB, 20 * GIB

    def usage(self) -> Usage:
        return super().usage()._replace(total=self.total, free=self.free)


def test_a_disk_is_never_filled_beyond_the_floor_and_serves_again_when_there_is_room(directory: Path) -> None:
    tier, file = open_tier(directory, Sized, budget=1 << 60)
    floor = int(file.total * FLOOR_SHARE)
    assert floor == 2 * GIB < FLOOR_BYTES
    assert tier.reserve(1 << 50) is None
    file.free = floor + 10 * MIB
    assert tier.reserve(11 * MIB) is None
    assert file.stat.st_size == 0, "more than there is is not asked for"
    slots = [stored(tier, noise(10 * MIB))]
    assert file.stat.st_size == 10 * MIB, "less than it grows by else"
    for file.free in (floor, 0):
        assert tier.reserve(1) is None
        assert f"the disk of {directory} has " in tier.shortage.reason
        assert "disk_path" in tier.shortage.remedy
    assert equal(slots, [0]), "what there is stays in use"
    file.free = 20 * GIB
    slots.append(stored(tier, noise(11 * MIB, 1)))
    assert equal(slots, (0, 1))
    tier, file = open_tier(directory, Sized, budget=1 << 60)
    file.total, file.free = 1 << 50, FLOOR_BYTES + MIB
    assert tier.reserve(2 * MIB) is None, "the floor of a large disk is a number of bytes"
    assert reserve(tier, MIB).nbytes == MIB


def test_h27_where_room_cannot_be_promised_what_was_not_written_yet_counts_as_taken(directory: Path) -> None:
    tier, file = open_tier(directory, Sized, budget=1 << 40)
    file.on_allocate = failure(errno.EOPNOTSUPP)
    file.free = int(file.total * FLOOR_SHARE) + 100 * MIB
    first = reserve(tier, 64 * MIB)
    assert file.stat.st_blocks == 0
    assert tier.held_bytes == file.stat.st_size == 64 * MIB
    assert tier.reserve(64 * MIB) is None, "the disk still says that it has 100 MiB"
    second = stored(tier, noise(36 * MIB))
    assert region_of(first) != region_of(second)
    assert equal([second], [0])


CANNOT = [
    *[("on_allocate", number, "") for number in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)],
    *[
        (call, number, "cannot grow: ")
        for number in (errno.EIO, errno.EROFS)
        for call in ("on_allocate", "on_truncate")
    ],
    ("on_usage", errno.EIO, ""),
]


@pytest.mark.parametrize(("call", "number", "reason"), CANNOT)
def test_h27_a_disk_that_cannot_grow_the_file_has_no_room_and_room_once_it_can(
    directory: Path, call: str, number: int, reason: str
) -> None:
    tier, file = open_tier(directory)
    slots = [stored(tier, noise(5 * MIB))]
    if call == "on_truncate":
        file.on_allocate = failure(errno.EOPNOTSUPP)
    setattr(file, call, failure(number))
    assert tier.reserve(60 * MIB) is None
    if reason:
        told = f"the spill file in {str(directory)!r} cannot grow: {os.strerror(number)}"
        assert tier.shortage.reason == told
        assert "disk_path" in tier.shortage.remedy
    assert tier.held_bytes == file.stat.st_size == 64 * MIB
    slots.append(stored(tier, noise(MIB, 1)))
    assert equal(slots, (0, 1)), "what the file has already can still be used"
    file.on_allocate = None
    setattr(file, call, None)
    slots.append(reserve(tier, 60 * MIB))
    slots.pop().write(noise(60 * MIB, 2))
    assert equal(slots, (0, 1))
    assert tier.reserve(1 << 30) is None
    assert "disk_budget" in tier.shortage.reason, "what is over is not told any more"


def test_h27_a_limit_on_the_size_of_files_is_not_taken_for_a_full_disk(directory: Path) -> None:
    resource = pytest.importorskip("resource")
    tier, _ = open_tier(directory)
    free, given = DiskTier(directory, None), resource.getrlimit(resource.RLIMIT_FSIZE)
    slots = [stored(one, noise(5 * MIB)) for one in (tier, free)]
    resource.setrlimit(resource.RLIMIT_FSIZE, (80 * MIB, given[1]))  # Python ignores the signal
    try:
        limited = DiskTier(directory, None)
        slots.append(stored(limited, noise(75 * MIB)))
        for one in (tier, free, limited):
            assert one.reserve(90 * MIB) is None
            assert one.shortage.reason == "no file of this process may exceed 80.0 MiB (RLIMIT_FSIZE)"
            assert one.shortage.remedy == "raise the limit (ulimit -f)"
        assert equal(slots, (0, 0, 0))
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, given[1]))
        with pytest.raises(TransferError, match=r"File too large. What to do: raise the limit \(ulimit -f\)"):
            slots[0].write(noise(5 * MIB))
        with pytest.raises(ConfigError, match=r"may exceed 0 bytes \(RLIMIT_FSIZE, ulimit -f\)"):
            DiskTier(directory, None)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, given)
    assert reserve(tier, 90 * MIB)


# -- errors -----------------------------------------------------------------------------------------------------------

ERRNOS = [
    errno.EIO, errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.ENOMEM, errno.EROFS, errno.EBADF, errno.EINVAL,
    errno.ENXIO, errno.ENODEV, errno.EPERM, errno.ESTALE, errno.ETIMEDOUT, errno.EFAULT, errno.EOVERFLOW,
]  # fmt: skip


@pytest.mark.parametrize("number", ERRNOS, ids=lambda number: errno.errorcode[number])
def test_h27_a_failed_transfer_says_what_where_and_what_to_do(directory: Path, number: int) -> None:
    tier, file = open_tier(directory)
    nbytes, source = 100_000, noise(100_000)
    slot = stored(tier, source)
    is_full = number in (errno.ENOSPC, errno.EDQUOT)
    for transfer, told in ((slot.write, "write 100000 bytes to"), (slot.read, "read 100000 bytes from")):
        file.on_write = file.on_read = failure(number)
        with pytest.raises(TransferError, match=f"{told} the spill file in {str(directory)!r}") as raised:
            transfer(source.clone())
        assert (raised.value.errno, raised.value.tier, raised.value.nbytes) == (number, "disk", nbytes)
        assert os.strerror(number) in str(raised.value)
        assert "What to do: " in str(raised.value)
        assert "disk_budget" not in str(raised.value)
        assert bool(re.search(r", with [\d.,]+ [KMGT]?i?B free\. What to do", str(raised.value))) is is_full
        assert ("lower max_inflight_bytes" if number == errno.ENOMEM else "disk_path") in str(raised.value)
        file.on_write = file.on_read = None
        slot.write(source)
        assert torch.equal(content(slot), source), "the tier goes on working"
    assert file.written >= nbytes
