"""The files of a disk tier: where they may be, who sees them, and that none is left behind."""

from __future__ import annotations

import errno
import gc
import os
import stat
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch

from eager_offload.errors import ConfigError
from eager_offload.tiers.directories import filesystem_of
from eager_offload.tiers.disk import DiskTier
from eager_offload.tiers.rawfile import RawFile
from tests.threads import collect
from tests.tiers.files import failure
from tests.tiers.rig import MIB, content, noise, open_tier, stored


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
    assert torch.equal(content(slot), noise(MIB))
    assert file.written >= MIB


def test_closing_leaves_living_slots_alone_and_the_last_one_closes_the_file(directory: Path) -> None:
    collect()
    descriptors = len(os.listdir("/proc/self/fd"))
    tier = DiskTier([directory], 256 * MIB)
    one, two = stored(tier, noise(MIB, 1)), stored(tier, noise(MIB, 2))
    tier.close()
    tier.close()
    assert tier.reserve(1) is None
    assert torch.equal(content(one), noise(MIB, 1))
    assert len(os.listdir("/proc/self/fd")) == descriptors + 1
    del one
    assert tier.used_bytes == MIB
    assert tier.held_bytes == 64 * MIB
    assert torch.equal(content(two), noise(MIB, 2))
    del two
    assert tier.used_bytes == tier.held_bytes == 0
    assert len(os.listdir("/proc/self/fd")) == descriptors


def test_a_tier_that_is_dropped_closes_its_file(directory: Path) -> None:
    collect()
    descriptors = len(os.listdir("/proc/self/fd"))
    gc.disable()
    try:
        slot = stored(DiskTier([directory], 256 * MIB), noise(MIB))
        assert torch.equal(content(slot), noise(MIB))
        del slot
        assert len(os.listdir("/proc/self/fd")) == descriptors
    finally:
        gc.enable()


def test_a_directory_that_cannot_serve_is_an_error_that_names_it(directory: Path) -> None:
    file = directory / "file"
    file.touch()
    for path, reason in (
        (directory / "missing", "does not exist"),
        (file, "is no directory"),
        (Path("/dev/shm"), "is on tmpfs"),
        (Path("/proc/self/fdinfo"), "cannot serve"),
    ):
        with pytest.raises(ConfigError, match=reason) as raised:
            DiskTier([directory, path], MIB)
        assert "disk_path" in str(raised.value)
        assert str(path) in str(raised.value)
        assert "accepted is a writable directory" in str(raised.value)
    with pytest.raises(ConfigError, match="disk_path: given an empty list"):
        DiskTier([], MIB)


def test_h27_a_disk_that_is_full_at_the_start_is_an_error_that_names_it(directory: Path) -> None:
    class Full(RawFile):
        def write_from(self, source: memoryview, offset: int) -> int:
            raise failure(errno.ENOSPC)

    with pytest.raises(ConfigError, match="No space left on device"):
        DiskTier([directory], MIB, file_type=Full)


