"""H27: a disk that fills up in the middle of a step, a filesystem of 96 MiB; and a process without descriptors."""

from __future__ import annotations

import errno
import os
import subprocess
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
import torch
from torch import Tensor

from eager_offload import Offload, OffloadStats
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


def fill(disk: Path) -> None:
    """Takes every block of ``disk`` that is left."""
    with (disk / "filler").open("wb") as file, suppress(OSError):
        while True:
            os.posix_fallocate(file.fileno(), os.fstat(file.fileno()).st_size, max(free_bytes(disk) // 2, 4096))
    assert free_bytes(disk) < 4096


def free_bytes(disk: Path) -> int:
    usage = os.statvfs(disk)
    return usage.f_bavail * usage.f_frsize


def chain(x: Tensor, between: Callable[[], None] = lambda: None) -> Tensor:
    """Saves 2 x 9 activations of 4 MiB; ``between`` is called between the halves."""
    for _ in range(9):
        x = x.sigmoid()
    between()
    for _ in range(9):
        x = x.tanh()
    return x.sum()


def moved_by(offload: Offload, x: Tensor, between: Callable[[], None] = lambda: None) -> OffloadStats:
    """What an exact step has moved before its backward, in whose forward ``between`` is called."""
    expected = torch.autograd.grad(chain(x), x)[0]
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
    with on_faulty_disk(file_type):
        offload = make_offload(small_disk, disk_budget=1 << 40)

        def others_fill_it() -> None:
            offload.stats(synchronize=True)  # the first half is on the disk by then
            fill(small_disk)

        full = moved_by(offload, x, others_fill_it)
        assert full.bytes_out > 4 * MIB, "something moved before"
        assert full.kept_bytes["budget" if file_type is Faulty else "failed"] >= 4 * MIB
        (small_disk / "filler").unlink()
        offload.reset_stats()
        again = moved_by(offload, x)
        assert again.bytes_out > 4 * MIB
        assert {"budget", "failed"}.isdisjoint(again.kept_bytes), "there is room again"
        offload.close()
    assert list(small_disk.iterdir()) == [small_disk / "lost+found"]
    record_property("faults", sum(full.fallbacks.values()))


class Scarce(Faulty):
    """A file that cannot be opened while the process has no free descriptor."""

    is_free = False

    def __init__(self, directory: Path) -> None:
        if not Scarce.is_free:
            raise failure(errno.EMFILE)
        super().__init__(directory)


def test_h27_no_free_descriptor_for_a_moment_is_counted_and_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = torch.linspace(-3, 3, MIB).requires_grad_()
    with on_faulty_disk(Scarce):
        offload = make_offload(tmp_path)
        without = moved_by(offload, x)
        assert without.bytes_out == 0
        assert without.fallbacks["no_descriptor"] > 0
        assert without.kept_bytes == {"failed": without.saved_bytes}
        monkeypatch.setattr(Scarce, "is_free", True)
        offload.reset_stats()
        again = moved_by(offload, x)
        assert again.bytes_out > 4 * MIB
        assert again.fallbacks == {}
        offload.close()


def test_h27_no_free_descriptor_to_look_at_memory_with_ends_no_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(process: psutil.Process) -> None:
        raise failure(errno.EMFILE)

    offload = Offload(tier="disk", disk_path=tmp_path, min_bytes=0, device_budget="1GiB")
    monkeypatch.setattr(psutil.Process, "memory_info", refuse)
    assert moved_by(offload, torch.linspace(-3, 3, MIB).requires_grad_()).bytes_out > 4 * MIB
    offload.close()
