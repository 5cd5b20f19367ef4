"""What a disk tier does when the disk does not do its part."""

from __future__ import annotations

import errno
import os
import re
from pathlib import Path

import pytest
import torch

from eager_offload.errors import CorruptionError, TransferError
from tests.tiers.files import Computing, Halting, failure
from tests.tiers.rig import MIB, content, noise, open_tier, reserve, stored

ERRNOS = [
    errno.EIO, errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.ENOMEM, errno.EROFS, errno.EBADF, errno.EINVAL,
    errno.ENXIO, errno.ENODEV, errno.EPERM, errno.ESTALE, errno.ETIMEDOUT, errno.EFAULT, errno.EOVERFLOW,
]  # fmt: skip


@pytest.mark.parametrize("number", ERRNOS, ids=lambda number: errno.errorcode[number])
def test_h27_a_failed_transfer_says_what_where_and_what_to_do(directory: Path, number: int) -> None:
    tier, file = open_tier(directory)
    source, nbytes = noise(100_000), 100_000
    slot = reserve(tier, nbytes)
    file.on_write = failure(number)
    with pytest.raises(TransferError, match=f"write {nbytes} bytes to the spill file in {str(directory)!r}") as raised:
        slot.write(source)
    assert (raised.value.errno, raised.value.tier, raised.value.nbytes) == (number, "disk", nbytes)
    assert os.strerror(number) in str(raised.value)
    assert "What to do: " in str(raised.value)
    assert "disk_budget" not in str(raised.value)
    is_full = number in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
    assert bool(re.search(r", with [\d.,]+ [KMGT]?i?B free\. What to do", str(raised.value))) is is_full
    assert ("lower max_inflight_bytes" if number == errno.ENOMEM else "disk_path") in str(raised.value)
    file.on_write = None
    slot.write(source)
    file.on_read = failure(number)
    with pytest.raises(TransferError, match=f"read {nbytes} bytes from the spill file") as raised:
        content(slot)
    assert (raised.value.errno, raised.value.tier, raised.value.nbytes) == (number, "disk", nbytes)
    file.on_read = None
    assert torch.equal(content(slot), source), "the tier goes on working"
    assert file.written >= nbytes


def test_h27_calls_that_move_nothing_end_in_an_error(directory: Path) -> None:
    tier, file = open_tier(directory, Halting)
    slot = stored(tier, noise(10_000))
    file.halt(0)
    for transfer in (slot.write, slot.read):
        with pytest.raises(TransferError, match="Input/output error") as raised:
            transfer(noise(10_000))
        assert raised.value.errno == errno.EIO


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO])
def test_h27_a_disk_that_is_full_is_no_room_and_room_once_it_is_not(directory: Path, number: int) -> None:
    tier, file = open_tier(directory)
    slot = stored(tier, noise(60 * MIB))
    file.on_allocate = failure(number)
    assert tier.reserve(10 * MIB) is None
    assert tier.held_bytes == file.stat.st_size == 64 * MIB
    small = stored(tier, noise(MIB, 1))
    assert torch.equal(content(small), noise(MIB, 1)), "what the file has already can still be used"
    file.on_allocate = None
    assert reserve(tier, 10 * MIB).nbytes == 10 * MIB
    assert torch.equal(content(slot), noise(60 * MIB))


def test_h27_a_filesystem_that_cannot_promise_room_is_used_all_the_same(directory: Path) -> None:
    tier, file = open_tier(directory)
    file.on_allocate = failure(errno.EOPNOTSUPP)
    source = noise(MIB)
    assert torch.equal(content(stored(tier, source)), source)
    assert file.stat.st_size == tier.held_bytes == 64 * MIB
    assert file.written >= MIB


def test_h27_more_than_the_disk_has_is_never_asked_for(directory: Path) -> None:
    tier, file = open_tier(directory, budget=1 << 60)
    assert tier.reserve(1 << 50) is None
    assert file.stat.st_size == 0


@pytest.mark.parametrize("at", [0, 50_000, 99_999])
def test_what_comes_back_changed_is_an_error_if_it_is_verified(directory: Path, at: int) -> None:
    tier, file = open_tier(directory, verify=True)
    source = noise(100_000)
    slot = stored(tier, source)
    assert torch.equal(content(slot), source)
    file.overwrite(slot.region.start + at, bytes([source[at] ^ 1]))
    with pytest.raises(CorruptionError, match="100000 bytes came back changed"):
        content(slot)
    slot.write(source)
    assert torch.equal(content(slot), source)
    assert file.written >= 200_000


def test_h33_a_neighbour_that_changes_while_it_leaves_is_not_taken_for_a_fault_of_the_disk(directory: Path) -> None:
    # The storage of a GRU's gates leaves for one gate while the next one is still computed in place.
    tier, file = open_tier(directory, Computing, verify=True)
    source = noise(100_000)
    saved, slot = source.clone(), reserve(tier, 100_000)
    assert isinstance(file, Computing)
    file.goes_on = lambda: source[50_000:].add_(1)
    slot.write(source)
    assert not torch.equal(source, saved)
    assert torch.equal(content(slot), saved)
    assert file.written >= 100_000
