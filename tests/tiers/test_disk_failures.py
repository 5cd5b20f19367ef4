"""What a disk tier does when the disk does not do its part."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
import torch

from eager_offload.errors import CorruptionError, TransferError
from tests.tiers.files import Halting, failure
from tests.tiers.rig import MIB, content, noise, open_tier, reserve, stored


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC, errno.EDQUOT, errno.EINVAL])
def test_h27_a_failed_transfer_says_what_where_and_what_to_do(directory: Path, number: int) -> None:
    tier, file = open_tier(directory)
    source, nbytes = noise(100_000), 100_000
    slot = reserve(tier, nbytes)
    file.on_write = failure(number)
    with pytest.raises(TransferError, match=f"write {nbytes} bytes to the spill file in {str(directory)!r}") as raised:
        slot.write(source)
    assert (raised.value.errno, raised.value.tier, raised.value.nbytes) == (number, "disk", nbytes)
    assert os.strerror(number) in str(raised.value)
    assert "disk_path" in str(raised.value)
    file.on_write = None
    slot.write(source)
    file.on_read = failure(number)
    with pytest.raises(TransferError, match=f"read {nbytes} bytes from the spill file") as raised:
        content(slot)
    assert (raised.value.errno, raised.value.tier, raised.value.nbytes) == (number, "disk", nbytes)
    file.on_read = None
    assert torch.equal(content(slot), source), "the tier goes on working"
    assert file.written >= nbytes


@pytest.mark.parametrize("file_type", [Halting])
def test_h27_calls_that_move_nothing_end_in_an_error(directory: Path, file_type: type[Halting]) -> None:
    tier, file = open_tier(directory, file_type)
    assert isinstance(file, Halting)
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
