"""How full a disk may get, what has been written to it, and every way in which it says no."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest
import torch

from eager_offload.errors import TransferError
from eager_offload.tiers.disk import DiskTier
from eager_offload.tiers.memory import PAGE
from eager_offload.tiers.rawfile import Usage
from eager_offload.tiers.spill import FLOOR_BYTES, FLOOR_SHARE
from tests.tiers.files import Watched, failure
from tests.tiers.rig import MIB, content, noise, open_tier, reserve, stored

GIB = 1 << 30


class Sized(Watched):
    """On a disk that is as large and as full as a test says."""

    total, free = 40 * GIB, 20 * GIB
    promises = True

    def usage(self) -> Usage:
        real = super().usage()
        return real._replace(total=self.total, free=self.free)

    def allocate(self, offset: int, nbytes: int) -> None:
        if not self.promises:
            raise failure(errno.EOPNOTSUPP)
        super().allocate(offset, nbytes)


def sized_tier(directory: Path) -> tuple[DiskTier, Sized]:
    tier, file = open_tier(directory, Sized, budget=1 << 40)
    assert isinstance(file, Sized)
    return tier, file


def test_a_disk_is_never_filled_beyond_the_floor_and_serves_again_when_there_is_room(directory: Path) -> None:
    tier, file = sized_tier(directory)
    floor = int(file.total * FLOOR_SHARE)
    assert floor == 2 * GIB < FLOOR_BYTES
    file.free = floor + 10 * MIB
    assert tier.reserve(11 * MIB) is None
    assert file.stat.st_size == 0
    slot = stored(tier, noise(10 * MIB))
    assert file.stat.st_size == 10 * MIB, "less than it grows by else"
    file.free = floor
    assert tier.reserve(1) is None
    file.free = 0
    assert tier.reserve(1) is None
    assert torch.equal(content(slot), noise(10 * MIB)), "what there is stays in use"
    file.free = 20 * GIB
    assert torch.equal(content(stored(tier, noise(11 * MIB))), noise(11 * MIB))


def test_the_floor_of_a_large_disk_is_a_number_of_bytes(directory: Path) -> None:
    tier, file = sized_tier(directory)
    file.total, file.free = 1 << 50, FLOOR_BYTES + MIB
    assert tier.reserve(2 * MIB) is None
    assert reserve(tier, MIB).nbytes == MIB


def test_room_that_was_not_promised_counts_as_taken(directory: Path) -> None:
    tier, file = sized_tier(directory)
    file.promises = False
    file.free = int(file.total * FLOOR_SHARE) + 100 * MIB
    first = reserve(tier, 64 * MIB)
    assert file.stat.st_blocks == 0
    assert tier.reserve(64 * MIB) is None, "the disk still says that it has 100 MiB"
    second = stored(tier, noise(36 * MIB))
    assert first.region != second.region
    assert torch.equal(content(second), noise(36 * MIB))


def test_a_disk_that_does_not_tell_its_room_has_none(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tier, file = open_tier(directory)
    slot = stored(tier, noise(5000))

    def refuse(self: Watched) -> Usage:
        raise failure(errno.EIO)

    monkeypatch.setattr(Watched, "usage", refuse)
    assert tier.reserve(100 * MIB) is None
    assert torch.equal(content(slot), noise(5000))
    assert file.written >= 5000


def test_bytes_written_are_counted_over_all_files_and_slots(directory: Path) -> None:
    tier = DiskTier([directory, directory], 512 * MIB, file_type=Watched)
    assert tier.written_bytes == 0
    for seed in range(3):
        stored(tier, noise(10 * MIB + 1, seed))
    probes = len(Watched.opened) * 4 * 4096
    assert tier.written_bytes == sum(file.written for file in Watched.opened) - probes == 3 * (10 * MIB + 4096)
    slot = stored(tier, noise(MIB))
    tier.close()
    assert tier.written_bytes == 3 * (10 * MIB + 4096) + MIB
    assert slot.nbytes == MIB


@pytest.mark.parametrize("number", [errno.EINTR, errno.EAGAIN])
def test_h27_a_call_that_asks_to_be_repeated_is_repeated_but_not_for_ever(directory: Path, number: int) -> None:
    class Interrupted(Watched):
        left = 0

        def _interrupt(self) -> None:
            if self.left:
                self.left -= 1
                raise failure(number)

        def write_from(self, source: memoryview, offset: int) -> int:
            self._interrupt()
            return super().write_from(source, offset)

        def read_into(self, target: memoryview, offset: int) -> int:
            self._interrupt()
            return super().read_into(target, offset)

    tier, file = open_tier(directory, Interrupted)
    slot = reserve(tier, 10_000)
    file.left = 5
    slot.write(noise(10_000))
    file.left = 5
    assert torch.equal(content(slot), noise(10_000))
    assert file.left == 0
    assert file.written >= 10_000
    for transfer in (slot.write, slot.read):
        file.left = 1 << 30
        with pytest.raises(TransferError, match="Input/output error"):
            transfer(noise(10_000))
    file.left = 0
    slot.write(noise(10_000))
    assert torch.equal(content(slot), noise(10_000))


def test_the_reason_for_no_room_is_the_budget_or_the_disk(directory: Path) -> None:
    tier, file = sized_tier(directory)
    file.free = 0
    assert tier.reserve(1) is None
    assert f"the disk of {directory} has " in tier.shortage.reason
    assert "disk_path" in tier.shortage.remedy
    file.free = 20 * GIB
    small, _ = open_tier(directory, Sized, budget=MIB)
    slot = reserve(small, MIB)
    assert small.reserve(1) is None
    assert small.shortage == ("all of disk_budget is in use: 1.0 MiB", "raise disk_budget")
    assert slot.nbytes == MIB


def test_h27_direct_io_that_ends_in_the_page_cache_is_none(directory: Path) -> None:
    class Pretending(Watched):
        direct = False

        def set_direct(self, direct: bool) -> None:
            self.direct = direct

        def forget(self, offset: int, nbytes: int) -> None:
            assert not self.direct
            super().forget(offset, nbytes)

    tier, file = open_tier(directory, Pretending)
    assert not tier.direct_io
    slot = stored(tier, noise(MIB))
    assert file.cached_pages() == 0
    assert torch.equal(content(slot), noise(MIB))
    assert file.written >= MIB


def test_h27_asking_what_the_page_cache_has_brings_nothing_in(directory: Path) -> None:
    tier, file = open_tier(directory)
    slot = stored(tier, noise(MIB))
    assert file.written >= MIB
    file.set_direct(False)
    # A read that does not wait would have the page read ahead, and find it the next time, or at once.
    assert not any(file.is_cached(page * PAGE) for page in range(MIB // PAGE) for _ in range(8))
    assert file.read_into(memoryview(bytearray(100)), 5 * PAGE) == 100
    assert file.is_cached(5 * PAGE)
    assert slot.nbytes == MIB


@pytest.mark.parametrize("number", [errno.EROFS, errno.EIO])
@pytest.mark.parametrize("promises", [True, False])
def test_a_disk_that_cannot_grow_the_file_is_named_and_serves_again_once_it_can(
    directory: Path, number: int, promises: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier, file = open_tier(directory)
    file.on_allocate = failure(number)
    if not promises:
        file.on_allocate = failure(errno.EOPNOTSUPP)

        def refuse(self: Watched, length: int) -> None:
            raise failure(number)

        monkeypatch.setattr(Watched, "truncate", refuse)
    assert tier.reserve(1) is None
    assert tier.shortage.reason == f"the spill file in {str(directory)!r} cannot grow: {failure(number).strerror}"
    assert "disk_path" in tier.shortage.remedy
    monkeypatch.undo()
    file.on_allocate = None
    assert torch.equal(content(stored(tier, noise(MIB))), noise(MIB))
    assert tier.reserve(1 << 30) is None
    assert "disk_budget" in tier.shortage.reason, "what is over is not told any more"


def test_of_several_disks_one_that_cannot_grow_its_file_is_not_asked_again(directory: Path) -> None:
    paths = [directory / "one", directory / "two"]
    for path in paths:
        path.mkdir()
    tier = DiskTier(paths, 512 * MIB, file_type=Watched)
    Watched.opened[1].on_allocate = failure(errno.EROFS)
    for seed in range(2):
        assert torch.equal(content(stored(tier, noise(MIB, seed))), noise(MIB, seed))
    assert tier.directories == paths[:1]
    assert Watched.opened[2].written >= MIB
