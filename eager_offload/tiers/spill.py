"""A spill file: one unnamed file, written and read around the page cache."""

from __future__ import annotations

import errno
import os
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeAlias

from torch import Tensor

from eager_offload.config import size_text
from eager_offload.errors import TransferError
from eager_offload.tiers.forking import tell_after_fork
from eager_offload.tiers.limits import file_size_limit
from eager_offload.tiers.memory import PAGE, anonymous_slab, move, move_if_there, round_up, view_of
from eager_offload.tiers.rawfile import RawFile

#: What stays free on every disk for other programs: this share of the disk, and at most so many bytes.
FLOOR_SHARE, FLOOR_BYTES = 1 / 20, 4 << 30

#: Bytes a bounce buffer, and how many there may be: that many transfers run at once, the others wait for one.
_BOUNCE_BYTES = 4 << 20
_BOUNCE_BUFFERS = 4
#: Bytes written through the page cache before they are flushed and dropped from it.
_CACHED_BYTES = 16 << 20
#: How often a call may lead nowhere on end, by moving nothing or by asking to be repeated, before it counts as failed.
_PATIENCE = 8

#: A call that moves some of a buffer, to or from an offset of the file, and says how many bytes.
_Move: TypeAlias = Callable[[memoryview, int], int]

#: What a filesystem says to a call that it does not offer.
_REFUSALS = (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS)
#: What is said where there is no room: on the disk, for its owner, for one file.
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class _Bounce:
    """Aligned buffers, for bytes that direct I/O cannot take from where they are."""

    def __init__(self) -> None:
        self._permits = threading.BoundedSemaphore(_BOUNCE_BUFFERS)
        self._idle: deque[Tensor] = deque()

    @contextmanager
    def buffer(self) -> Iterator[int]:
        """Yields the address of a buffer; waits for one where all are in use."""
        with self._permits:
            try:
                buffer = self._idle.pop()
            except IndexError:
                # Most transfers need a page of it, for their odd end.
                buffer = anonymous_slab(_BOUNCE_BYTES, huge=False)
            yield buffer.data_ptr()
            # One stays for the next transfer; the others were needed for a moment.
            if not self._idle:
                self._idle.append(buffer)

    def release_idle(self) -> None:
        """Gives idle buffers back to the system."""
        self._idle.clear()


