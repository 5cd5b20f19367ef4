"""Several disks: one tensor uses all of them, exactly; and what becomes of it when one fails."""

from __future__ import annotations

import errno
import random
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from torch import Tensor

from eager_offload.errors import TransferError
from eager_offload.tiers import space as spaces
from eager_offload.tiers.disk import DiskSlot, DiskTier
from tests.tiers.files import Cached, Watched, failure
from tests.tiers.rig import MIB, content, noise, reserve, stored

STRIPE = 4 * MIB


def tier_over(directory: Path, several: int, file_type: type[Watched] = Watched) -> tuple[DiskTier, list[Watched]]:
    paths = [directory / str(number) for number in range(several)]
    for path in paths:
        path.mkdir(exist_ok=True)
    return DiskTier(paths, 512 * MIB, file_type=file_type), list(Watched.opened)


def piece_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("eager_offload-piece")]


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


def test_slots_over_stripe_borders_share_no_byte(directory: Path) -> None:
    (tier, files), chance = tier_over(directory, 3), random.Random(0)
    slots: list[tuple[DiskSlot, Tensor]] = []
    for seed in range(60):
        if slots and chance.random() < 0.3:
            slots.pop(chance.randrange(len(slots)))
        source = noise(chance.choice([1, 5000, 3 * MIB, STRIPE, STRIPE + 1, 11 * MIB + 7]), seed)
        slots.append((stored(tier, source), source))
    assert all(torch.equal(content(slot), source) for slot, source in slots)
    assert all(file.written > 0 for file in files)
    assert tier.held_bytes == sum(file.stat.st_size for file in files)
    slots.clear()
    assert tier.used_bytes == 0
    tier.close()


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


def test_one_disk_gets_pieces_as_deep_as_the_search_says(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    most, under, lock = 0, 0, threading.Lock()

    class Counting(Watched):
        def write_from(self, source: memoryview, offset: int) -> int:
            nonlocal most, under
            with lock:
                under += 1
                most = max(most, under)
            try:
                return super().write_from(source, offset)
            finally:
                with lock:
                    under -= 1

    tier, (file,) = tier_over(directory, 1, Counting)
    source = noise(8 * MIB + 4097)
    slot = reserve(tier, source.numel())
    space = tier._space
    assert isinstance(space, spaces.Space)
    for depth in (1, 2, 4, 8):
        space._depths["write"].depth = depth
        monkeypatch.setattr(space._depths["write"], "note", lambda *_: None)
        most = 0
        slot.write(source)
        assert most <= depth
        assert torch.equal(content(slot), source)
    assert file.written >= 4 * source.numel()
    assert len(piece_threads()) <= 7
    tier.close()
    assert piece_threads() == []


def test_a_run_of_transfers_finds_a_depth(directory: Path) -> None:
    tier, (file,) = tier_over(directory, 1)
    source = noise(8 * MIB)
    slot, space = reserve(tier, source.numel()), tier._space
    assert space is not None
    for _ in range(40):
        slot.write(source)
    assert space._depths["write"].settled
    assert space.depth("write") in (1, 2, 4, 8)
    assert torch.equal(content(slot), source)
    assert file.written >= 40 * source.numel()
    tier.close()
    assert piece_threads() == []


def test_a_tier_that_is_dropped_ends_its_threads(directory: Path) -> None:
    tier, _ = tier_over(directory, 2)
    stored(tier, noise(4 * STRIPE))
    helpers = [thread for thread in threading.enumerate() if thread.name.startswith("eager_offload-piece")]
    assert helpers
    del tier
    for thread in helpers:
        thread.join(60)
        assert not thread.is_alive()


FORKED = """
import os, signal, sys, threading, torch
from pathlib import Path
from eager_offload.tiers.disk import DiskTier

torch.set_num_threads(1)
paths = [Path(sys.argv[1])] * 2
tier = DiskTier(paths, 1 << 30)
ones, twos = (torch.full((16 << 20,), value, dtype=torch.uint8) for value in (1, 2))

def there_and_back(source):
    slot, target = tier.reserve(source.numel()), torch.zeros_like(source)
    slot.write(source)
    slot.read(target)
    return torch.equal(target, source)

assert there_and_back(ones)
assert any(thread.name.startswith("eager_offload-piece") for thread in threading.enumerate())
child = os.fork()
if child == 0:
    signal.alarm(60)
    assert not any(thread.name.startswith("eager_offload-piece") for thread in threading.enumerate())
    assert there_and_back(twos)
    assert any(thread.name.startswith("eager_offload-piece") for thread in threading.enumerate())
    tier.close()
    os._exit(0)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
assert there_and_back(ones)
tier.close()
assert threading.active_count() == 1
print("exact")
"""


def test_h28_a_child_that_was_forked_beside_helping_threads_has_its_own(directory: Path) -> None:
    done = subprocess.run([sys.executable, "-c", FORKED, str(directory)], capture_output=True, text=True, timeout=120)
    assert (done.stdout, done.returncode) == ("exact\n", 0), done.stderr
    assert list(directory.iterdir()) == []
