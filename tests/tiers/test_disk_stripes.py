"""Several disks: one tensor uses all of them, exactly; and what becomes of it when one fails."""

from __future__ import annotations

import errno
import threading
from pathlib import Path

import pytest
import torch

from eager_offload.errors import TransferError
from eager_offload.tiers.disk import DiskTier
from eager_offload.tiers.forking import OwnThread
from tests.tiers.files import Cached, Watched, failure
from tests.tiers.rig import MIB, content, noise, reserve, stored

STRIPE = 4 * MIB


def tier_over(directory: Path, several: int, file_type: type[Watched] = Watched) -> tuple[DiskTier, list[Watched]]:
    paths = [directory / str(number) for number in range(several)]
    for path in paths:
        path.mkdir(exist_ok=True)
    return DiskTier(paths, 512 * MIB, file_type=file_type), list(Watched.opened)


def piece_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("eager_offload-disk")]


@pytest.mark.parametrize("file_type", [Watched, Cached])
@pytest.mark.parametrize("several", [2, 3])
def test_a_large_slot_is_spread_over_all_disks_and_comes_back_exact(
    directory: Path, several: int, file_type: type[Watched]
) -> None:
    tier, files = tier_over(directory, several, file_type)
    source = noise(9 * STRIPE + 12_345)
    slot = stored(tier, source)
    assert torch.equal(content(slot), source)
    shares = [file.written for file in files]
    assert sum(shares) >= source.numel()
    assert max(shares) - min(shares) <= STRIPE + 4096
    assert [file.read for file in files] == pytest.approx(shares, abs=STRIPE)
    tier.close()
    assert piece_threads() == []


def test_the_memory_of_a_striped_slot_is_one_piece(directory: Path) -> None:
    tier, _ = tier_over(directory, 2)
    source = noise(3 * STRIPE + 5)
    slot = stored(tier, source)
    memory = slot.memory()
    assert bytes(memory) == source.numpy().tobytes()
    slot.write(noise(3 * STRIPE + 5, 1))
    assert bytes(memory) == noise(3 * STRIPE + 5, 1).numpy().tobytes()
    tier.close()


def test_a_disk_that_is_full_is_left_out_of_what_is_added(directory: Path) -> None:
    tier, (one, two) = tier_over(directory, 2)
    first = stored(tier, noise(2 * STRIPE))
    assert one.stat.st_size == two.stat.st_size == 64 * MIB
    two.on_allocate = failure(errno.ENOSPC)
    large = noise(130 * MIB, 1)
    second = stored(tier, large)
    assert two.stat.st_size == 64 * MIB
    assert tier.held_bytes == one.stat.st_size + two.stat.st_size
    assert torch.equal(content(first), noise(2 * STRIPE))
    assert torch.equal(content(second), large)
    tier.close()


def test_h27_a_disk_that_fails_to_write_is_named_and_the_others_serve_alone(directory: Path) -> None:
    tier, (_, two) = tier_over(directory, 2)
    source = noise(4 * STRIPE)
    before, slot = stored(tier, source), reserve(tier, 4 * STRIPE)
    two.on_write = failure(errno.EIO)
    with pytest.raises(TransferError, match=r"could not write 16777216 bytes .*/1'.*Input/output error"):
        slot.write(source)
    again = stored(tier, source)
    assert tier.directories == [directory / "0"]
    assert len(Watched.opened) == 3
    assert Watched.opened[2].written >= source.numel()
    assert torch.equal(content(again), source)
    assert torch.equal(content(before), source), "what the failing disk has can still be read"
    two.on_write = None  # the error that it raised leads to the frames that it ended
    del before, slot
    assert tier.used_bytes == 4 * STRIPE
    assert tier.held_bytes == 64 * MIB
    tier.close()
    assert piece_threads() == []


def test_h27_a_disk_that_fails_to_read_is_named_and_nothing_is_under_way_then(directory: Path) -> None:
    tier, (one, two) = tier_over(directory, 2)
    source = noise(6 * STRIPE)
    slot = stored(tier, source)
    one.on_read = failure(errno.EIO)
    with pytest.raises(TransferError, match=r"could not read 25165824 bytes .*/0'"):
        content(slot)
    read = two.read
    one.on_read = None
    assert torch.equal(content(slot), source)
    assert two.read - read == source.numel() // 2
    tier.close()


def test_one_disk_needs_no_thread_and_several_as_many_as_there_are_others(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started, start = list[OwnThread](), OwnThread.start

    def starting(thread: OwnThread) -> None:
        started.append(thread)
        start(thread)

    monkeypatch.setattr(OwnThread, "start", starting)
    source = noise(4 * STRIPE)
    for several in (1, 3):
        tier, files = tier_over(directory, several)
        slot = stored(tier, source)
        assert len(started) == several - 1
        assert torch.equal(content(slot), source)
        assert len(started) == 2 * (several - 1)
        assert piece_threads() == []
        assert sum(file.written for file in files) >= source.numel()
        del slot
        tier.close()
        assert piece_threads() == []


def test_all_disks_are_written_at_the_same_time(directory: Path) -> None:
    together = threading.Barrier(3)

    class Meeting(Watched):
        def write_from(self, source: memoryview, offset: int) -> int:
            if len(source) == STRIPE:
                together.wait(60)  # comes to an end only if all three are at it at once
            return super().write_from(source, offset)

    tier, _ = tier_over(directory, 3, Meeting)
    source = noise(3 * STRIPE)
    assert torch.equal(content(stored(tier, source)), source)
    assert not together.broken
    tier.close()


def test_where_no_thread_can_be_started_one_does_it_all(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    tier, files = tier_over(directory, 2)
    source = noise(4 * STRIPE)
    for _ in range(3):
        assert torch.equal(content(stored(tier, source)), source)
    assert all(file.written >= 3 * source.numel() // 2 for file in files)
    tier.close()
