"""The room in one spill file, or in one on each of several disks: which bytes are where, and their way there.

[Note: stripes]
All files together are one range of bytes, which grows by segments. A segment lies in one file, or in several by turns,
a stripe of 4 MiB in each: so one large tensor is written to all disks at once, while a small one bothers one disk only.
Slots are ranges of the whole and do not know of files. A disk that has no more room is left out of the next segment.
"""

from __future__ import annotations

import itertools
import time
from bisect import bisect_right
from collections import Counter, deque
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

from torch import Tensor

from eager_offload.errors import OffloadError
from eager_offload.tiers.crew import Crew
from eager_offload.tiers.depth import DepthSearch
from eager_offload.tiers.extents import Extent, Extents
from eager_offload.tiers.memory import PAGE, FilePart, mapped_file, round_up
from eager_offload.tiers.spill import SpillFile

__all__ = ["MOST_PIECES", "Remains", "Space"]

#: Bytes; a file grows by this much, or by the request where that is more.
_GROWTH = 64 << 20
#: Bytes of one stripe.
_STRIPE = 4 << 20
#: A transfer of so many bytes has several pieces in flight, none of which is smaller than this in one file.
_LARGE, _LEAST_PIECE = 4 << 20, 1 << 20
#: The most pieces that are in flight at a time, or one for each disk where there are more.
MOST_PIECES = 8

_serial = itertools.count()


class Remains(NamedTuple):
    """What a slot leaves behind: its range, with what still has to be over, and how much of it was used."""

    extent: Extent
    nbytes: int


class _Share(NamedTuple):
    """A file's part of a segment, and where it begins there."""

    file: SpillFile
    offset: int


class _Segment(NamedTuple):
    """A range of the space that was added at once."""

    start: int
    nbytes: int
    shares: tuple[_Share, ...]


class _Piece(NamedTuple):
    """A part of a transfer that lies in one file, in one go."""

    file: SpillFile
    #: Where it begins, within the transfer and within the file.
    at: int
    offset: int
    nbytes: int


