"""The disk tier: stores saved bytes in a spill file.

[Note: retired files]
No slot is cut from a *retired* file, which closes with its last slot and so frees its disk space. A new file replaces
the old one if an interrupt hit in the middle of a change (see [Note: retired slabs] in ``pool.py``), and in a forked
child.
"""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
import time
import zlib
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, cast

import psutil
import torch
from torch import Tensor

from eager_offload.config import PathLike, size_text
from eager_offload.errors import CapacityError, ConfigError, CorruptionError, OffloadError, lacks_descriptor, reentered
from eager_offload.tiers.base import (
    Cutter,
    LinkRates,
    MustGrow,
    Range,
    Ranges,
    Rate,
    Shortage,
    Slab,
    Slot,
    SlotRecord,
    Tier,
    pending,
)
from eager_offload.tiers.forking import FinalizerRecord, tell_after_fork
from eager_offload.tiers.limits import disk_budget, disk_headroom, file_size_limit, warn_of_guess
from eager_offload.tiers.memory import PAGE, anonymous_slab, mapped_file, move_if_there, round_up, view_of
from eager_offload.tiers.spill import SpillFile

#: Most bytes that ``measure`` moves each way, the size of a piece (a large activation), and the longest time each way.
_MEASURED_BYTES, _MEASURED_PIECE = 64 << 20, 8 << 20
_MEASURING_SECONDS = 0.8


class DiskSlot(Slot):
    """A range of a spill file, which stays open as long as the slot lives."""

    tier: ClassVar[str] = "disk"
    __slots__ = ("_checksum", "_file", "_start", "_verify")

    def __init__(
        self, file: SpillFile, found: Range[Slab], nbytes: int, on_death: Callable[[Any], object], *, verify: bool
    ) -> None:
        record = SlotRecord(self, on_death)
        record.range = found
        super().__init__(nbytes, pending(found.fences), record)
        self._file, self._start = file, found.start
        self._verify = verify
        self._checksum: int | None = None

    def write(self, source: Tensor) -> None:
        assert source.numel() == self.nbytes
        if self._verify:
            # The program may write to other views of the storage during the transfer (e.g. the gates of a GRU). Write
            # the same copy that the checksum covers.
            copy = anonymous_slab(source.numel())
            move_if_there(copy.data_ptr(), source.data_ptr(), source.numel())
            source, self._checksum = copy, _checksum(copy)
        self._transfer("write", source)

    def read(self, target: Tensor) -> None:
        assert target.numel() == self.nbytes
        self._transfer("read", target)
        if self._checksum is not None and self._checksum != _checksum(target):
            raise CorruptionError(
                f"{self.nbytes} bytes came back changed from the spill file in {str(self._file.directory)!r}: "
                "their checksum does not match. Nothing was computed with them. Check the disk and the machine's "
                "memory."
            )

    def _transfer(self, what: str, tensor: Tensor) -> None:
        file = self._file
        if file.inherited:
            raise OffloadError(
                f"cannot {what} {self.nbytes} bytes on disk: they belong to the process that this one was forked from. "
                "Tensors saved before a fork can be used only by the parent; run forward and backward in one process."
            )
        try:
            (file.write if what == "write" else file.read)(tensor.data_ptr(), self.nbytes, self._start)
        except (OSError, MemoryError) as error:
            # Without its traceback, whose frames would keep the tensor alive.
            raise file.failed(what, self.nbytes, error) from error.with_traceback(None)

    def memory(self) -> memoryview:
        return mapped_file(self._file.descriptor, self._start, self.nbytes, self)


def _checksum(tensor: Tensor) -> int:
    return zlib.crc32(view_of(tensor.data_ptr(), tensor.numel()))


