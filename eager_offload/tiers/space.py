"""The room in one spill file, or in one on each of several disks: which bytes are where, and their way there.

[Note: stripes]
All files together are one range of bytes, which grows by segments. A segment lies in one file, or in several by turns,
a stripe of 4 MiB in each: so one large tensor is written to all disks at once, while a small one bothers one disk only.
Slots are ranges of the whole and do not know of files. A disk that has no more room is left out of the next segment.
"""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections import Counter, deque
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from typing import NamedTuple, cast

from torch import Tensor

from eager_offload.errors import OffloadError
from eager_offload.tiers.base import Slot, SlotRecord
from eager_offload.tiers.extents import Extent, Extents
from eager_offload.tiers.finalizers import FinalizerRecord
from eager_offload.tiers.forking import OwnThread, helped_by
from eager_offload.tiers.memory import PAGE, FilePart, Span, mapped_file, round_up
from eager_offload.tiers.spill import SpillFile

#: Bytes; a file grows by this much, or by the request where that is more.
_GROWTH = 64 << 20
#: Bytes of one stripe.
_STRIPE = 4 << 20
#: Bytes; a smaller transfer is carried out by one thread, file by file.
_LARGE = 4 << 20

_serial = itertools.count()


class DiskSlotRecord(SlotRecord):
    """What a slot leaves behind."""

    __slots__ = ("extent",)
    extent: Extent


class _Share(NamedTuple):
    """A file's part of a segment, and where it begins there."""

    file: SpillFile
    offset: int


class Segment(NamedTuple):
    """A range of the space that was added at once."""

    start: int
    nbytes: int
    shares: tuple[_Share, ...]

    @property
    def stop(self) -> int:
        return self.start + self.nbytes


class _Piece(NamedTuple):
    """A part of a transfer that lies in one file, in one go."""

    file: SpillFile
    #: Where it begins, within the transfer and within the file.
    at: int
    offset: int
    nbytes: int


class _Part(NamedTuple):
    """What one file has of a transfer, for whichever thread comes first."""

    pieces: Sequence[_Piece]
    over: Future[None]


