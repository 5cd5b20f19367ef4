"""The disk tier: saved bytes in a spill file, or in one on each of several disks."""

from __future__ import annotations

import threading
import time
import weakref
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from eager_offload.errors import CapacityError, ConfigError, CorruptionError
from eager_offload.tiers.base import Fence, Region, Slot, Tier
from eager_offload.tiers.directories import open_spill_files
from eager_offload.tiers.extents import Extent
from eager_offload.tiers.forking import tell_after_fork
from eager_offload.tiers.limits import disk_budget
from eager_offload.tiers.memory import PAGE, anonymous_slab, round_up, view_of
from eager_offload.tiers.rawfile import RawFile
from eager_offload.tiers.spill import Remains, SpillFile

__all__ = ["Bandwidth", "DiskSlot", "DiskTier"]

#: Bytes that measuring moves each way, in pieces of a size that a large activation has.
_MEASURED_BYTES, _MEASURED_PIECE = 64 << 20, 8 << 20


class Bandwidth(NamedTuple):
    """What one transfer at a time reaches; bytes a second."""

    write: float
    read: float


class DiskSlot(Slot):
    """A range of a spill file, which it keeps open."""

    tier: ClassVar[str] = "disk"
    __slots__ = ("_checksum", "_extent", "_file", "_verify")
    #: Set when it is handed out; one without was lost to an interrupt before, and gives nothing back.
    _extent: Extent

    def __init__(self, file: SpillFile, fences: tuple[Fence, ...], nbytes: int, verify: bool) -> None:
        super().__init__(nbytes, fences)
        self._file = file
        self._verify = verify
        self._checksum: int | None = None

    @property
    def region(self) -> Region:
        return Region(self._file.name, self._extent.start, self._extent.start + self.nbytes)

    def write(self, source: Tensor) -> None:
        assert source.numel() == self.nbytes
        self._file.write(self._extent, source)
        if self._verify:
            self._checksum = _checksum(source)

    def read(self, target: Tensor) -> None:
        assert target.numel() == self.nbytes
        self._file.read(self._extent, target)
        if self._checksum is not None and self._checksum != _checksum(target):
            raise CorruptionError(
                f"{self.nbytes} bytes came back changed from the spill file in {str(self._file.directory)!r}: their "
                "checksum does not match. Nothing was computed with them. Check the disk and the machine's memory."
            )

    def memory(self) -> memoryview:
        return self._file.mapping(self._extent, self.nbytes, self)

    def __del__(self) -> None:
        try:
            remains = Remains(self._extent._replace(fences=self.fences), self.nbytes)
        except AttributeError:
            return
        self._file.returned.append(remains)