class Space:
    """Room in ``files``, which close with it. Reading and writing need no lock, the rest does.

    Args:
        files: new and empty.
        crew: whose threads help with large transfers.
    """

    def __init__(self, files: Sequence[SpillFile], crew: Crew) -> None:
        self.files = tuple(files)
        self.extents = Extents()
        #: Where slots end up; see [Note: slots give themselves back] in ``tiers/base.py``.
        self.returned: deque[Remains] = deque()
        #: What was carved and has no slot yet.
        self.carved: Extent | None = None
        self.name = ("spill space", next(_serial))
        #: Bytes in slots that are alive or not taken up yet; the tier counts.
        self.used = 0
        self._segments: list[_Segment] = []
        #: How far each file is used.
        self._ends = dict.fromkeys(self.files, 0)
        self._crew = crew
        self._depths = {what: self._new_search() for what in ("write", "read")}

    @property
    def length(self) -> int:
        """Bytes of all files."""
        return sum(self._ends.values())

    @property
    def where(self) -> str:
        """The directories, for messages."""
        return " and ".join(repr(str(file.directory)) for file in self.files)

    @property
    def failing(self) -> bool:
        """Whether a disk of several has failed to write: the others serve better without it."""
        return len(self.files) > 1 and any(file.failing for file in self.files)

    def depth(self, what: str) -> int:
        """How many pieces of one transfer are in flight at a time; ``what`` is ``"write"`` or ``"read"``."""
        return self._depths[what].depth

    # -- room -----------------------------------------------------------------------------------------------------

    def grow(self, nbytes: int, limit: int) -> bool:
        """Makes room for a range of ``nbytes`` at the end.

        Args:
            limit: by how much the files may grow in all, in bytes.

        Returns:
            Whether there was room on the disks.
        """
        self._catch_up()
        need = nbytes - self.extents.free_at_end
        if need <= 0:  # what an interrupt kept from being known
            return True
        if need > limit:
            return False
        # Asking for what is not there would fill the disk to the brim for a moment, at the cost of everyone else on it.
        files = list(self.files)
        while files:
            rooms = _rooms(files)
            files.sort(key=rooms.__getitem__, reverse=True)
            several, least = len(files), rooms[files[-1]] * len(files)
            grain = several * _STRIPE if several > 1 else PAGE
            wishes = round_up(max(several * _GROWTH, need), grain), limit // grain * grain, round_up(need, grain)
            refusing = files[-1]
            for step in dict.fromkeys(wishes):
                if need <= step <= min(least, limit):
                    refused = self._extend(files, step)
                    if refused is None:
                        return True
                    refusing = refused
            files.remove(refusing)
        return False

    def drain(self) -> int:
        """Takes up the slots that have died; when all have, gives the buffers of transfers back to the system.

        Returns:
            How many bytes were written since the last time.
        """
        if self.carved is not None:
            self.extents.release(self.carved.start, self.carved.nbytes, self.carved.fences)
            self.carved = None
        while self.returned:
            remains = self.returned[0]
            self.extents.release(remains.extent.start, remains.extent.nbytes, remains.extent.fences)
            self.used -= remains.nbytes
            del self.returned[0]
        written = 0
        for file in self.files:
            while file.written:
                written += file.written.popleft()
            if self.used == 0:
                file.trim()
        return written

    # -- bytes ----------------------------------------------------------------------------------------------------

    def write(self, extent: Extent, source: Tensor) -> None:
        """Writes all of ``source`` to the start of ``extent``.

        Raises:
            TransferError: the operating system refused.
        """
        self._transfer("write", extent, source)

    def read(self, extent: Extent, target: Tensor) -> None:
        """Reads the start of ``extent`` into all of ``target``.

        Raises:
            TransferError: the operating system refused.
        """
        self._transfer("read", extent, target)

    def mapping(self, extent: Extent, nbytes: int, owner: object) -> memoryview:
        """The first ``nbytes`` of ``extent`` as memory, which keeps ``owner``; what direct I/O writes shows there.

        Raises:
            MemoryError: the system refused.
        """
        pieces = self._pieces(extent.start, nbytes)
        return mapped_file([FilePart(piece.file.descriptor, piece.offset, piece.nbytes) for piece in pieces], owner)

    def _new_search(self) -> DepthSearch:
        least = len(self.files)
        return DepthSearch(least, max(least, MOST_PIECES))

    def _extend(self, files: Sequence[SpillFile], nbytes: int) -> SpillFile | None:
        """Adds a segment of ``nbytes`` in equal parts of ``files``; returns the one that refused, if one did."""
        each = nbytes // len(files)
        for refusing in files:
            if not refusing.extend(self._ends[refusing], each):
                for file in files:
                    file.cut_off(self._ends[file])
                return refusing
        ends = dict(self._ends)
        for file in files:
            ends[file] += each
        shares = tuple([_Share(file, self._ends[file]) for file in files])
        last = self._segments[-1] if self._segments else None
        if (
            last is not None
            and len(files) == 1
            and last.shares == (_Share(files[0], self._ends[files[0]] - last.nbytes),)
        ):
            segments = [*self._segments[:-1], last._replace(nbytes=last.nbytes + nbytes)]
        else:
            start = 0 if last is None else last.start + last.nbytes
            segments = [*self._segments, _Segment(start, nbytes, shares)]
        # No call in between: see [Note: interrupts] in eager/ground.py.
        self._segments, self._ends = segments, ends
        self._catch_up()
        return None

    def _catch_up(self) -> None:
        """Has the range allocator know of every segment; an interrupt may have kept one from it."""
        missing = self.length - self.extents.length
        if missing:
            self.extents.grow(missing)

    def _transfer(self, what: str, extent: Extent, tensor: Tensor) -> None:
        nbytes = tensor.numel()
        assert nbytes <= extent.nbytes
        if self.files[0].inherited:
            raise OffloadError(
                f"cannot {what} {nbytes} bytes on disk: they belong to the process that this one was forked from. "
                "What was saved before a fork can only be used by the parent; run forward and backward in one process."
            )
        carry, pieces = partial(_carry, what, tensor), self._pieces(extent.start, nbytes)
        if nbytes < _LARGE:
            for piece in pieces:
                carry(piece)
            return
        search, began = self._depths[what], time.perf_counter()
        if len(pieces) == 1:
            pieces = _cut(pieces[0], search.depth)
        self._crew.carry_out(carry, pieces, min(search.depth, len(pieces)))
        search.note(nbytes, time.perf_counter() - began)

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


def _goes_on(last: _Segment, shares: Sequence[_Share]) -> bool:
    """Whether what is added at ``shares`` lies right behind the last segment, in one file."""
    return len(shares) == 1 and last.shares == (_Share(shares[0].file, shares[0].offset - last.nbytes),)


def _cut(piece: _Piece, depth: int) -> list[_Piece]:
    """``piece`` in ``depth`` parts, or in fewer where they would be small."""
    size = max(round_up(-(-piece.nbytes // depth), PAGE), _LEAST_PIECE)
    return [
        _Piece(piece.file, piece.at + at, piece.offset + at, min(size, piece.nbytes - at))
        for at in range(0, piece.nbytes, size)
    ]


def _carry(what: str, tensor: Tensor, piece: _Piece) -> None:
    """Moves one piece of the transfer of ``tensor``.

    Raises:
        TransferError: the operating system refused.
    """
    file = piece.file
    move = file.write if what == "write" else file.read
    try:
        move(tensor.data_ptr() + piece.at, piece.nbytes, piece.offset)
    except (OSError, MemoryError) as error:
        raise file.failed(what, tensor.numel(), error) from error
