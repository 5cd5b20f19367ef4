"""H26, H27: disks that fill up in the middle of a step: a filesystem of 96 MiB, and a limit on a file's size."""

from __future__ import annotations

import errno
import os
import subprocess
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch import Tensor

from eager_offload import Offload, OffloadStats
from eager_offload.tiers.spill import FLOOR_SHARE
from tests.faults.disks import Faulty, make_offload, nothing_is_held, on_faulty_disk
from tests.processes import printed_by
from tests.proof.bits import same_bits
from tests.tiers.files import Watched
from tests.tiers.rig import content, noise, open_tier, stored

MIB = 1 << 20


@contextmanager
def mounted(tmp_path: Path, *options: str) -> Iterator[Path]:
    """A real filesystem of its own with room for 96 MiB; what a failed test has left open there does not matter."""
    image, point = tmp_path / "image", tmp_path / "disk"
    point.mkdir()
    with image.open("wb") as file:
        file.truncate(96 * MIB)
    try:
        subprocess.run(["mkfs.ext4", "-q", "-m", "0", str(image)], check=True, capture_output=True)
        mount = ["mount", "-o", ",".join(["loop", *options]), str(image), str(point)]
        subprocess.run(mount, check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"this machine does not let a test mount a filesystem: {error}")
    try:
        yield point
    finally:
        subprocess.run(["umount", "--lazy", str(point)], check=True, capture_output=True)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    with mounted(tmp_path) as point:
        yield point


class Unpromised(Faulty):
    """A file whose room is not promised: the disk says that it is full when it is written to."""

    def allocate(self, offset: int, nbytes: int) -> None:
        raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))


def fill(disk: Path) -> Path:
    """Takes every block of ``disk`` that is left."""
    path = disk / "filler"
    with path.open("wb") as file:
        for nbytes in (MIB, 4096):
            try:
                while True:
                    os.posix_fallocate(file.fileno(), file.tell(), nbytes)
                    file.seek(nbytes, os.SEEK_CUR)
            except OSError as error:
                number = error.errno
            assert number == errno.ENOSPC
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


def test_h27_a_filesystem_that_takes_direct_io_and_does_not_do_it_fills_no_page_cache(tmp_path: Path) -> None:
    Watched.opened.clear()
    with mounted(tmp_path, "data=journal") as disk:
        tier, file = open_tier(disk)
        assert not tier.direct_io
        source = noise(20 * MIB + 5)
        slot = stored(tier, source)
        assert file.cached_pages() == 0
        assert torch.equal(content(slot), source)
        assert file.cached_pages() == 0
        assert file.written >= source.numel()
        del slot
        tier.close()
        Watched.opened.clear()


LIMITED = """
import resource, sys, warnings
from pathlib import Path
import torch
from tests.faults.disks import Faulty, make_offload, on_faulty_disk
from tests.faults.test_full_disks import MIB, Unpromised, chain, moved_by

warnings.simplefilter("ignore")
torch.set_num_threads(1)
resource.setrlimit(resource.RLIMIT_FSIZE, (30 * MIB, resource.RLIM_INFINITY))
x = torch.linspace(-3, 3, MIB).requires_grad_()
expected = torch.autograd.grad(chain(x), x)[0]
for file_type, reason in ((Faulty, "budget"), (Unpromised, "budget")):
    with on_faulty_disk(file_type):
        offload = make_offload(Path(sys.argv[1]))
        stats = moved_by(offload, x, expected)
        assert stats.bytes_out > 0 and stats.kept_bytes[reason] >= 4 * MIB, stats
        offload.close()
print("exact")
"""


@pytest.mark.long
def test_h27_a_limit_on_the_size_of_files_is_room_that_is_not_there(tmp_path: Path) -> None:
    assert printed_by("-c", LIMITED, tmp_path) == "exact\n"
    assert list(tmp_path.iterdir()) == []