class SpillFile:
    """One file, which closes with the last reference. Threads may read and write it at once; one may have it grow.

    [Note: direct I/O]
    A buffered write would leave a copy in the page cache, and the memory that offloading frees would be gone again. So
    the file is opened for direct I/O where the filesystem takes it, which asks for alignment: offset and length are
    multiples of 4096 here always, and the alignment of the memory is found by trying. A source that has it (new kernels
    ask for very little) is written from where it is. A target is read in place only at a whole page: on a page that is
    shared with other data, the disk's write and a fork could cost that data its own latest write. What is left, and the
    odd end of every transfer, goes through a bounce buffer. Where direct I/O is refused, or taken and not done, the
    cache is flushed and dropped behind each piece.

    Raises:
        OSError: the directory cannot take the file.
    """

    def __init__(self, directory: Path, file_type: type[RawFile]) -> None:
        self.directory = directory
        #: Bytes that went to the disk and are not counted yet; the space takes them out.
        self.written: deque[int] = deque()
        #: Why the file could not grow the last time, if the reason was another than that; ``None`` once it has grown.
        self.refusal: str | None = None
        #: Whether this process is a child and the file its parent's.
        self.inherited = False
        self._raw = file_type(directory)
        self.bounce = _Bounce()
        #: What the address of a source has to be a multiple of, in bytes; ``None``: through the page cache.
        self.memory_alignment = self._probe()
        tell_after_fork(self)

    @property
    def descriptor(self) -> int:
        """What the operating system knows the file by."""
        return self._raw.descriptor

    def room(self) -> int:
        """Returns the bytes by which the file may grow: those free on its disk above the floor, up to its limit."""
        try:
            usage = self._raw.usage()
        except OSError:
            return 0
        floor, most = min(int(usage.total * FLOOR_SHARE), FLOOR_BYTES), file_size_limit()
        # What was not promised is not in use yet, and will be.
        free = usage.free - floor - max(usage.length - usage.occupied, 0)
        return max(free if most is None else min(free, most - usage.length), 0)

    def extend(self, length: int, nbytes: int) -> bool:
        """Makes the file, which is used up to ``length``, reach ``nbytes`` further; returns whether it does."""
        try:
            self._lengthen(length, nbytes)
        except OSError as error:
            if error.errno not in _FULL:
                self.refusal = error.strerror or str(error)
            with suppress(OSError):
                self._raw.truncate(length)
            return False
        self.refusal = None
        return True

    def write(self, address: int, nbytes: int, offset: int) -> None:
        """Writes ``nbytes`` bytes of memory to ``offset``, a multiple of ``PAGE``, and up to the next one.

        Raises:
            OSError, MemoryError: the operating system refused.
        """
        if self.memory_alignment is None:
            self._through_the_cache(self._write_some, address, nbytes, offset, flush=True)
        else:
            self._write_directly(address, nbytes, offset, self.memory_alignment)

    def read(self, address: int, nbytes: int, offset: int) -> None:
        """Reads ``nbytes`` bytes at ``offset``, a multiple of ``PAGE``, into memory.

        Raises:
            OSError, MemoryError: the operating system refused.
        """
        if self.memory_alignment is None:
            self._through_the_cache(self._raw.read_into, address, nbytes, offset, flush=False)
            return
        in_place = nbytes // PAGE * PAGE if address % PAGE == 0 else 0
        self._fully(self._raw.read_into, view_of(address, in_place), offset)
        if in_place < nbytes:
            self._read_through_bounce(address + in_place, nbytes - in_place, offset + in_place)

    def failed(self, what: str, nbytes: int, error: OSError | MemoryError) -> TransferError:
        """Returns what a user reads when a transfer of ``nbytes`` bytes met with ``error`` here."""
        number = error.errno if isinstance(error, OSError) else errno.ENOMEM
        if number == errno.EFBIG:
            remedy = "raise the limit (ulimit -f)"
            if file_size_limit() is None:
                remedy = "set disk_path to a directory on a filesystem that takes larger files"
        elif number in _FULL:
            remedy = "free some room there, or set disk_path to a directory on another disk"
        elif number == errno.ENOMEM:
            remedy = "leave the system more memory for transfers: lower max_inflight_bytes and prefetch_bytes"
        else:
            remedy = "check the disk (the kernel's log says more), or set disk_path to a directory on another one"
        reason = os.strerror(number) if number is not None else str(error)
        if number in _FULL and number != errno.EFBIG:
            with suppress(OSError):
                reason += f", with {size_text(self._raw.usage().free)} free"
        return TransferError(
            f"could not {what} {nbytes} bytes {'to' if what == 'write' else 'from'} the spill file in "
            f"{str(self.directory)!r}: {reason}. What to do: {remedy}.",
            errno=number,
            tier="disk",
            nbytes=nbytes,
        )

    def after_fork(self) -> None:
        """Keeps the child from what its parent writes and reads, and from occupying its room on the disk."""
        self.inherited = True
        self._raw.close()

    # -- growing and probing --------------------------------------------------------------------------------------

    def _lengthen(self, length: int, nbytes: int) -> None:
        try:
            self._raw.allocate(length, nbytes)
        except OSError as error:
            if error.errno not in _REFUSALS:
                raise
            # The filesystem cannot promise room; a write that finds none fails and is counted then.
            self._raw.truncate(length + nbytes)

    def _probe(self) -> int | None:
        """Returns the least alignment of memory that direct I/O takes here and does right; ``None`` for none."""
        buffer = anonymous_slab(16 * PAGE)
        pages = view_of(buffer.data_ptr(), 16 * PAGE, buffer)
        target = pages[8 * PAGE : 12 * PAGE]
        for alignment in (64, 512, PAGE):
            source = pages[alignment : alignment + 4 * PAGE]
            source[:] = alignment.to_bytes(2, "little") * (2 * PAGE)
            try:
                self._raw.set_direct(True)
                written = self._raw.write_from(source, 0)
                if self._raw.read_into(target, 0) == written == len(source) and target == source:
                    return None if self._goes_through_the_cache() else alignment
            except OSError as error:
                if error.errno not in _REFUSALS:
                    raise
            finally:
                self._raw.truncate(0)
        self._raw.set_direct(False)
        return None

    def _goes_through_the_cache(self) -> bool:
        """Returns whether what was written to the beginning is in the page cache, although direct I/O was taken.

        Some take it and do as they like, ext4 with a journal of data for one. From here on it is not asked for then.
        """
        cached = self._raw.is_cached(0)
        self._raw.set_direct(not cached)
        return cached

    # -- moving ---------------------------------------------------------------------------------------------------

    def _through_the_cache(self, move_some: _Move, address: int, nbytes: int, offset: int, *, flush: bool) -> None:
        for at in range(0, nbytes, _CACHED_BYTES):
            piece = min(_CACHED_BYTES, nbytes - at)
            self._fully(move_some, view_of(address + at, piece), offset + at)
            if flush:
                self._raw.flush()
            self._raw.forget(offset + at, round_up(piece, PAGE))

    def _write_directly(self, address: int, nbytes: int, offset: int, alignment: int) -> None:
        done = 0
        if address % alignment == 0 and nbytes >= PAGE:
            done = nbytes // PAGE * PAGE
            try:
                self._fully(self._write_some, view_of(address, done), offset)
            except OSError as error:
                if error.errno != errno.EINVAL or address % PAGE == 0:
                    raise
                # The probe's few pages passed and these did not: the device asks for more than it said.
                self.memory_alignment, done = PAGE, 0
        if done < nbytes:
            self._write_through_bounce(address + done, nbytes - done, offset + done)

    def _write_through_bounce(self, address: int, nbytes: int, offset: int) -> None:
        with self.bounce.buffer() as base:
            for at in range(0, nbytes, _BOUNCE_BYTES):
                piece = min(_BOUNCE_BYTES, nbytes - at)
                whole = view_of(base, round_up(piece, PAGE))
                move_if_there(base, address + at, piece)
                whole[piece:] = bytes(len(whole) - piece)
                self._fully(self._write_some, whole, offset + at)

    def _read_through_bounce(self, address: int, nbytes: int, offset: int) -> None:
        with self.bounce.buffer() as base:
            for at in range(0, nbytes, _BOUNCE_BYTES):
                piece = min(_BOUNCE_BYTES, nbytes - at)
                self._fully(self._raw.read_into, view_of(base, round_up(piece, PAGE)), offset + at)
                move(address + at, base, piece)

    def _write_some(self, source: memoryview, offset: int) -> int:
        moved = self._raw.write_from(source, offset)
        self.written.append(moved)
        return moved

    def _fully(self, move_some: _Move, memory: memoryview, offset: int) -> None:
        """Repeats a call until all of ``memory`` is moved."""
        done = in_vain = 0
        while done < len(memory):
            try:
                moved = move_some(memory[done:], offset + done)
            except (InterruptedError, BlockingIOError):  # EINTR, EAGAIN: it did nothing, and asks to be repeated
                moved = 0
            before, done = done, done + moved
            if self.memory_alignment is not None:
                # Direct I/O can only go on at a whole block; the rest of the last one is moved once more.
                done = done // PAGE * PAGE
            if done > before:
                in_vain = 0
            elif in_vain == _PATIENCE:
                raise OSError(errno.EIO, "the call moves no bytes, however often it is repeated")
            else:
                in_vain += 1
