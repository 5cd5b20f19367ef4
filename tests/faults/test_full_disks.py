"""H27: a disk that fills up in the middle of a step: a filesystem of 96 MiB."""

from __future__ import annotations

import errno
import os
import subprocess
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from eager_offload import Offload, OffloadStats
from eager_offload.tiers.spill import FLOOR_SHARE
from tests.faults.disks import Faulty, make_offload, nothing_is_held, on_faulty_disk
from tests.proof.bits import same_bits
from tests.tiers.files import failure

MIB = 1 << 20


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A real filesystem of its own with room for 96 MiB; what a failed test has left open there does not matter."""
    image, point = tmp_path / "image", tmp_path / "disk"
    point.mkdir()
    with image.open("wb") as file:
        file.truncate(96 * MIB)
    try:
        subprocess.run(["mkfs.ext4", "-q", "-m", "0", str(image)], check=True, capture_output=True)
        subprocess.run(["mount", "-o", "loop", str(image), str(point)], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"this machine does not let a test mount a filesystem: {error}")
    yield point
    subprocess.run(["umount", "--lazy", str(point)], check=True, capture_output=True)


class Unpromised(Faulty):
    """A file whose room is not promised: the disk says that it is full when it is written to."""

    def allocate(self, offset: int, nbytes: int) -> None:
        raise failure(errno.EOPNOTSUPP)


def fill(disk: Path) -> Path:
    """Takes every block of ``disk`` that is left."""
    path = disk / "filler"
    with path.open("wb") as file, pytest.raises(OSError, match=os.strerror(errno.ENOSPC)):
        while True:
            free = os.statvfs(disk).f_bavail * os.statvfs(disk).f_frsize
            os.posix_fallocate(file.fileno(), os.fstat(file.fileno()).st_size, max(free // 2, 4096))
    assert os.statvfs(disk).f_bavail * os.statvfs(disk).f_frsize < 4096
    return path


def chain(x: Tensor, between: Callable[[], None] = lambda: None) -> Tensor:
    """Saves 2 x 9 activations of 4 MiB; ``between`` is called between the halves."""
    for _ in range(9):
        x = x.sigmoid()
    between()
    for _ in range(9):
        x = x.tanh()
    return x.sum()


def moved_by(offload: Offload, x: Tensor, expected: Tensor, between: Callable[[], None] = lambda: None) -> OffloadStats:
    """What an exact step has moved before its backward, in whose midst ``between`` is called."""
    with offload:
        loss = chain(x, between)
    stats = offload.stats(synchronize=True)
    assert same_bits(torch.autograd.grad(loss, x)[0], expected)
    del loss
    nothing_is_held(offload, after_error=True)
    return stats


@pytest.mark.parametrize("file_type", [Faulty, Unpromised])
def test_h27_a_disk_that_others_fill_in_mid_step_is_told_apart_from_one_with_room(
    file_type: type[Faulty], small_disk: Path, record_property: Callable[[str, object], None]
) -> None:
    x = torch.linspace(-3, 3, MIB).requires_grad_()
    expected = torch.autograd.grad(chain(x), x)[0]
    with on_faulty_disk(file_type):
        offload = make_offload(small_disk, disk_budget=1 << 40)

        def others_fill_it() -> None:
            offload.stats(synchronize=True)  # the first half is on the disk by then
            fill(small_disk)

        full = moved_by(offload, x, expected, others_fill_it)
        assert full.bytes_out > 4 * MIB, "something moved before"
        assert full.kept_bytes["budget" if file_type is Faulty else "failed"] >= 4 * MIB
        (small_disk / "filler").unlink()
        offload.reset_stats()
        again = moved_by(offload, x, expected)
        assert again.bytes_out > 4 * MIB
        assert {"budget", "failed"}.isdisjoint(again.kept_bytes), "there is room again"
        offload.close()
    assert list(small_disk.iterdir()) == [small_disk / "lost+found"]
    record_property("faults", sum(full.demotions.values()))


def test_h27_a_step_that_saves_more_than_the_disk_has_leaves_the_floor_free(small_disk: Path) -> None:
    x = torch.linspace(-3, 3, 2 * MIB).requires_grad_()
    expected = torch.autograd.grad(chain(x), x)[0]
    warnings.simplefilter("ignore", RuntimeWarning)
    offload = make_offload(small_disk, disk_budget=1 << 40)
    with offload:
        loss = chain(x)
    stats = offload.stats(synchronize=True)
    usage = os.statvfs(small_disk)
    assert usage.f_bavail * usage.f_frsize >= FLOOR_SHARE * usage.f_blocks * usage.f_frsize
    assert stats.bytes_out > 32 * MIB
    assert stats.kept_bytes["budget"] > 16 * MIB
    assert same_bits(torch.autograd.grad(loss, x)[0], expected)
    del loss
    nothing_is_held(offload, after_error=False)
    offload.close()
    usage = os.statvfs(small_disk)
    assert usage.f_bavail * usage.f_frsize > 64 * MIB, "the room has gone back"
