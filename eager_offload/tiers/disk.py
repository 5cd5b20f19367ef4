"""The disk tier: saved bytes in a spill file, or in one on each of several disks."""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import ClassVar, NamedTuple, cast

import torch
from torch import Tensor

from eager_offload.config import size_text
from eager_offload.errors import CapacityError, ConfigError, CorruptionError, reentered
from eager_offload.tiers.base import ByteRegion, MustGrow, Shortage, Slot, Tier
from eager_offload.tiers.directories import open_some, open_spill_files
from eager_offload.tiers.extents import Extent
from eager_offload.tiers.finalizers import Living
from eager_offload.tiers.forking import ForkSafeLock, tell_after_fork
from eager_offload.tiers.limits import disk_budget, disk_headroom
from eager_offload.tiers.memory import (
    PAGE,
    Span,
    anonymous_slab,
    clear,
    move_if_there,
    round_up,
    touched_spans,
    view_of,
)
from eager_offload.tiers.ranks import warning_of_guess
from eager_offload.tiers.rawfile import RawFile
from eager_offload.tiers.space import DiskSlotRecord, Segment, Space
from eager_offload.tiers.spill import SpillFile

#: Bytes that measuring moves each way at most, in pieces of a size that a large activation has; and for how long.
_MEASURED_BYTES, _MEASURED_PIECE = 64 << 20, 8 << 20
_MEASURING_SECONDS = 0.8
#: Bytes; of a source that is at least so large, what was never touched stays where it is.
_LEAST_SPARSE = 4 << 20


class Bandwidth(NamedTuple):
    """What one transfer at a time reaches; bytes a second."""

    write: float
    read: float


class DiskSlot(Slot):
    """A range of the spill files, which it keeps open."""

    tier: ClassVar[str] = "disk"
    __slots__ = ("_checksum", "_extent", "_is_mapped", "_space", "_spans", "_verify")

    def __init__(self, space: Space, extent: Extent, nbytes: int, verify: bool) -> None:
        super().__init__(nbytes, extent.fences, DiskSlotRecord(self, space.returned.append))
        self._space = space
        self._extent = extent
        self._verify = verify
        self._checksum: int | None = None
        #: The parts of it that were written; the others are zero.
        self._spans = [Span(0, nbytes)]
        self._is_mapped = False

    @property
    def region(self) -> ByteRegion:
        return ByteRegion(self._space.name, self._extent.start, self._extent.start + self.nbytes)

    def write(self, source: Tensor) -> None:
        assert source.numel() == self.nbytes
        # What is mapped shows the file, and that has what its last owner wrote there.
        if self.nbytes >= _LEAST_SPARSE and not self._is_mapped:
            self._spans = touched_spans(source.data_ptr(), self.nbytes)
        if self._verify:
            # Other views of a storage may be written while it leaves, as the gates of a GRU are: what is written to the
            # disk has to be what the checksum is of.
            source = _private_copy(source, self._spans)
            self._checksum = _checksum(source)
        self._space.transfer("write", self._extent, source, self._spans)
        self.record.carried = sum(span.nbytes for span in self._spans)

    def read(self, target: Tensor) -> None:
        assert target.numel() == self.nbytes
        self._space.transfer("read", self._extent, target, self._spans)
        done = 0
        for span in (*self._spans, Span(self.nbytes, 0)):
            clear(target.data_ptr() + done, span.at - done)
            done = span.at + span.nbytes
        if self._checksum is not None and self._checksum != _checksum(target):
            raise CorruptionError(
                f"{self.nbytes} bytes came back changed from the spill file in {self._space.where}: their "
                "checksum does not match. Nothing was computed with them. Check the disk and the machine's memory."
            )

    def memory(self) -> memoryview:
        assert self.record.carried == self.nbytes, "mapped too late: what was left out shows what the file had there"
        self._is_mapped = True
        return self._space.mapping(self._extent, self.nbytes, self)


