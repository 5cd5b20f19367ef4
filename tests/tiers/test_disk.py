"""The disk tier: exact bytes through a file that nobody else can see, and what happens when the disk fails."""

from __future__ import annotations

import errno
import gc
import os
import random
import signal
import stat
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from eager_offload.errors import CapacityError, ConfigError, CorruptionError, OffloadError, TransferError
from eager_offload.tiers.arena import anonymous_slab
from eager_offload.tiers.directories import filesystem_of
from eager_offload.tiers.disk import DiskSlot, DiskTier
from eager_offload.tiers.memory import PAGE
from eager_offload.tiers.rawfile import RawFile
from tests.tiers.files import Cached, Halting, Picky, Watched, failure
from tests.tiers.verdicts import Verdicts

MIB = 1 << 20
SIZES = [1, 4095, 4096, 4097, 70_001, 10 * MIB + 3]


def noise(nbytes: int, seed: int = 0) -> Tensor:
    return torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def reserve(tier: DiskTier, nbytes: int) -> DiskSlot:
    slot = tier.reserve(nbytes)
    assert slot is not None
    return slot


def stored(tier: DiskTier, source: Tensor) -> DiskSlot:
    slot = reserve(tier, source.numel())
    slot.write(source)
    return slot


def content(slot: DiskSlot) -> Tensor:
    target = torch.zeros(slot.nbytes, dtype=torch.uint8)
    slot.read(target)
    return target


@pytest.fixture(autouse=True)
def _opened() -> Iterator[None]:
    Watched.opened.clear()
    yield
    Watched.opened.clear()


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    assert filesystem_of(tmp_path) != "tmpfs", "these tests need a temporary directory on a disk"
    return tmp_path


def open_tier(
    directory: Path, file_type: type[Watched] = Watched, budget: int = 256 * MIB, *, verify: bool = False
) -> tuple[DiskTier, Watched]:
    tier = DiskTier([directory], budget, verify=verify, file_type=file_type)
    return tier, Watched.opened[-1]


# -- bytes ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("file_type", [Watched, Cached])
@pytest.mark.parametrize("nbytes", SIZES)
def test_bytes_come_back_exact_from_and_to_any_address(directory: Path, nbytes: int, file_type: type[Watched]) -> None:
    tier, file = open_tier(directory, file_type)
    slot = reserve(tier, nbytes)
    for phase in (0, 1, 7, 32, 63) if nbytes > MIB else range(64):
        pages = anonymous_slab(nbytes + 64).copy_(noise(nbytes + 64, phase))
        source = pages[phase : phase + nbytes]
        before = file.written, file.read
        slot.write(source)
        target = anonymous_slab(nbytes + 64)
        slot.read(target[phase : phase + nbytes])
        assert torch.equal(target[phase : phase + nbytes], source)
        assert not target[:phase].any()
        assert not target[phase + nbytes :].any(), "a transfer stays within its target"
        assert file.written - before[0] >= nbytes
        assert file.read - before[1] >= nbytes
    assert tier.used_bytes == nbytes


def test_slots_that_live_together_share_no_byte(directory: Path) -> None:
    (tier, file), chance = open_tier(directory), random.Random(0)
    slots: list[tuple[DiskSlot, Tensor]] = []
    for seed in range(150):
        if slots and chance.random() < 0.4:
            slot, source = slots.pop(chance.randrange(len(slots)))
            assert torch.equal(content(slot), source)
            del slot
        source = noise(chance.choice([1, 4096, 5000, 70_000, 600_000]), seed)
        slots.append((stored(tier, source), source))
    assert all(torch.equal(content(slot), source) for slot, source in slots)
    assert tier.used_bytes == sum(source.numel() for _, source in slots) > MIB
    assert len({slot.region for slot, _ in slots}) == len(slots)
    assert file.written > tier.used_bytes
    slots.clear()
    assert tier.used_bytes == 0
    assert tier.held_bytes == file.stat.st_size == 64 * MIB


def test_threads_that_transfer_at_once_keep_their_bytes(directory: Path) -> None:
    (tier, file), failures = open_tier(directory), []

    def work(seed: int) -> None:
        for step in range(10):
            source = noise(3 * MIB + 1 + 64 * seed, 1000 * seed + step)
            if not torch.equal(content(stored(tier, source)), source):
                failures.append((seed, step))

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(7)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert file.read >= 70 * 3 * MIB
    assert tier.used_bytes == 0


@pytest.mark.parametrize("file_type", [Watched, Cached])
def test_h27_the_page_cache_keeps_nothing_even_where_direct_io_is_refused(
    directory: Path, file_type: type[Watched]
) -> None:
    tier, file = open_tier(directory, file_type)
    source = noise(40 * MIB + 5)
    slot = stored(tier, source)
    assert file.written >= source.numel()
    assert file.cached_pages() == 0
    assert torch.equal(content(slot), source)
    assert file.cached_pages() == 0


