"""The disk tier: saved bytes in a spill file.

[Note: files that are left]
Nothing more is cut from a file that is *left*: it closes with the last slot in it, which gives its room back. A new one
takes its place when an interrupt came in the midst of a change (see [Note: slabs that are left] in ``pool.py``), and in
a forked child.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import ClassVar, cast

import torch

from eager_offload.config import PathLike, size_text
from eager_offload.errors import CapacityError, ConfigError, reentered
from eager_offload.rates import LinkRates, Rate
from eager_offload.tiers.base import MustGrow, Shortage, Tier
from eager_offload.tiers.directories import open_spill_file
from eager_offload.tiers.disk_slots import Disk, DiskSlot, DiskSlotRecord
from eager_offload.tiers.finalizers import Living
from eager_offload.tiers.forking import ForkSafeLock, tell_after_fork
from eager_offload.tiers.limits import disk_budget, disk_headroom
from eager_offload.tiers.memory import PAGE, anonymous_slab, round_up
from eager_offload.tiers.ranks import warning_of_guess
from eager_offload.tiers.rawfile import RawFile

#: Bytes that measuring moves each way at most, in pieces of a size that a large activation has; and for how long.
_MEASURED_BYTES, _MEASURED_PIECE = 64 << 20, 8 << 20
_MEASURING_SECONDS = 0.8


class _Missing(MustGrow):
    """The file has to grow by ``nbytes`` bytes, and may by ``limit``."""

    def __init__(self, disk: Disk, nbytes: int, limit: int) -> None:
        super().__init__(nbytes, limit)
        self.disk, self.nbytes, self.limit = disk, nbytes, limit


class DiskTier(Tier):
    """Room on disk, up to ``budget`` bytes.

    The file has no name, grows as room is asked for, and gives it back when the tier is closed and the last slot gone.
    No disk is filled: see ``FLOOR_SHARE`` in ``spill.py``. After a fork the child has an empty tier with a file of its
    own.

    Args:
        path: a directory for the file. ``None``: the first of the temporary, cache and working directories that is on a
            disk and has room.
        budget: bytes, or ``None`` for a part of what is free on the disk of the directory.
        given: ``budget`` as the user has written it, if that was a text: a shortage repeats it.
        verify: whether to checksum what is written (CRC-32) and check it when it is read.
        file_type: makes the system calls.

    Raises:
        ConfigError: no such file can be made in ``path``.
        OSError: the process has no free file descriptor.
    """

    name: ClassVar[str] = "disk"

    def __init__(
        self,
        path: PathLike | None,
        budget: int | None,
        *,
        given: str | None = None,
        verify: bool = False,
        file_type: type[RawFile] = RawFile,
    ) -> None:
        self._path = None if path is None else Path(path)
        self._verify = verify
        self._file_type = file_type
        self._closed = False
        self._lock = ForkSafeLock()
        #: Of the thread that has the file grow; it comes before ``_lock``: see [Note: growth] in ``pool.py``.
        self._growth = ForkSafeLock()
        #: ``None`` once it is closed, and in a forked child that has not asked for room yet.
        self._disk: Disk | None = Disk(open_spill_file(self._path, budget, file_type))
        #: Whose files are left: only their slots keep them.
        self._left: Living[Disk] = Living()
        self._is_crashed = False
        self._budget = disk_budget(self._disk.file.directory) if budget is None else budget
        self._given = None if budget is None else given or size_text(budget)
        self._peak = self._written = 0
        tell_after_fork(self)

    def reserve(self, nbytes: int) -> DiskSlot | None:
        if self._growth.is_held() or self._lock.is_held():  # see [Note: reentry] in forking.py
            raise reentered()
        with self._growth.lock:
            self._reopen()
            try:
                with self._lock.lock, self._crashing():
                    return self._take(nbytes)
            except _Missing as missing:
                disk, grown = missing.disk, missing.disk.grow(missing.nbytes, missing.limit)
            if not grown:
                return None
            with self._lock.lock, self._crashing():
                disk.add(grown)
                return self._take(nbytes)

    def at_hand(self, nbytes: int) -> DiskSlot | None:
        if self._lock.is_held():
            raise reentered()
        with self._lock.lock, self._crashing():
            if self._needs_file():
                raise MustGrow
            return self._take(nbytes)

    def _take(self, nbytes: int) -> DiskSlot | None:
        """Returns a slot; ``None`` where the budget has no room for it. Inside the lock.

        Raises:
            _Missing: there is none as long as the file does not grow.
        """
        self._poll()
        size, disk = round_up(nbytes, PAGE), self._disk
        if disk is None:
            return None
        same = disk.ranges.back.get(size) or disk.ranges.fit(size)
        if not same:
            missing, limit = disk.missing(size), self._budget - self._length()
            if missing > limit:
                return None
            raise _Missing(disk, missing, limit)
        slot = DiskSlot(disk, same[-1], nbytes, self._verify)
        disk.records.add(slot.record)
        same.pop()
        disk.used += nbytes
        self._peak = max(self._peak, self._used())
        return slot

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

    def warning(self) -> str | None:
        return None if self._given is not None else warning_of_guess()

    @property
    def shortage(self) -> Shortage:
        """What binds now: a file that cannot grow, the budget, or the disk."""
        with self._lock.lock:
            if self._disk is None:
                return Shortage("no directory serves any more", "name another one in disk_path")
            file, length = self._disk.file, self._length()
            if file.refusal is not None:
                return Shortage(
                    f"the spill file in {str(file.directory)!r} cannot grow: {file.refusal}",
                    "check the disk (the kernel's log says more), or name another one in disk_path",
                )
            left, room = self._budget - length, file.room()
            if left <= room and self._given is not None:
                return Shortage(f"all of disk_budget is in use: {self._given}", "raise disk_budget")
        try:
            limit = disk_headroom(file.directory, length=length).binding
        except OSError as error:
            return Shortage(f"the disk of {file.directory} does not answer ({error})", "name another one in disk_path")
        if limit.kind == "rlimit":
            return Shortage(limit.reason, limit.remedy)
        if left <= room:
            return Shortage(
                f"the {size_text(self._budget)} that this process takes of the disk of {file.directory} are in "
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
        """Bytes of the file, and of those that are left."""
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
    def directory(self) -> Path | None:
        """Where the file is."""
        return None if self._disk is None else self._disk.file.directory

    @property
    def direct_io(self) -> bool:
        """Whether transfers go around the page cache."""
        return self._disk is not None and self._disk.file.memory_alignment is not None

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
        self._left, self._disk = Living(), None

    def _needs_file(self) -> bool:
        """Returns whether there is none to cut slots from: see [Note: files that are left]."""
        return not self._closed and (self._disk is None or self._is_crashed)

    def _reopen(self) -> None:
        """Has a new file where one is needed and can be had."""
        self.poll()
        if not self._needs_file():
            return
        with suppress(ConfigError, OSError):  # what served before is gone: a tier without room, not one that fails
            file = open_spill_file(self._path, self._budget, self._file_type)
            with self._lock.lock:
                if not self._closed:
                    self._leave()
                    self._disk = Disk(file)

    # -- inside the lock ------------------------------------------------------------------------------------------

    def _leave(self) -> None:
        """Lets go of the file, which closes when the last slot that refers to it goes."""
        if self._disk is not None:
            self._left.add(self._disk)
        self._disk = None

    def _all(self) -> list[Disk]:
        return [*([] if self._disk is None else [self._disk]), *self._left]

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