class DiskTier(Cutter, Tier):
    """Stores up to ``budget`` bytes in an unnamed file.

    The file grows on demand, and its disk space is freed when the tier is closed and the last slot is gone. The disk is
    never filled: see ``FLOOR_SHARE`` in ``spill.py``. After a fork the child has an empty tier with its own file.

    Args:
        path: directory of the file. ``None``: the first of the temporary, cache and working directories that is on a
            disk and has room.
        budget: limit in bytes; ``None`` for a fraction of the free disk space.
        given: ``budget`` as the user has written it, if that was a text, for messages.
        verify: whether to checksum bytes when they are written (CRC-32) and compare when they are read.
        file_type: class of the file; tests replace its system calls.

    Raises:
        ConfigError: no file can be made in ``path``.
        OSError: the process has no free file descriptor.
    """

    name: ClassVar[str] = "disk"
    #: ``None`` after ``close``, and in a forked child before its first ``reserve``.
    _file: SpillFile | None

    def __init__(
        self,
        path: PathLike | None,
        budget: int | None,
        *,
        given: str | None = None,
        verify: bool = False,
        file_type: type[SpillFile] = SpillFile,
    ) -> None:
        super().__init__()
        self._path = None if path is None else Path(path)
        self._verify = verify
        self._file_type = file_type
        self._closed = False
        self._peak = self._written = 0
        self._is_crashed = False
        self.after_fork()
        file = self._file = _open(self._path, budget, file_type)
        file.uncounted = self._uncounted
        self._budget = disk_budget(file.directory) if budget is None else budget
        self._given = None if budget is None else given or size_text(budget)
        tell_after_fork(self)

    def after_fork(self) -> None:
        """Empties the tier of the child, whose first ``reserve`` opens a new file."""
        self._file = None
        #: Slabs of retired files, which only slots keep open: see [Note: retired files].
        self._retired: set[Slab] = set()
        #: Free ranges of the file.
        self._ranges = Ranges[Slab]()
        #: Records of dead slots, until ``poll``: see [Note: slots give themselves back] in ``base.py``.
        self._returned: deque[FinalizerRecord[Slot]] = deque()
        #: Records of living slots: see [Note: finalizers] in ``forking.py``.
        self._records: set[FinalizerRecord[Slot]] = set()
        self._used = 0
        #: Sizes of writes that are not in ``_written`` yet.
        self._uncounted: deque[int] = deque()

    def reserve(self, nbytes: int) -> DiskSlot | None:
        if self._growth.is_held() or self._lock.is_held():  # see [Note: reentry] in forking.py
            raise reentered()
        with self._growth.lock:
            self.poll()
            if self._needs_file():
                with suppress(ConfigError, OSError):  # without a directory there is no room; training goes on
                    opened = _open(self._path, self._budget, self._file_type)
                    with self._lock.lock:
                        if not self._closed:
                            self._retire()
                            self._file, opened.uncounted = opened, self._uncounted
            try:
                with self._lock.lock, self._crashing():
                    return self._take(nbytes)
            except MustGrow as more:
                file: SpillFile
                file, missing, limit = more.args
                grown = file.grow(missing, limit)
            if not grown:
                return None
            with self._lock.lock, self._crashing():
                if file is self._file:  # another thread may have closed the tier
                    self._ranges.back[grown].append(Range(file.slab, file.slab.nbytes, grown))
                file.slab.nbytes += grown
                return self._take(nbytes)

    def at_hand(self, nbytes: int) -> DiskSlot | None:
        if self._lock.is_held():
            raise reentered()
        with self._lock.lock, self._crashing():
            if self._needs_file():
                raise MustGrow
            return self._take(nbytes)

    def _take(self, nbytes: int) -> DiskSlot | None:
        """Returns a slot, or ``None`` if the budget has no room.

        Raises:
            MustGrow: the file has to grow first; with the file and the smallest and largest growth in bytes.
        """
        self._poll()
        size, file = round_up(nbytes, PAGE), self._file
        if file is None:
            return None
        same = self._ranges.back.get(size) or self._ranges.fit(size)
        if not same:
            missing, limit = size - self._ranges.free_before(file.slab.nbytes), self._budget - self._length()
            if missing > limit:
                return None
            raise MustGrow(file, missing, limit)
        slot = DiskSlot(file, same[-1], nbytes, self._returned.append, verify=self._verify)
        self._records.add(slot.record)
        same.pop()
        self._used += nbytes
        self._peak = max(self._peak, self._used)
        return slot

    def warn(self, said: set[str]) -> None:
        if self._given is None:
            warn_of_guess()

    @property
    def shortage(self) -> Shortage:
        """The current reason: a file that cannot grow, the budget, or the disk."""
        with self._lock.lock:
            file, length = self._file, self._length()
            if file is None:
                return Shortage("no directory serves any more", "name another one in disk_path")
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
    def held_bytes(self) -> int:
        """Bytes of the file and of retired files."""
        self.poll()
        with self._lock.lock:
            return self._length()

    @property
    def peak_bytes(self) -> int:
        return self._peak

    def restart_peak(self) -> None:
        self.poll()
        with self._lock.lock:
            self._peak = self._used

    @property
    def written_bytes(self) -> int:
        self.poll()
        return self._written

    @property
    def directory(self) -> Path | None:
        return None if self._file is None else self._file.directory

    @property
    def direct_io(self) -> bool:
        """Whether transfers bypass the page cache."""
        return self._file is not None and self._file.memory_alignment is not None

    def measure(self) -> LinkRates:
        """Measures the rates of single transfers through the tier. ``measuring.disk_link`` caches the result.

        Raises:
            CapacityError: the tier has no room for the test.
            TransferError: the disk failed.
        """
        source = anonymous_slab(_MEASURED_PIECE)
        # Random, because some filesystems and disks compress. With a generator of its own, because torch's would
        # otherwise produce other numbers than in a run without offload (e.g. for dropout).
        source.view(torch.int64).random_(generator=torch.Generator())
        slots: list[DiskSlot] = []
        while len(slots) * _MEASURED_PIECE < _MEASURED_BYTES and (slot := self.reserve(_MEASURED_PIECE)) is not None:
            slots.append(slot)
        if not slots:
            raise CapacityError(f"there is no room for {_MEASURED_PIECE} bytes in the disk tier to measure it with")
        write = _timed([partial(slot.write, source) for slot in slots])
        read = _timed([partial(slot.read, source) for slot in slots[: len(write)]])
        # Leave out the first piece if there are more: it includes growing the file and touching pages.
        return LinkRates(*[Rate.of(_MEASURED_PIECE, seconds[1:] or seconds) for seconds in (write, read)])

    def close(self) -> None:
        with self._lock.lock:
            self._closed = True
            self._retire()

    def _needs_file(self) -> bool:
        return not self._closed and (self._file is None or self._is_crashed)

    # -- inside the lock ------------------------------------------------------------------------------------------

    def _retire(self) -> None:
        if self._file is not None:
            self._retired.add(self._file.slab)
        self._file, self._ranges = None, Ranges()

    def _poll(self) -> None:
        if self._is_crashed:  # the records alone tell which slots are alive: see [Note: retired files]
            self._retire()
            self._records = {record for record in self._records if record() is not None}
            self._used = sum([cast(SlotRecord, record).nbytes for record in self._records])
            self._is_crashed = False
        while self._returned:
            record: Any = self._returned[0]
            if record in self._records:
                self._used -= record.nbytes
                if self._file is not None and record.range.slab is self._file.slab:
                    record.range.fences = record.fences
                    self._ranges.back[record.range.nbytes].append(record.range)
                self._records.discard(record)
            self._returned.popleft()
            if self._used == 0 and self._file is not None:
                self._file.bounce.release_idle()
        if self._retired:
            self._retired &= {cast(SlotRecord, record).range.slab for record in self._records}
        while self._uncounted:
            self._written += self._uncounted.popleft()

    def _length(self) -> int:
        return (0 if self._file is None else self._file.slab.nbytes) + sum([slab.nbytes for slab in self._retired])


