"""The files of a disk tier: where they may be, who sees them, and that none is left behind."""

from __future__ import annotations

import os
import stat
import tempfile
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from eager_offload.errors import ConfigError
from eager_offload.tiers.disk import DiskTier, filesystem_of
from eager_offload.tiers.spill import SpillFile
from tests.tiers.rig import MIB, equal, noise, open_tier, stored


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
    assert tier.directory == cache
    assert equal([stored(tier, noise(5000))], [0])
    monkeypatch.setenv("XDG_CACHE_HOME", str(directory / "missing"))
    monkeypatch.chdir(directory)
    assert DiskTier(None, MIB).directory == directory
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
            SpillFile(directory)
    assert list(directory.iterdir()) == []
    if call == "open":  # what was interrupted is the call that would have told the descriptor
        os.close(opened[0])
    assert len(os.listdir("/proc/self/fd")) == descriptors
