"""The files of a disk tier: where they may be, who sees them, that none is left behind, and one on each of several."""

from __future__ import annotations

import errno
import os
import stat
import tempfile
import threading
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch

from eager_offload.errors import ConfigError, TransferError
from eager_offload.runtime.base import Direction
from eager_offload.runtime.host import HostRuntime
from eager_offload.tiers.directories import filesystem_of
from eager_offload.tiers.disk import DiskTier
from eager_offload.tiers.memory import anonymous_slab
from eager_offload.tiers.rawfile import RawFile
from tests.tiers.files import Cached, Watched, failure
from tests.tiers.rig import MIB, content, equal, noise, open_tier, reserve, stored


@pytest.mark.parametrize("unnamed", [True, False])
def test_h32_the_file_has_no_name_and_only_its_owner_may_read_it(
    directory: Path, unnamed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not unnamed:
        monkeypatch.delattr(os, "O_TMPFILE")
    previous = os.umask(0)
    try:
        tier, file = open_tier(directory)
    finally:
        os.umask(previous)
    slot = stored(tier, noise(MIB))
    assert list(directory.iterdir()) == []
    assert file.stat.st_nlink == 0
    assert stat.S_IMODE(file.stat.st_mode) == 0o600
    assert not os.get_inheritable(file.descriptor)
    assert equal([slot], [0])
    assert file.written >= MIB


def test_h27_without_a_directory_the_next_candidate_is_tried(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = directory / "cache"
    cache.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", "/dev/shm")
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    tier = DiskTier(None, MIB)
    assert tier.directories == [cache]
    assert equal([stored(tier, noise(5000))], [0])
    monkeypatch.setenv("XDG_CACHE_HOME", str(directory / "missing"))
    monkeypatch.chdir(directory)
    assert DiskTier(None, MIB).directories == [directory]
    monkeypatch.chdir("/dev/shm")
    with pytest.raises(ConfigError, match=r"no place was found .*tmpfs.*missing.*does not exist"):
        DiskTier(None, MIB)


def test_of_mounts_over_mounts_the_last_one_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    mounts = [("/", "ext4"), ("/a b", "tmpfs"), ("/over", "tmpfs"), ("/over", "xfs")]
    parts = [SimpleNamespace(mountpoint=point, fstype=kind) for point, kind in mounts]
    monkeypatch.setattr(psutil, "disk_partitions", lambda all: parts)
    assert [filesystem_of(Path(path)) for path in ("/a b/c", "/a", "/over/here")] == ["tmpfs", "ext4", "xfs"]


@pytest.mark.parametrize("call", ["open", "unlink"])
def test_where_files_have_names_at_first_an_interrupt_leaves_none(
    directory: Path, call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(os, "O_TMPFILE")
    real, opened = getattr(os, call), []

    def interrupt(*arguments: object) -> None:
        opened.append(real(*arguments))
        raise KeyboardInterrupt

    descriptors = len(os.listdir("/proc/self/fd"))
    with monkeypatch.context() as patch:
        patch.setattr(os, call, interrupt)
        with pytest.raises(KeyboardInterrupt):
            RawFile(directory)
    assert list(directory.iterdir()) == []
    if call == "open":  # what was interrupted is the call that would have told the descriptor
        os.close(opened[0])
    assert len(os.listdir("/proc/self/fd")) == descriptors


# -- several disks ----------------------------------------------------------------------------------------------------


def tier_over(directory: Path, several: int, file_type: type[Watched] = Watched) -> tuple[DiskTier, list[Watched]]:
    paths = [directory / str(number) for number in range(several)]
    for path in paths:
        path.mkdir()
    return DiskTier(paths, 512 * MIB, file_type=file_type), list(Watched.opened)


@pytest.mark.parametrize("file_type", [Watched, Cached])
def test_slots_go_to_several_disks_in_turn_each_to_one(directory: Path, file_type: type[Watched]) -> None:
    tier, files = tier_over(directory, 3, file_type)
    tried = sum(file.written for file in files)
    slots = [stored(tier, noise(12 * MIB + 12_345 * seed, seed)) for seed in range(6)]
    assert [slot.lane for slot in slots] == [0, 1, 2] * 2
    assert equal(slots, range(6))
    shares = [file.written for file in files]
    assert tier.written_bytes == sum(shares) - tried
    assert sum(shares) >= sum(slot.nbytes for slot in slots)
    assert min(shares) > sum(shares) // 4, "each has about a third"
    assert min(file.read for file in files) > sum(shares) // 4
    tier.close()
    slots[0].write(noise(slots[0].nbytes))
    assert tier.written_bytes == sum(file.written for file in files) - tried, "those of a closed tier count too"


@pytest.mark.parametrize("direction", list(Direction))
def test_transfers_of_different_disks_run_at_once(directory: Path, direction: Direction) -> None:
    tier, files = tier_over(directory, 2)
    sources = [anonymous_slab(MIB).copy_(noise(MIB, seed)) for seed in range(2)]
    slots = [stored(tier, source) for source in sources]
    targets, runtime, barrier = [anonymous_slab(MIB) for _ in slots], HostRuntime(), threading.Barrier(2, timeout=60)
    for file in files:
        file.on_write = file.on_read = barrier.wait
    stream = runtime.transfer_stream(torch.device("cpu"), direction)
    ends = list(zip(slots, sources, strict=True) if direction is Direction.OUT else zip(targets, slots, strict=True))
    for _ in range(3):
        events = [runtime.copy(target, source, stream) for target, source in ends]
        stream.record().wait()
        assert all(runtime.query(event) for event in events), "what is recorded stands behind every disk's"
    runtime.close()
    if direction is Direction.IN:
        assert all(torch.equal(target, source) for target, source in zip(targets, sources, strict=True))


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS])
def test_of_several_disks_one_that_cannot_grow_its_file_is_left_out(directory: Path, number: int) -> None:
    tier, (one, two) = tier_over(directory, 2)
    slots = [stored(tier, noise(8 * MIB))]
    lengths = one.stat.st_size, two.stat.st_size
    two.on_allocate = failure(number)
    slots += [stored(tier, noise(130 * MIB, 1)), stored(tier, noise(MIB, 2))]
    assert [slot.lane for slot in slots] == [0, 0, 0]
    assert two.stat.st_size == lengths[1]
    assert one.stat.st_size > lengths[0]
    assert equal(slots, (0, 1, 2))
    assert tier.directories == [directory / "0", *([directory / "1"] if number == errno.ENOSPC else [])]


def test_h27_of_several_disks_one_that_fails_to_write_is_named_and_the_others_serve_alone(directory: Path) -> None:
    tier, (_, two) = tier_over(directory, 2)
    source = noise(16 * MIB)
    before, slots = stored(tier, source), [reserve(tier, 16 * MIB) for _ in range(2)]
    two.on_write = failure(errno.EIO)

    def write() -> None:
        for slot in slots:
            slot.write(source)

    with pytest.raises(TransferError, match=r"could not write 16777216 bytes .*/1'.*Input/output error"):
        write()
    again = stored(tier, source)
    assert tier.directories == [directory / "0"]
    assert len(Watched.opened) == 3
    assert Watched.opened[2].written >= source.numel()
    assert torch.equal(content(again), source)
    assert torch.equal(content(before), source), "what the failing disk has can still be read"
    two.on_write = None  # the error that it raised leads to the frames that it ended
    del before
    slots.clear()
    assert tier.used_bytes == 16 * MIB
    assert tier.held_bytes == Watched.opened[2].stat.st_size, "the files of before have gone"
    tier.close()


def test_without_a_budget_the_tier_takes_a_share_of_what_is_free_on_each_disk_once(directory: Path) -> None:
    tier = DiskTier([directory, directory], None)
    free = os.statvfs(directory).f_bavail * os.statvfs(directory).f_frsize
    assert 0 < tier._budget < free
    assert equal([stored(tier, noise(5000))], [0])