def _timed(calls: Sequence[Callable[[], object]]) -> list[float]:
    seconds = list[float]()
    for call in calls:
        started = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - started)
        if sum(seconds) > _MEASURING_SECONDS:
            break
    return seconds


# -- directories -----------------------------------------------------------------------------------------------------

#: Filesystems that store files in memory, so that spilling to them frees none.
IN_MEMORY = frozenset({"tmpfs", "ramfs", "devtmpfs", "hugetlbfs"})
#: Free bytes required of a directory that the user did not name; the budget, if that is less.
_ROOM = 1 << 30
_ACCEPTED = "a writable directory on a disk (not tmpfs), or None for one that is found"


def _open(path: Path | None, budget: int | None, file_type: type[SpillFile]) -> SpillFile:
    """Opens a new spill file in ``path``; for ``None``, in the first suitable one of ``usual_directories()``.

    Args:
        budget: largest size of the file in bytes, if known.

    Raises:
        ConfigError: ``path`` is unsuitable, or no suitable directory was found.
        OSError: the process has no free file descriptor (``lacks_descriptor``), for which no directory is at fault.
    """
    reasons = []
    for one in usual_directories() if path is None else [path]:
        try:
            _check(one, 0 if path is not None else _ROOM if budget is None else min(_ROOM, budget))
            return file_type(one)
        except OSError as error:
            if lacks_descriptor(error):
                raise
            why = str(error)
            if error.errno == errno.EFBIG and (most := file_size_limit()) is not None:
                why = f"no file of this process may exceed {most} bytes (RLIMIT_FSIZE, ulimit -f)"
            if path is not None:
                raise ConfigError(f"disk_path: {str(path)!r} cannot serve: {why}; accepted is {_ACCEPTED}.") from error
            reasons.append(f"{str(one)!r}: {why}")
    raise ConfigError(f"disk_path: given None, and no place was found ({'; '.join(reasons)}); accepted is {_ACCEPTED}.")


def _check(path: Path, room: int) -> None:
    """Raises ``OSError`` if a directory cannot take a spill file or has less than ``room`` bytes free."""
    if not hasattr(os, "pwritev"):
        raise OSError('this system has no pwritev, which the disk tier needs: take tier="host"')
    if not path.exists():
        raise FileNotFoundError("it does not exist")
    if not path.is_dir():
        raise NotADirectoryError("it is not a directory")
    kind = filesystem_of(path)
    if kind in IN_MEMORY:
        raise OSError(f"it is on {kind}, which is memory itself")
    free = shutil.disk_usage(path).free
    if free < room:
        raise OSError(f"only {free} bytes are free there")
    if not os.access(path, os.W_OK | os.X_OK):
        raise PermissionError("it is not writable")


def filesystem_of(path: Path) -> str:
    """Returns the filesystem type of ``path`` (e.g. ``"ext4"``), or an empty string if unknown."""
    real = Path(os.path.realpath(path))
    around = [part for part in psutil.disk_partitions(all=True) if real.is_relative_to(part.mountpoint)]
    # Several mounts may share a mount point; the last one hides the others.
    return max(reversed(around), key=lambda part: len(Path(part.mountpoint).parts)).fstype if around else ""


def usual_directories() -> list[Path]:
    """Returns the directories to try if the user names none: the temporary, cache and working directories."""
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    places = [Path(tempfile.gettempdir()), Path(cache).expanduser()]
    with suppress(FileNotFoundError):  # the working directory may have been deleted
        places.append(Path.cwd())
    return list(dict.fromkeys(places))
