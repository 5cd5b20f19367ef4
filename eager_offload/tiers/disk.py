"""The disk tier: saved bytes in a spill file, or in one on each of several disks.

[Note: several disks]
A slot lies on one disk, and slots go to the disks in turn, so that neighbours in a step are on different ones. Each
disk has a thread of its own (``Slot.lane``), so as many transfers as there are disks run at once. A disk that has no
more room is left out until the others have none either.

[Note: files that are left]
Nothing more is cut from the files that are *left*: each closes with the last slot in it, which gives its room back. New
ones take their place when one of several disks fails to write, when an interrupt came in the midst of a change (see
[Note: slabs that are left] in ``pool.py``), and in a forked child.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import ClassVar, cast

import torch

from eager_offload.config import size_text
from eager_offload.errors import CapacityError, ConfigError, reentered
from eager_offload.rates import LinkRates, Rate
from eager_offload.tiers.base import MustGrow, Shortage, Tier
from eager_offload.tiers.directories import open_some, open_spill_files
from eager_offload.tiers.disk_slots import Disk, DiskSlot, DiskSlotRecord
from eager_offload.tiers.finalizers import Living
from eager_offload.tiers.forking import ForkSafeLock, tell_after_fork
from eager_offload.tiers.limits import disk_budget, disk_headroom
from eager_offload.tiers.memory import PAGE, anonymous_slab, round_up
from eager_offload.tiers.ranks import warn_of_guess
from eager_offload.tiers.rawfile import RawFile
from eager_offload.tiers.spill import SpillFile

#: Bytes that measuring moves each way at most, in pieces of a size that a large activation has; and for how long.
_MEASURED_BYTES, _MEASURED_PIECE = 64 << 20, 8 << 20
_MEASURING_SECONDS = 0.8


class _Missing(MustGrow):
    """The file of ``disk`` has to grow by ``nbytes`` bytes, and may by ``limit``."""

    def __init__(self, disk: Disk, nbytes: int, limit: int) -> None:
        super().__init__(nbytes, limit)
        self.disk, self.nbytes, self.limit = disk, nbytes, limit


class DiskTier(Tier):
    """Room on disk, up to ``budget`` bytes in all files.

    The files have no name, grow as room is asked for, and give it back when the tier is closed and the last slot gone.
    No disk is filled: see ``FLOOR_SHARE`` in ``spill.py``. After a fork the child has an empty tier with files of its
    own.

    Args:
        paths: directories, one file in each; slots go to them in turn. Where one of several fails to write, the others
            serve alone from then on. ``None``: the first of the temporary, cache and working directories that is on a
            disk and has room.
        budget: bytes, or ``None`` for a part of what is free on the disks of its directories.
        given: ``budget`` as the user has written it, if that was a text: a shortage repeats it.
        verify: whether to checksum what is written (CRC-32) and check it when it is read.
        file_type: makes the system calls.

    Raises:
        ConfigError: no such file can be made in one of ``paths``.
        OSError: the process has no free file descriptor.
    """

    name: ClassVar[str] = "disk"

    def __init__(
        self,
        paths: Sequence[Path] | None,
        budget: int | None,
        *,
        given: str | None = None,
        verify: bool = False,
        file_type: type[RawFile] = RawFile,
    ) -> None:
        self._paths = paths
        self._verify = verify
        self._file_type = file_type
        self._closed = False
        self._lock = ForkSafeLock()
        #: Of the thread that has files grow; it comes before ``_lock``: see [Note: growth] in ``pool.py``.
        self._growth = ForkSafeLock()
        #: Empty in a forked child that has not asked for room yet.
        self._disks = _disks_of(open_spill_files(paths, budget, file_type))
        #: Whose files are left: only their slots keep them.
        self._left: Living[Disk] = Living()
        self._is_crashed = False
        #: How many slots there were so far.
        self._turn = 0
        # Each disk counts once.
        free = {one.file.device: disk_budget(one.file.directory) for one in self._disks} if budget is None else {}
        self._budget = sum(free.values()) if budget is None else budget
        self._given = None if budget is None else given or size_text(budget)
        self._peak = self._written = 0
        tell_after_fork(self)

    def reserve(self, nbytes: int) -> DiskSlot | None:
        if self._growth.is_held() or self._lock.is_held():  # see [Note: reentry] in forking.py
            raise reentered()
        with self._growth.lock:
            self._reopen()
            refusing = list[Disk]()
            while True:
                try:
                    with self._lock.lock, self._crashing():
                        return self._take(nbytes, refusing)
                except _Missing as missing:
                    disk, grown = missing.disk, missing.disk.grow(missing.nbytes, missing.limit)
                if not grown:
                    disk.is_full = True
                    refusing.append(disk)
                    continue
                with self._lock.lock, self._crashing():
                    disk.add(grown)

    def at_hand(self, nbytes: int) -> DiskSlot | None:
        if self._lock.is_held():
            raise reentered()
        with self._lock.lock, self._crashing():
            if self._needs_files():
                raise MustGrow
            return self._take(nbytes)

    def _take(self, nbytes: int, refusing: Collection[Disk] = ()) -> DiskSlot | None:
        """Returns a slot on one of the disks; ``None`` where budget or disks have no room for it. Inside the lock.

        Raises:
            _Missing: there is none as long as a file does not grow, and its disk is not ``refusing``.
        """
        self._poll()
        size, lacking = round_up(nbytes, PAGE), None
        first = self._turn % max(len(self._disks), 1)
        for disk in (*self._disks[first:], *self._disks[:first]):
            same = disk.ranges.back.get(size) or disk.ranges.fit(size)
            if same:
                self._turn += 1
                slot = DiskSlot(disk, same[-1], nbytes, self._verify)
                disk.records.add(slot.record)
                same.pop()
                disk.used += nbytes
                self._peak = max(self._peak, self._used())
                return slot
            missing, limit = disk.missing(size), self._budget - self._length()
            if missing <= limit and disk not in refusing:
                lacking = disk, missing, limit
                if not disk.is_full:
                    break
        if lacking is None:
            return None
        raise _Missing(*lacking)

    @contextmanager
    def _crashing(self) -> Iterator[None]:
        """Marks the tier as crashed by an exception that is not its own: not all of its files is known then."""
        try:
            yield
        except MustGrow:
            raise
        except BaseException:
            self._is_crashed = True
            raise

    @property
    def lanes(self) -> int:
        return max(len(self._disks), 1)

    def warn(self, said: set[str]) -> None:
        if self._given is None:
            warn_of_guess()

    @property
    def shortage(self) -> Shortage:
        """What binds now: disks that fail, the budget, or the disk that has the most room."""
        with self._lock.lock:
            files, left = [disk.file for disk in self._disks], self._budget - self._length()
            if not files:
                return Shortage("no directory serves any more", "name another one in disk_path")
            growing = [file for file in files if file.refusal is None]
            if not growing:
                first = files[0]
                return Shortage(
                    f"the spill file in {str(first.directory)!r} cannot grow: {first.refusal}",
                    "check the disk (the kernel's log says more), or name another one in disk_path",
                )
            roomiest = max(growing, key=SpillFile.room)
            room, length = roomiest.room(), self._length()
            if left <= room and self._given is not None:
                return Shortage(f"all of disk_budget is in use: {self._given}", "raise disk_budget")
        try:
            limit = disk_headroom(roomiest.directory, length=length).binding
        except OSError as error:
            return Shortage(
                f"the disk of {roomiest.directory} does not answer ({error})", "name another one in disk_path"
            )
        if limit.kind == "rlimit":
            return Shortage(limit.reason, limit.remedy)
        if left <= room:
            return Shortage(
                f"the {size_text(self._budget)} that this process takes of the disk of {roomiest.directory} are in "
                f"use, and it has {size_text(room)} more for others",
                "free some room there and begin anew, or give a disk_budget",
            )
        return Shortage(f"{limit.reason}, and some of it is always left to others", limit.remedy)

    @property
    def used_bytes(self) -> int:
        self.poll()
        with self._lock.lock:
            return self._used()

    @property
    def held_bytes(self) -> int:
        """Bytes of all files."""
        with self._lock.lock:
            return self._length()

    @property
    def peak_bytes(self) -> int:
        return self._peak

    def restart_peak(self) -> None:
        self.poll()
        with self._lock.lock:
            self._peak = self._used()

    @property
    def written_bytes(self) -> int:
        """Bytes that this process has written to the disks so far."""
        self.poll()
        return self._written

    @property
    def directories(self) -> list[Path]:
        """Where the files are."""
        return [disk.file.directory for disk in self._disks]

    @property
    def direct_io(self) -> bool:
        """Whether transfers go around the page cache, on every disk."""
        disks = self._disks
        return bool(disks) and all(disk.file.memory_alignment is not None for disk in disks)

    def poll(self) -> None:
        """Takes up the slots that have died; once all have, gives the buffers of transfers back to the system."""
        if not self._lock.is_held():  # see [Note: reentry] in forking.py
            with self._lock.lock, self._crashing():
                self._poll()

    def measure(self) -> LinkRates:
        """Measures what one transfer at a time reaches, through the tier itself. Ask ``machine.disk_link``, which
        measures once.

        Raises:
            CapacityError: there is no room to try it.
            TransferError: the disk failed.
        """
        source = anonymous_slab(_MEASURED_PIECE)
        # Not zeros: filesystems and disks that compress would make nothing of them. And not from torch's own generator:
        # the next dropout would differ from that of a run without offload.
        source.view(torch.int64).random_(generator=torch.Generator())
        slots: list[DiskSlot] = []
        while len(slots) * _MEASURED_PIECE < _MEASURED_BYTES and (slot := self.reserve(_MEASURED_PIECE)) is not None:
            slots.append(slot)
        if not slots:
            raise CapacityError(f"there is no room for {_MEASURED_PIECE} bytes in the disk tier to measure it with")
        write = _timed([partial(slot.write, source) for slot in slots])
        read = _timed([partial(slot.read, source) for slot in slots[: len(write)]])
        # The first piece is left out, unless no other was reached: a file grows, and pages are touched.
        return LinkRates(*[Rate.of(_MEASURED_PIECE, seconds[1:] or seconds) for seconds in (write, read)])

    def close(self) -> None:
        with self._lock.lock:
            self._closed = True
            self._leave()

    def after_fork(self) -> None:
        self._left, self._disks = Living(), ()

    def _needs_files(self) -> bool:
        """Returns whether there are none to cut slots from, or one that fails: see [Note: files that are left]."""
        disks = () if self._is_crashed else self._disks
        return not self._closed and (not disks or (len(disks) > 1 and any(disk.file.failing for disk in disks)))

    def _reopen(self) -> None:
        """Has new files where they are needed and can be had."""
        self.poll()
        if not self._needs_files():
            return
        directories, files = [disk.file.directory for disk in self._disks if not disk.file.failing], list[SpillFile]()
        if self._disks:
            files = open_some(directories, self._file_type)
        else:
            with suppress(ConfigError, OSError):  # what served before is gone: a tier without room, not one that fails
                files = open_spill_files(self._paths, self._budget, self._file_type)
        with self._lock.lock:
            if files and not self._closed:
                self._leave()
                self._disks = _disks_of(files)

    # -- inside the lock ------------------------------------------------------------------------------------------

    def _leave(self) -> None:
        """Lets go of the files, each of which closes when the last slot that refers to it goes."""
        for disk in self._disks:
            self._left.add(disk)
        self._disks = ()

    def _all(self) -> list[Disk]:
        return [*self._disks, *self._left]

    def _poll(self) -> None:
        if self._is_crashed:
            self._leave()
            for disk in self._left:
                disk.used = sum([cast(DiskSlotRecord, record).nbytes for record in disk.records])
            self._is_crashed = False
        for disk in self._all():
            self._written += disk.poll()

    def _used(self) -> int:
        return sum([disk.used for disk in self._all()])

    def _length(self) -> int:
        return sum([disk.slab.nbytes for disk in self._all()])


def _disks_of(files: Sequence[SpillFile]) -> tuple[Disk, ...]:
    return tuple([Disk(file, lane) for lane, file in enumerate(files)])


def _timed(calls: Sequence[Callable[[], object]]) -> list[float]:
    """Makes calls until the time for it is over. Returns the seconds of each call that was made."""
    seconds = list[float]()
    for call in calls:
        started = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - started)
        if sum(seconds) > _MEASURING_SECONDS:
            break
    return seconds