class Space:
    """Room in ``files``, which are new and empty and close with it.

    Reading and writing need no lock, and growing one of its own; the rest does.
    """

    def __init__(self, files: Sequence[SpillFile]) -> None:
        self.files = tuple(files)
        self.extents = Extents()
        #: Where slots end up; see [Note: slots give themselves back] in ``tiers/base.py``.
        self.returned: deque[FinalizerRecord[Slot]] = deque()
        #: Of the slots that are alive; see [Note: finalizers] in ``finalizers.py``.
        self._records: set[FinalizerRecord[Slot]] = set()
        self.name = ("spill space", next(_serial))
        #: Bytes in slots that are alive.
        self.used = 0
        self._segments: list[Segment] = []
        #: See [Note: interrupted changes] in ``arena.py``.
        self._is_changing = False

    @property
    def length(self) -> int:
        """Bytes of all files."""
        return self._segments[-1].stop if self._segments else 0

    @property
    def where(self) -> str:
        """The directories, for messages."""
        return " and ".join(repr(str(file.directory)) for file in self.files)

    @property
    def failing(self) -> bool:
        """Whether a disk of several has failed to write: the others serve better without it."""
        return len(self.files) > 1 and any(file.failing for file in self.files)

    # -- room -----------------------------------------------------------------------------------------------------

    def take(self, nbytes: int) -> Extent | None:
        """A range of ``nbytes``, which is lost unless it is registered next; ``None`` where the files are too short."""
        self._is_changing = True
        extent = self.extents.allocate(nbytes)
        self._is_changing = extent is not None
        return extent

    def missing(self, nbytes: int) -> int:
        """By how much the files would have to grow for a range of ``nbytes``; where ``take`` has found none."""
        return nbytes - self.extents.free_at_end

    def register(self, record: DiskSlotRecord, extent: Extent) -> None:
        """The slot of ``record`` has ``extent`` for as long as it lives."""
        record.extent = extent
        self._records.add(record)
        self.used += record.nbytes
        self._is_changing = False

    def poll(self) -> int:
        """Takes up the slots that have died; when all have, gives the buffers of transfers back to the system.

        Returns:
            How many bytes were written since the last time.
        """
        if self._is_changing:
            self._recover()
        while self.returned:
            record = self.returned[0]
            if record in self._records:
                self._take_back(cast(DiskSlotRecord, record))
            self.returned.popleft()
        written = 0
        for file in self.files:
            while file.written:
                written += file.written.popleft()
            if self.used == 0:
                file.bounce.release_idle()
        return written

    def _take_back(self, record: DiskSlotRecord) -> None:
        self._is_changing = True
        self.used -= record.nbytes
        self.extents.release(record.extent._replace(fences=record.fences))
        self._records.discard(record)
        self._is_changing = False

    def _recover(self) -> None:
        records = [cast(DiskSlotRecord, record) for record in self._records]
        self.extents.length = self.length
        taken = [record.extent for record in records]
        self.extents = self.extents.free_but_for(taken, [Extent(0, self.length)] if self.length else [])
        self.used = sum(record.nbytes for record in records)
        self._is_changing = False

    def grow(self, need: int, limit: int) -> Segment | None:
        """Makes the files longer by at least ``need`` bytes, which takes the disks a while: without the lock.

        One thread at a time. The new room is there for all once it is added.

        Args:
            limit: by how much the files may grow in all, in bytes.

        Returns:
            ``None`` where the disks have no room.
        """
        # Asking for what is not there would fill the disk to the brim for a moment, at the cost of all else on it.
        files = list(self.files)
        while files:
            rooms = _rooms(files)
            files.sort(key=rooms.__getitem__, reverse=True)
            several, least = len(files), rooms[files[-1]] * len(files)
            unit = several * _STRIPE if several > 1 else PAGE
            wishes = round_up(max(several * _GROWTH, need), unit), limit // unit * unit, round_up(need, unit)
            refusing = files[-1]
            for step in dict.fromkeys(wishes):
                if need <= step <= min(least, limit):
                    found = self._extend(files, step)
                    if isinstance(found, Segment):
                        return found
                    refusing = found
            files.remove(refusing)
        return None

    def _extend(self, files: Sequence[SpillFile], nbytes: int) -> Segment | SpillFile:
        """A segment of ``nbytes`` in equal parts of ``files``; or the one that refused, if one did."""
        each, ends = nbytes // len(files), {file: self._end_of(file) for file in files}
        for refusing in files:
            if not refusing.extend(ends[refusing], each):
                for file in files:
                    file.cut_off(ends[file])
                return refusing
        return Segment(self.length, nbytes, tuple([_Share(file, ends[file]) for file in files]))

    def add(self, segment: Segment) -> None:
        """What ``grow`` has made room for may be taken from now on."""
        self._is_changing = True
        self._segments = [*self._segments, segment]
        self.extents.grow(segment.nbytes)
        self._is_changing = False

    def _end_of(self, file: SpillFile) -> int:
        """How far ``file`` is used."""
        parts = [(segment.nbytes // len(segment.shares), segment.shares) for segment in self._segments]
        ends = [share.offset + each for each, shares in parts for share in shares if share.file is file]
        return max(ends, default=0)

    # -- bytes ----------------------------------------------------------------------------------------------------

    def transfer(self, what: str, extent: Extent, tensor: Tensor, spans: Sequence[Span]) -> None:
        """Moves parts of ``tensor`` to or from the same of ``extent``.

        Args:
            what: ``"write"`` or ``"read"``.
            spans: the parts, which begin at multiples of ``PAGE``.

        Raises:
            TransferError: the operating system refused.
        """
        assert tensor.numel() <= extent.nbytes
        nbytes = sum(span.nbytes for span in spans)
        if self.files[0].inherited:
            raise OffloadError(
                f"cannot {what} {nbytes} bytes on disk: they belong to the process that this one was forked from. "
                "What was saved before a fork can only be used by the parent; run forward and backward in one process."
            )
        pieces = [
            piece._replace(at=span.at + piece.at)
            for span in spans
            for piece in self._pieces(extent.start + span.at, span.nbytes)
        ]
        by_file: dict[SpillFile, list[_Piece]] = {}
        for piece in pieces:
            by_file.setdefault(piece.file, []).append(piece)
        if nbytes < _LARGE or len(by_file) == 1:
            _carry(what, tensor, pieces)
        else:
            self._carry_by_file(what, tensor, [_Part(pieces, Future()) for pieces in by_file.values()])

    def mapping(self, extent: Extent, nbytes: int, owner: object) -> memoryview:
        """The first ``nbytes`` of ``extent`` as memory, which keeps ``owner``; what direct I/O writes shows there.

        Raises:
            MemoryError: the system refused.
        """
        pieces = self._pieces(extent.start, nbytes)
        return mapped_file([FilePart(piece.file.descriptor, piece.offset, piece.nbytes) for piece in pieces], owner)

    def _carry_by_file(self, what: str, tensor: Tensor, parts: Sequence[_Part]) -> None:
        """Each part on a thread; returns or raises when nothing is under way any more."""
        left, failures = deque(parts), list[BaseException]()
        work = partial(_carry_parts, what, tensor, left, failures)
        threads = [OwnThread(work, "eager_offload-disk") for _ in parts[1:]]
        with suppress(RuntimeError):  # no thread is to be had, or the interpreter shuts down
            for thread in threads:
                thread.start()
        work()
        for part in parts:
            part.over.result()
        for thread in threads:
            if thread.is_alive():
                thread.join()
        helped_by(threads)
        if failures:
            error = failures[0]
            failures.clear()  # a thread may have it for another moment, and the error leads to what the caller holds
            try:
                raise error
            finally:
                del error

    def _pieces(self, start: int, nbytes: int) -> list[_Piece]:
        """Where ``nbytes`` bytes from ``start`` on lie."""
        pieces: list[_Piece] = []
        number = bisect_right(self._segments, start, key=lambda segment: segment.start) - 1
        at = 0
        while at < nbytes:
            segment = self._segments[number]
            inside = start + at - segment.start
            if inside == segment.nbytes:
                number += 1
                continue
            several = len(segment.shares)
            if several == 1:
                share, offset, most = segment.shares[0], inside, segment.nbytes - inside
            else:
                stripe, within = divmod(inside, _STRIPE)
                turn, which = divmod(stripe, several)
                share, offset, most = segment.shares[which], turn * _STRIPE + within, _STRIPE - within
            size = min(most, nbytes - at)
            pieces.append(_Piece(share.file, at, share.offset + offset, size))
            at += size
        return pieces


def _rooms(files: Sequence[SpillFile]) -> dict[SpillFile, int]:
    """Bytes by which each of ``files`` may grow if all do: those on one disk divide what it has."""
    sharers = Counter(file.device for file in files)
    return {file: file.room() // sharers[file.device] for file in files}


def _carry_parts(what: str, tensor: Tensor, left: deque[_Part], failures: list[BaseException]) -> None:
    """Takes parts until there are none; a thread that comes too late does nothing."""
    while True:
        try:
            pieces, over = left.popleft()
        except IndexError:
            return
        try:
            _carry(what, tensor, pieces)
        except BaseException as error:
            failures.append(error.with_traceback(None))  # its frames hold what is being moved
        over.set_result(None)


def _carry(what: str, tensor: Tensor, pieces: Sequence[_Piece]) -> None:
    """Moves ``pieces`` of the transfer of ``tensor``, one after the other.

    Raises:
        TransferError: the operating system refused.
    """
    for file, at, offset, nbytes in pieces:
        try:
            (file.write if what == "write" else file.read)(tensor.data_ptr() + at, nbytes, offset)
        except (OSError, MemoryError) as error:
            raise file.failed(what, tensor.numel(), error) from error.with_traceback(None)  # frames hold the tensor