class DiskTier(Tier):
    """Room on disk, up to ``budget`` bytes in all files.

    The files have no name, grow as room is asked for, and give it back when the tier is closed and the last slot gone.
    After a fork the child has an empty tier with files of its own.

    Args:
        paths: directories, one file in each; a slot goes to the one with the most room. ``None``: the first of the
            temporary, cache and working directories that is on a disk and has room.
        budget: bytes, or ``None`` for a share of what is free on the disks of its directories.
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
        verify: bool = False,
        file_type: type[RawFile] = RawFile,
    ) -> None:
        self._paths = paths
        self._verify = verify
        self._file_type = file_type
        self._bandwidth: Bandwidth | None = None
        self._closed = False
        self._lock = threading.Lock()
        #: ``None`` in a forked child that has not asked for room yet.
        self._files: list[SpillFile] | None = open_spill_files(paths, budget, file_type)
        #: The files of a closed tier, which only their slots keep.
        self._left: weakref.WeakSet[SpillFile] = weakref.WeakSet()
        self._budget = _share_of(self._files) if budget is None else budget
        self._peak = 0
        tell_after_fork(self)

    def reserve(self, nbytes: int) -> DiskSlot | None:
        size = round_up(nbytes, PAGE)
        with self._lock:
            if self._files is None:
                self._files = self._reopen()
            self._drain()
            # With one file there is no choice, and asking the disk for its room takes time.
            files = self._files if len(self._files) == 1 else sorted(self._files, key=SpillFile.room, reverse=True)
            for file in files:
                extent = file.extents.allocate(size)
                if extent is None and file.grow(size, self._budget - self._length()):
                    self._peak = max(self._peak, self._length())
                    extent = file.extents.allocate(size)
                if extent is not None:
                    # As in [Note: handing out] in `arena.py`: no call after the one or the other.
                    file.carved = extent
                    slot = DiskSlot(file, extent.fences, nbytes, self._verify)
                    slot._extent = extent
                    file.used += nbytes
                    file.carved = None
                    return slot
        return None

    @property
    def used_bytes(self) -> int:
        with self._lock:
            self._drain()
            return sum(file.used for file in self._all())

    @property
    def held_bytes(self) -> int:
        """Bytes of all files."""
        with self._lock:
            return self._length()

    @property
    def peak_bytes(self) -> int:
        return self._peak

    def restart_peak(self) -> None:
        with self._lock:
            self._peak = self._length()

    @property
    def directories(self) -> list[Path]:
        """Where the files are."""
        with self._lock:
            return [file.directory for file in self._files or ()]

    def drain(self) -> None:
        """Takes up the slots that have died; once all have, gives the buffers of transfers back to the system."""
        with self._lock:
            self._drain()

    def measure(self) -> Bandwidth:
        """What this disk does, through the tier itself; measured at the first call, then remembered.

        Raises:
            CapacityError: there is no room to try it.
            TransferError: the disk failed.
        """
        if self._bandwidth is None:
            self._bandwidth = self._measure()
        return self._bandwidth

    def close(self) -> None:
        with self._lock:
            self._closed = True
            # A file closes when the last slot that refers to it goes.
            self._left.update(self._files or ())
            self._files = []

    def after_fork(self) -> None:
        self._lock = threading.Lock()
        self._left = weakref.WeakSet()
        self._files = None

    # -- with the lock held ---------------------------------------------------------------------------------------

    def _reopen(self) -> list[SpillFile]:
        if self._closed:
            return []
        try:
            return open_spill_files(self._paths, self._budget, self._file_type)
        except ConfigError:  # what served the parent is gone: a child without room, not one that fails
            return []

    def _all(self) -> list[SpillFile]:
        files = self._files or []
        return [*files, *self._left] if self._left else files

    def _drain(self) -> None:
        for file in self._all():
            file.drain()

    def _length(self) -> int:
        return sum(file.length for file in self._all())

    def _measure(self) -> Bandwidth:
        source = anonymous_slab(_MEASURED_PIECE)
        # Not zeros: filesystems and disks that compress would make nothing of them. And not from torch's own generator:
        # the next dropout would differ from that of a run without offload.
        source.view(torch.int64).random_(generator=torch.Generator())
        slots: list[DiskSlot] = []
        started = time.perf_counter()
        while len(slots) * _MEASURED_PIECE < _MEASURED_BYTES and (slot := self.reserve(_MEASURED_PIECE)) is not None:
            slot.write(source)
            slots.append(slot)
        written = time.perf_counter()
        if not slots:
            raise CapacityError(f"there is no room for {_MEASURED_PIECE} bytes in the disk tier to measure it with")
        for slot in slots:
            slot.read(source)
        nbytes = len(slots) * _MEASURED_PIECE
        return Bandwidth(nbytes / (written - started), nbytes / (time.perf_counter() - written))


def _share_of(files: Sequence[SpillFile]) -> int:
    """What the disks of ``files`` have for this process, each disk counted once."""
    return sum({file.directory.stat().st_dev: disk_budget(file.directory) for file in files}.values())


def _checksum(tensor: Tensor) -> int:
    return zlib.crc32(view_of(tensor.data_ptr(), tensor.numel()))