def test_h27_a_device_that_asks_for_more_alignment_than_the_probe_found_gets_it(directory: Path) -> None:
    tier, file = open_tier(directory, Picky)
    assert isinstance(file, Picky)
    source = anonymous_slab(MIB + 512)[512:].copy_(noise(MIB))
    slot = stored(tier, source)
    again = stored(tier, source)
    assert file.refused <= 1
    assert torch.equal(content(slot), source)
    assert torch.equal(content(again), source)
    assert file.written >= 2 * MIB


@pytest.mark.parametrize("lengths", [(4096,), (8192, 0, 0), (4097,), (5000, 1, 12_288), (1 << 30, 100)])
@pytest.mark.parametrize("nbytes", [4097, 3 * MIB + 3])
def test_h27_short_reads_and_writes_are_continued(directory: Path, nbytes: int, lengths: tuple[int, ...]) -> None:
    tier, file = open_tier(directory, Halting)
    assert isinstance(file, Halting)
    source = anonymous_slab(nbytes).copy_(noise(nbytes))
    slot = reserve(tier, nbytes)
    file.halt(*lengths)
    slot.write(source)
    file.halt()
    assert torch.equal(content(slot), source)
    file.halt(*lengths)
    target = anonymous_slab(nbytes)
    slot.read(target)
    assert torch.equal(target, source)
    assert file.written >= nbytes


# -- failures ---------------------------------------------------------------------------------------------------------


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


# -- room -------------------------------------------------------------------------------------------------------------


def test_the_file_grows_in_steps_within_the_budget(directory: Path) -> None:
    tier, file = open_tier(directory, budget=100 * MIB + 5000)
    one = reserve(tier, 5000)
    assert tier.held_bytes == file.stat.st_size == 64 * MIB
    two = reserve(tier, 90 * MIB)
    assert tier.held_bytes == file.stat.st_size <= 100 * MIB + 5000
    assert tier.reserve(90 * MIB) is None
    three = reserve(tier, 9 * MIB)
    assert tier.used_bytes == 5000 + 99 * MIB
    assert len({one.region, two.region, three.region}) == 3
    assert DiskTier([directory], 0).reserve(1) is None
    assert DiskTier([directory], 4095).reserve(1) is None
    tiny = DiskTier([directory], 8192)
    assert reserve(tiny, 4097).nbytes == 4097
    assert tiny.reserve(1) is not None, "its slot has gone already"


def test_h25_a_thousand_steps_leave_the_file_as_it_was(directory: Path) -> None:
    tier, file = open_tier(directory)
    gc.collect()
    descriptors, seen = len(os.listdir("/proc/self/fd")), set()
    for _ in range(1000):
        step = [reserve(tier, nbytes) for nbytes in (100, 70_000, 3 * MIB)]
        step[0].write(noise(100))
        del step
        seen.add((tier.used_bytes, tier.held_bytes, file.stat.st_blocks, len(os.listdir("/proc/self/fd"))))
    assert seen == {(0, 64 * MIB, next(iter(seen))[2], descriptors)}
    assert file.written >= 1000 * PAGE


def test_a_slot_carries_the_fences_of_its_range(directory: Path) -> None:
    verdicts = Verdicts()
    tier, _ = open_tier(directory)
    slot = reserve(tier, 10_000)
    slot.fences += (verdicts.fence("read"),)
    cycle: list[object] = [slot]
    cycle.append(cycle)
    del slot, cycle
    gc.collect()
    heir = reserve(tier, 12_000)
    assert heir.fences == (verdicts.fence("read"),)
    del heir
    assert reserve(tier, 64 * MIB).fences == (verdicts.fence("read"),), "an heir that was never used hands it on"
    verdicts.over.add("read")
    assert reserve(tier, 12_000).fences == ()


def test_a_finalizer_that_runs_in_a_locked_section_does_not_deadlock(directory: Path) -> None:
    doomed: list[object] = []

    class Dropping(Watched):
        def allocate(self, offset: int, nbytes: int) -> None:  # called with the tier's lock held
            doomed.clear()
            super().allocate(offset, nbytes)

    tier, _ = open_tier(directory, Dropping)
    doomed += [reserve(tier, 5000), reserve(tier, 5000)]
    slot = reserve(tier, 65 * MIB)
    assert tier.used_bytes == slot.nbytes


# -- files ------------------------------------------------------------------------------------------------------------


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
    assert not os.get_inheritable(file._descriptor)
    assert torch.equal(content(slot), noise(MIB))
    assert file.written >= MIB


