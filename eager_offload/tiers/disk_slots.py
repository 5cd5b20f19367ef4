"""Slots on a disk: ranges of its spill file."""

from __future__ import annotations

import zlib
from collections import deque
from typing import Any, ClassVar

from torch import Tensor

from eager_offload.errors import CorruptionError, OffloadError
from eager_offload.tiers.base import Slot, SlotRecord
from eager_offload.tiers.finalizers import FinalizerRecord
from eager_offload.tiers.memory import PAGE, anonymous_slab, mapped_file, move_if_there, view_of
from eager_offload.tiers.ranges import Range, Ranges, Slab, pending
from eager_offload.tiers.spill import SpillFile

#: Bytes; a file grows by this much, or by the request where that is more.
_GROWTH = 64 << 20


class DiskSlotRecord(SlotRecord):
    """What a slot leaves behind."""

    __slots__ = ("range",)
    range: Range[Slab]


class Disk:
    """A spill file, which is new and empty, and what is free in it. It closes with the last reference.

    The tier calls all but ``grow`` and ``transfer`` inside its lock; one thread at a time has the file grow.
    """

    def __init__(self, file: SpillFile) -> None:
        self.file = file
        #: All of the file.
        self.slab = Slab(0)
        self.ranges = Ranges[Slab]()
        #: Where slots end up; see [Note: slots give themselves back] in ``tiers/base.py``.
        self.returned: deque[FinalizerRecord[Slot]] = deque()
        #: Of the slots that are alive; see [Note: finalizers] in ``finalizers.py``.
        self.records: set[FinalizerRecord[Slot]] = set()
        #: Bytes in slots that are alive.
        self.used = 0

    def missing(self, nbytes: int) -> int:
        """Returns by how much the file would have to grow for ``nbytes``, for which nothing was found in it."""
        return nbytes - self.ranges.free_before(self.slab.nbytes)

    def grow(self, need: int, limit: int) -> int:
        """Makes the file longer, which takes the disk a while. Returns by how much; bytes.

        Slots have the new room once it is added.

        Args:
            limit: by how much it may grow, in bytes.
        """
        # Asking for what is not there would fill the disk to the brim for a moment, at the cost of all else on it.
        most = min(self.file.room(), limit)
        for step in dict.fromkeys((max(_GROWTH, need), limit // PAGE * PAGE, need)):
            if need <= step <= most and self.file.extend(self.slab.nbytes, step):
                return step
        return 0

    def add(self, nbytes: int) -> None:
        """Has slots take what ``grow`` has made room for."""
        self.ranges.back[nbytes].append(Range(self.slab, self.slab.nbytes, nbytes))
        self.slab.nbytes += nbytes

    def poll(self) -> int:
        """Takes up the slots that have died; with the last one, gives the buffers of transfers back to the system.

        Returns:
            How many bytes were written since the last time.
        """
        while self.returned:
            record: Any = self.returned[0]
            if record in self.records:
                self.used -= record.nbytes
                record.range.fences = record.fences
                self.ranges.back[record.range.nbytes].append(record.range)
                self.records.discard(record)
            self.returned.popleft()
            if self.used == 0:
                self.file.bounce.release_idle()
        written = 0
        while self.file.written:
            written += self.file.written.popleft()
        return written

    def transfer(self, what: str, start: int, tensor: Tensor) -> None:
        """Moves ``tensor`` to or from the range that begins at ``start``.

        Args:
            what: ``"write"`` or ``"read"``.

        Raises:
            TransferError: the operating system refused.
        """
        if self.file.inherited:
            raise OffloadError(
                f"cannot {what} {tensor.numel()} bytes on disk: they belong to the process that "
                "this one was forked from. What was saved before a fork can only be used by the parent; run forward "
                "and backward in one process."
            )
        move = self.file.write if what == "write" else self.file.read
        try:
            move(tensor.data_ptr(), tensor.numel(), start)
        except (OSError, MemoryError) as error:  # whose frames hold the tensor
            raise self.file.failed(what, tensor.numel(), error) from error.with_traceback(None)


class DiskSlot(Slot):
    """A range of a spill file, which it keeps open."""

    tier: ClassVar[str] = "disk"
    __slots__ = ("_checksum", "_disk", "_start", "_verify")

    def __init__(self, disk: Disk, found: Range[Slab], nbytes: int, verify: bool) -> None:
        record = DiskSlotRecord(self, disk.returned.append)
        record.range = found
        super().__init__(nbytes, pending(found.fences), record)
        self._disk = disk
        self._start = found.start
        self._verify = verify
        self._checksum: int | None = None

    def write(self, source: Tensor) -> None:
        assert source.numel() == self.nbytes
        if self._verify:
            # Other views of a storage may be written while it leaves, as the gates of a GRU are: what is written to the
            # disk has to be what the checksum is of.
            copy = anonymous_slab(source.numel())
            move_if_there(copy.data_ptr(), source.data_ptr(), source.numel())
            source, self._checksum = copy, _checksum(copy)
        self._disk.transfer("write", self._start, source)

    def read(self, target: Tensor) -> None:
        assert target.numel() == self.nbytes
        self._disk.transfer("read", self._start, target)
        if self._checksum is not None and self._checksum != _checksum(target):
            raise CorruptionError(
                f"{self.nbytes} bytes came back changed from the spill file in {str(self._disk.file.directory)!r}: "
                "their checksum does not match. Nothing was computed with them. Check the disk and the machine's "
                "memory."
            )

    def memory(self) -> memoryview:
        return mapped_file(self._disk.file.descriptor, self._start, self.nbytes, self)


def _checksum(tensor: Tensor) -> int:
    return zlib.crc32(view_of(tensor.data_ptr(), tensor.numel()))