class _Missing(MustGrow):
    """The files have to grow by ``nbytes`` bytes, and may by ``limit``."""

    def __init__(self, nbytes: int, limit: int) -> None:
        super().__init__(nbytes, limit)
        self.nbytes, self.limit = nbytes, limit


class DiskTier(Tier):
    """Room on disk, up to ``budget`` bytes in all files.

    The files have no name, grow as room is asked for, and give it back when the tier is closed and the last slot gone.
    No disk is filled: see ``FLOOR_SHARE`` in ``spill.py``. After a fork the child has an empty tier with files of its
    own.

    Args:
        paths: directories, one file in each; large slots are spread over all of them. Where one of several fails to
            write, the others serve alone from then on. ``None``: the first of the temporary, cache and working
            directories that is on a disk and has room.
        budget: bytes, or ``None`` for a part of what is free on the disks of its directories.
        given: ``budget`` as the user has written it, if that was a text: a shortage repeats it.
        verify: whether to checksum what is written (CRC-32) and check it when it is read.
        file_type: makes the system calls.

    Raises:
        ConfigError: no such file can be made in one of ``paths``.
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
        #: Of the thread that has files grow; it comes before ``_lock``: see [Note: growth] in ``arena.py``.
        self._growth = ForkSafeLock()
        #: ``None`` in a forked child that has not asked for room yet.
        self._space: Space | None = Space(open_spill_files(paths, budget, file_type))
        #: Spaces that only their slots keep: of a closed tier, or with a disk that fails.
        self._left: Living[Space] = Living()
        # Each disk counts once.
        free = {file.device: disk_budget(file.directory) for file in self._space.files} if budget is None else {}
        self._budget = sum(free.values()) if budget is None else budget
        self._given = None if budget is None else given or size_text(budget)
        self._peak = self._written = 0
        tell_after_fork(self)

    def reserve(self, nbytes: int) -> DiskSlot | None:
        if self._growth.is_held() or self._lock.is_held():  # see [Note: reentry] in forking.py
            raise reentered()
        with self._growth.lock:
            space, segment = None if self._closed else self._reopened(), None
            while space is not None:
                try:
                    return self._take(nbytes, space, segment)
                except _Missing as missing:  # threads that need no growth may have taken what there was meanwhile
                    segment = space.grow(missing.nbytes, missing.limit)
                    if segment is None:
                        return None
        return None

    def at_hand(self, nbytes: int) -> DiskSlot | None:
        if self._lock.is_held():
            raise reentered()
        while not self._closed:
            space = self._space
            if space is None or space.failing:
                raise MustGrow
            slot = self._take(nbytes, space)
            if slot is not None or space is self._space:
                return slot
        return None

    def _take(self, nbytes: int, space: Space, segment: Segment | None = None) -> DiskSlot | None:
        """A slot in ``space``, which has ``segment`` from now on; ``None`` where the budget has no room for it.

        Raises:
            _Missing: there is none as long as the files do not grow.
        """
        with self._lock.lock:
            if space is not self._space:
                return None  # the tier was closed meanwhile, or has other files
            self._poll()
            if segment is not None:
                space.add(segment)
            size = round_up(nbytes, PAGE)
            extent = space.take(size)
            if extent is None:
                missing, limit = space.missing(size), self._budget - self._length()
                if missing > limit:
                    return None
                raise _Missing(missing, limit)
            slot = DiskSlot(space, extent, nbytes, self._verify)
            space.register(cast(DiskSlotRecord, slot.record), extent)
            self._peak = max(self._peak, self._used())
            return slot

    def warning(self) -> str | None:
        return None if self._given is not None else warning_of_guess()

    @property
    def shortage(self) -> Shortage:
        """What binds now: disks that fail, the budget, or the disk that has the most room."""
        with self._lock.lock:
            space, left = self._space, self._budget - self._length()
            if space is None:
                return Shortage("no directory serves any more", "name another one in disk_path")
            growing = [file for file in space.files if file.refusal is None]
            if not growing:
                first = space.files[0]
                return Shortage(
                    f"the spill file in {str(first.directory)!r} cannot grow: {first.refusal}",
                    "check the disk (the kernel's log says more), or name another one in disk_path",
                )
            roomiest = max(growing, key=SpillFile.room)
            if left <= roomiest.room():
                if self._given is not None:
                    return Shortage(f"all of disk_budget is in use: {self._given}", "raise disk_budget")
                return Shortage(
                    f"the {size_text(self._budget)} that this process takes of the disk of {roomiest.directory} are "
                    f"in use, and it has {size_text(roomiest.room())} more for others",
                    "free some room there and begin anew, or give a disk_budget",
                )
        try:
            limit = disk_headroom(roomiest.directory).binding
        except OSError as error:
            return Shortage(
                f"the disk of {roomiest.directory} does not answer ({error})", "name another one in disk_path"
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
        with self._lock.lock:
            return [] if self._space is None else [file.directory for file in self._space.files]

    @property
    def direct_io(self) -> bool:
        """Whether transfers go around the page cache, on every disk."""
        with self._lock.lock:
            return self._space is not None and all(file.memory_alignment is not None for file in self._space.files)

    def poll(self) -> None:
        """Takes up the slots that have died; once all have, gives the buffers of transfers back to the system."""
        if not self._lock.is_held():  # see [Note: reentry] in forking.py
            with self._lock.lock:
                self._poll()

    def measure(self) -> Bandwidth:
        """What this disk does, through the tier itself.

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
        written, write_seconds = _timed([partial(slot.write, source) for slot in slots])
        read, read_seconds = _timed([partial(slot.read, source) for slot in slots[:written]])
        return Bandwidth(written * _MEASURED_PIECE / write_seconds, read * _MEASURED_PIECE / read_seconds)

    def close(self) -> None:
        with self._lock.lock:
            self._closed = True
            # Files close when the last slot that refers to them goes.
            if self._space is not None:
                self._left.add(self._space)
                self._space = None

    def after_fork(self) -> None:
        self._left = Living()
        self._space = None

    def _reopened(self) -> Space | None:
        """Where room is to be found now, in new files if need be; ``None`` where there is none at all."""
        space, files = self._space, list[SpillFile]()
        if space is None:
            with suppress(ConfigError):  # what served the parent is gone: a child without room, not one that fails
                files = open_spill_files(self._paths, self._budget, self._file_type)
        elif space.failing:
            files = open_some([file.directory for file in space.files if not file.failing], self._file_type)
        if not files:
            return space
        with self._lock.lock:
            if self._closed:
                return None
            if space is not None:
                self._left.add(space)
            self._space = Space(files)
            return self._space

    # -- with the lock held ---------------------------------------------------------------------------------------

    def _all(self) -> list[Space]:
        return [*([] if self._space is None else [self._space]), *self._left]

    def _poll(self) -> None:
        for space in self._all():
            self._written += space.poll()

    def _used(self) -> int:
        return sum(space.used for space in self._all())

    def _length(self) -> int:
        return sum(space.length for space in self._all())


def _timed(calls: Sequence[Callable[[], object]]) -> tuple[int, float]:
    """How many of the calls were made until the time for it was over, and how long that took; seconds."""
    started = time.perf_counter()
    for done, call in enumerate(calls, 1):
        call()
        elapsed = time.perf_counter() - started
        if elapsed > _MEASURING_SECONDS:
            return done, elapsed
    return len(calls), max(elapsed, 1e-9)


def _checksum(tensor: Tensor) -> int:
    return zlib.crc32(view_of(tensor.data_ptr(), tensor.numel()))


def _private_copy(source: Tensor, spans: Sequence[Span]) -> Tensor:
    """The bytes of ``spans``, in memory that is zero elsewhere; their owner may give theirs back meanwhile."""
    copy = anonymous_slab(source.numel())
    for at, nbytes in spans:
        move_if_there(copy.data_ptr() + at, source.data_ptr() + at, nbytes)
    return copy