def test_closing_leaves_living_slots_alone_and_the_last_one_closes_the_file(directory: Path) -> None:
    gc.collect()
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
    gc.collect()
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


def test_of_several_directories_the_next_serves_where_one_is_full(directory: Path) -> None:
    paths = [directory / "one", directory / "two"]
    for path in paths:
        path.mkdir()
    tier = DiskTier(paths, 256 * MIB, file_type=Watched)
    one, two = Watched.opened
    one.on_allocate = failure(errno.ENOSPC)
    slot = stored(tier, noise(MIB))
    assert (one.stat.st_size, two.stat.st_size) == (0, 64 * MIB)
    assert torch.equal(content(slot), noise(MIB))
    one.on_allocate = None
    other = stored(tier, noise(100 * MIB))
    assert torch.equal(content(other), noise(100 * MIB))
    assert tier.held_bytes == one.stat.st_size + two.stat.st_size
    assert tier.directories == paths


def test_mount_points_with_odd_names_and_mounts_over_mounts_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    table = (
        "1 0 8:1 / / rw - ext4 /dev/sda rw\n"
        "2 1 0:1 / /a\\040b rw shared:1 - tmpfs tmpfs rw\n"
        "3 1 0:2 / /over rw - tmpfs tmpfs rw\n"
        "4 3 0:3 / /over rw - xfs /dev/sdb rw\n"
    )
    monkeypatch.setattr(Path, "read_text", lambda *_, **__: table)
    assert filesystem_of(Path("/a b/c")) == "tmpfs"
    assert filesystem_of(Path("/a")) == "ext4"
    assert filesystem_of(Path("/over/here")) == "xfs"


# -- measuring --------------------------------------------------------------------------------------------------------


def test_measuring_moves_little_is_remembered_and_leaves_no_trace(directory: Path) -> None:
    tier, file = open_tier(directory)
    state = torch.get_rng_state()
    first = tier.measure()
    assert torch.equal(torch.get_rng_state(), state), "the next dropout would differ"
    moved = file.written
    assert 0 < moved <= 65 * MIB
    assert min(first.write, first.read) > 0
    assert tier.measure() is first
    assert file.written == moved
    assert tier.used_bytes == 0
    with pytest.raises(CapacityError, match="no room"):
        DiskTier([directory], MIB).measure()


# -- processes --------------------------------------------------------------------------------------------------------

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

tier = DiskTier([directory], 1 << 30, file_type=Slow)
ones, twos = (torch.full((1 << 20,), value, dtype=torch.uint8) for value in (1, 2))
slot, doomed = tier.reserve(1 << 20), tier.reserve(1 << 20)
slot.write(ones)
doomed.write(ones)
thread = threading.Thread(target=lambda: tier.reserve(65 << 20))
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
    own = [tier.reserve(1 << 20) for _ in range(4)]
    target = torch.zeros_like(twos)
    for one in own:
        one.write(twos)
        one.read(target)
        assert torch.equal(target, twos)
    assert tier.used_bytes == 4 << 20
    assert own[0].region.space != slot.region.space
    os._exit(0)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
leave.set()
thread.join()
target = torch.zeros_like(ones)
for one in (slot, doomed):
    one.read(target)
    assert torch.equal(target, ones)
assert tier.used_bytes == 2 << 20
assert os.listdir(directory) == []
print("exact")
"""


def test_h28_a_forked_child_never_touches_its_parents_file(directory: Path) -> None:
    done = subprocess.run([sys.executable, "-c", FORKED, str(directory)], capture_output=True, text=True, timeout=120)
    assert (done.stdout, done.returncode) == ("exact\n", 0), done.stderr


KILLED = """
import sys, torch
from pathlib import Path
from eager_offload.tiers.disk import DiskTier

tier = DiskTier([Path(sys.argv[1])], 1 << 30)
slot = tier.reserve(64 << 20)
slot.write(torch.ones(64 << 20, dtype=torch.uint8))
print("written", flush=True)
if sys.argv[2] == "wait":
    sys.stdin.read()
"""


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGTERM, None])
def test_h28_no_file_is_left_behind_however_the_process_ends(directory: Path, end: signal.Signals | None) -> None:
    command = [sys.executable, "-c", KILLED, str(directory), "exit" if end is None else "wait"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "written\n"
        assert list(directory.iterdir()) == []
        if end is not None:
            process.send_signal(end)
        assert process.wait(60) == (0 if end is None else -end)
    assert list(directory.iterdir()) == []


def test_an_inherited_slot_names_the_fork_as_the_reason(directory: Path) -> None:
    tier, _ = open_tier(directory)
    slot = stored(tier, noise(5000))
    slot._file.inherited = True
    with pytest.raises(OffloadError, match="forked from"):
        content(slot)