def test_h27_without_a_directory_the_next_candidate_is_tried(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = directory / "cache"
    cache.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", "/dev/shm")
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    tier = DiskTier(None, MIB)
    assert tier.directories == [cache]
    assert torch.equal(content(stored(tier, noise(5000))), noise(5000))
    monkeypatch.setenv("XDG_CACHE_HOME", str(directory / "missing"))
    monkeypatch.chdir(directory)
    assert DiskTier(None, MIB).directories == [directory]
    monkeypatch.chdir("/dev/shm")
    with pytest.raises(ConfigError, match=r"no place was found .*tmpfs.*missing.*does not exist"):
        DiskTier(None, MIB)


def test_without_a_budget_the_tier_takes_a_share_of_what_is_free(directory: Path) -> None:
    tier = DiskTier([directory, directory], None)
    free = os.statvfs(directory).f_bavail * os.statvfs(directory).f_frsize
    assert 0 < tier._budget < free
    assert torch.equal(content(stored(tier, noise(5000))), noise(5000))


def test_of_mounts_over_mounts_the_last_one_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    mounts = [("/", "ext4"), ("/a b", "tmpfs"), ("/over", "tmpfs"), ("/over", "xfs")]
    parts = [SimpleNamespace(mountpoint=point, fstype=kind) for point, kind in mounts]
    monkeypatch.setattr(psutil, "disk_partitions", lambda all: parts)
    assert filesystem_of(Path("/a b/c")) == "tmpfs"
    assert filesystem_of(Path("/a")) == "ext4"
    assert filesystem_of(Path("/over/here")) == "xfs"


FORKED = """
import os, signal, sys, threading, torch
from pathlib import Path
from eager_offload.errors import OffloadError
from eager_offload.tiers.disk import DiskTier
from eager_offload.tiers.rawfile import RawFile

torch.set_num_threads(1)                # a pool of threads of torch's own would not survive the fork
directory = Path(sys.argv[1])
inside, leave = threading.Event(), threading.Event()

class Slow(RawFile):
    def allocate(self, offset, nbytes):
        if offset:
            inside.set()
            leave.wait()
        super().allocate(offset, nbytes)

tier = DiskTier([directory] * 2, 1 << 30, file_type=Slow)
ones, twos = (torch.full((8 << 20,), value, dtype=torch.uint8) for value in (1, 2))
slot, doomed = tier.reserve(8 << 20), tier.reserve(8 << 20)
slot.write(ones)
doomed.write(ones)
thread = threading.Thread(target=lambda: tier.reserve(129 << 20))
thread.start()
inside.wait()                           # the thread is within the tier's lock now
child = os.fork()
if child == 0:
    signal.alarm(60)                    # a child that hangs does not stay
    descriptors = os.listdir("/proc/self/fd")
    assert not any("deleted" in os.readlink(f"/proc/self/fd/{one}") for one in descriptors[:-1]), "the parent's file"
    for use in (slot.read, slot.write):
        try:
            use(twos.clone())
        except OffloadError as error:
            assert "forked" in str(error), error
        else:
            raise AssertionError("the child reached the parent's file")
    del doomed
    assert tier.used_bytes == tier.held_bytes == 0
    own = [tier.reserve(8 << 20) for _ in range(4)]
    target = torch.zeros_like(twos)
    for one in own:
        one.write(twos)
        one.read(target)
        assert torch.equal(target, twos)
    assert tier.used_bytes == 32 << 20
    tier.close()
    assert own[0].region.space != slot.region.space
    os._exit(0)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
leave.set()
thread.join()
target = torch.zeros_like(ones)
for one in (slot, doomed):
    one.read(target)
    assert torch.equal(target, ones)
assert tier.used_bytes == 16 << 20
tier.close()
assert threading.active_count() == 1
assert os.listdir(directory) == []
print("exact")
"""


def test_h28_a_forked_child_never_touches_its_parents_file(directory: Path) -> None:
    done = subprocess.run([sys.executable, "-c", FORKED, str(directory)], capture_output=True, text=True, timeout=120)
    assert (done.stdout, done.returncode) == ("exact\n", 0), done.stderr


@pytest.mark.parametrize("call", ["open", "unlink"])
def test_where_files_have_names_at_first_an_interrupt_leaves_none(
    directory: Path, call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(os, "O_TMPFILE")
    real = getattr(os, call)
    opened = []

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


def test_a_name_that_cannot_be_removed_leaves_no_file_open(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "O_TMPFILE")
    descriptors = len(os.listdir("/proc/self/fd"))
    with monkeypatch.context() as patch:

        def refuse(*_: object) -> None:
            raise failure(errno.EPERM)

        patch.setattr(os, "unlink", refuse)
        with pytest.raises(PermissionError):
            RawFile(directory)
    assert len(os.listdir("/proc/self/fd")) == descriptors
