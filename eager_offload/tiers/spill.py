"""A spill file: one unnamed file, written and read around the page cache."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from operator import methodcaller
from pathlib import Path
from typing import NamedTuple, TypeAlias

from torch import Tensor

from eager_offload.config import size_text
from eager_offload.errors import TransferError
from eager_offload.tiers.base import Slab
from eager_offload.tiers.forking import FinalizerRecord, tell_after_fork
from eager_offload.tiers.limits import file_size_limit
from eager_offload.tiers.memory import PAGE, anonymous_slab, is_in_page_cache, move, move_if_there, round_up, view_of

#: What stays free on every disk for other programs: this share of the disk, and at most so many bytes.
FLOOR_SHARE, FLOOR_BYTES = 1 / 20, 4 << 30
#: Bytes; a file grows by this much, or by the request where that is more.
_GROWTH = 64 << 20

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


class Usage(NamedTuple):
    """How full a disk is, and what one file has of it; bytes."""

    total: int
    #: What this process may still take.
    free: int
    #: Where the file ends.
    length: int
    #: What the file takes of the disk.
    occupied: int


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
        self._idle.clear()


class SpillFile:
    """One file without a name, of which slots are cut; it closes with the last reference.

    Threads may read and write it at once; one may have it grow. What only its owner may read has mode 0600 while it has
    a name. The methods from ``read_into`` to ``close`` are a system call or two each and raise ``OSError`` as those do:
    a test's subclass has them fail, or do half of their work.

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

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        #: All of it, of which the tier cuts slots.
        self.slab = Slab(0)
        #: Bytes that went to the disk and are not counted yet; the tier takes them out.
        self.uncounted: deque[int] = deque()
        #: Why the file could not grow the last time, if it was not full; ``None`` once it has grown.
        self.refusal: str | None = None
        #: Whether this process is a child and the file its parent's.
        self.inherited = False
        self.bounce = _Bounce()
        #: What the operating system knows the file by; -1 once it is closed.
        self.descriptor = descriptor = _open_unnamed(directory)
        self._record = _Open(self, methodcaller("close"))
        self._record.close = partial(os.close, descriptor)
        _open_files.difference_update([record for record in list(_open_files) if record() is None])
        _open_files.add(self._record)
        if hasattr(os, "posix_fadvise"):
            # What is read next is not what lies next, and what is read ahead into the page cache stays there.
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_RANDOM)
        #: What the address of a source has to be a multiple of, in bytes; ``None``: through the page cache.
        self.memory_alignment = self._probe()
        tell_after_fork(self)

    def _probe(self) -> int | None:
        """Returns the least alignment of memory that direct I/O takes here and does right; ``None`` for none."""
        buffer = anonymous_slab(16 * PAGE)
        pages = view_of(buffer.data_ptr(), 16 * PAGE, buffer)
        target = pages[8 * PAGE : 12 * PAGE]
        for alignment in (64, 512, PAGE):
            source = pages[alignment : alignment + 4 * PAGE]
            source[:] = alignment.to_bytes(2, "little") * (2 * PAGE)
            try:
                self.set_direct(True)
                written = self.write_from(source, 0)
                if self.read_into(target, 0) == written == len(source) and target == source:
                    # Some take it and do as they like, ext4 with a journal of data for one: it is in the cache then.
                    cached = self.is_cached(0)
                    self.set_direct(not cached)
                    return None if cached else alignment
            except OSError as error:
                if error.errno not in _REFUSALS:
                    raise
            finally:
                self.truncate(0)
        self.set_direct(False)
        return None

    # -- room -----------------------------------------------------------------------------------------------------

    def room(self) -> int:
        """Returns the bytes by which the file may grow: those free on its disk above the floor, up to its limit."""
        try:
            usage = self.usage()
        except OSError:
            return 0
        floor, most = min(int(usage.total * FLOOR_SHARE), FLOOR_BYTES), file_size_limit()
        # What was not promised is not in use yet, and will be.
        free = usage.free - floor - max(usage.length - usage.occupied, 0)
        return max(free if most is None else min(free, most - usage.length), 0)

    def grow(self, need: int, limit: int) -> int:
        """Makes the file longer than its slab, which takes the disk a while; the caller counts what is new.

        Args:
            need: bytes that are asked for.
            limit: by how much it may grow, in bytes.

        Returns:
            By how much it did; 0 where the disk has no room.
        """
        # Asking for what is not there would fill the disk to the brim for a moment, at the cost of all else on it.
        most, length = min(self.room(), limit), self.slab.nbytes
        for step in dict.fromkeys((max(_GROWTH, need), limit // PAGE * PAGE, need)):
            if not need <= step <= most:
                continue
            try:
                try:
                    self.allocate(length, step)
                except OSError as error:
                    if error.errno not in _REFUSALS:
                        raise
                    # The filesystem cannot promise room; a write that finds none fails and is counted then.
                    self.truncate(length + step)
            except OSError as error:
                if error.errno not in _FULL:
                    self.refusal = error.strerror or str(error)
                with suppress(OSError):
                    self.truncate(length)
            else:
                self.refusal = None
                return step
        return 0

    # -- bytes ----------------------------------------------------------------------------------------------------

    def write(self, address: int, nbytes: int, offset: int) -> None:
        """Writes ``nbytes`` bytes of memory to ``offset``, a multiple of ``PAGE``, and up to the next one.

        Raises:
            OSError, MemoryError: the operating system refused.
        """
        alignment, done = self.memory_alignment, 0
        if alignment is None:
            self._through_the_cache(self._write_some, address, nbytes, offset, flush=True)
            return
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
            with self.bounce.buffer() as base:
                for at in range(done, nbytes, _BOUNCE_BYTES):
                    piece = min(_BOUNCE_BYTES, nbytes - at)
                    whole = view_of(base, round_up(piece, PAGE))
                    move_if_there(base, address + at, piece)
                    whole[piece:] = bytes(len(whole) - piece)
                    self._fully(self._write_some, whole, offset + at)

    def read(self, address: int, nbytes: int, offset: int) -> None:
        """Reads ``nbytes`` bytes at ``offset``, a multiple of ``PAGE``, into memory.

        Raises:
            OSError, MemoryError: the operating system refused.
        """
        if self.memory_alignment is None:
            self._through_the_cache(self.read_into, address, nbytes, offset, flush=False)
            return
        in_place = nbytes // PAGE * PAGE if address % PAGE == 0 else 0
        self._fully(self.read_into, view_of(address, in_place), offset)
        if in_place < nbytes:
            with self.bounce.buffer() as base:
                for at in range(in_place, nbytes, _BOUNCE_BYTES):
                    piece = min(_BOUNCE_BYTES, nbytes - at)
                    self._fully(self.read_into, view_of(base, round_up(piece, PAGE)), offset + at)
                    move(address + at, base, piece)

    def _through_the_cache(self, move_some: _Move, address: int, nbytes: int, offset: int, *, flush: bool) -> None:
        for at in range(0, nbytes, _CACHED_BYTES):
            piece = min(_CACHED_BYTES, nbytes - at)
            self._fully(move_some, view_of(address + at, piece), offset + at)
            if flush:
                self.flush()
            self.forget(offset + at, round_up(piece, PAGE))

    def _write_some(self, source: memoryview, offset: int) -> int:
        moved = self.write_from(source, offset)
        self.uncounted.append(moved)
        return moved

    def _fully(self, move_some: _Move, memory: memoryview, offset: int) -> None:
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
                reason += f", with {size_text(self.usage().free)} free"
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
        self.close()

    # -- system calls ---------------------------------------------------------------------------------------------

    def read_into(self, target: memoryview, offset: int) -> int:
        """Reads at ``offset`` into ``target``; returns how many bytes came, 0 at the end of the file."""
        return os.preadv(self.descriptor, [target], offset)

    def write_from(self, source: memoryview, offset: int) -> int:
        """Writes ``source`` at ``offset``; returns how many bytes went."""
        return os.pwritev(self.descriptor, [source], offset)

    def allocate(self, offset: int, nbytes: int) -> None:
        """Makes the file reach to ``offset + nbytes`` with room on the disk for what is new."""
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(self.descriptor, offset, nbytes)
        else:
            self.truncate(offset + nbytes)

    def usage(self) -> Usage:
        """Returns how full the disk is, as it was a moment ago."""
        disk, file = os.fstatvfs(self.descriptor), os.fstat(self.descriptor)
        return Usage(disk.f_blocks * disk.f_frsize, disk.f_bavail * disk.f_frsize, file.st_size, file.st_blocks * 512)

    def truncate(self, length: int) -> None:
        """Makes the file ``length`` bytes long, without asking for room."""
        os.ftruncate(self.descriptor, length)

    def set_direct(self, direct: bool) -> None:
        """Has transfers go around the page cache, or not any more."""
        if not hasattr(os, "O_DIRECT"):
            if direct:
                raise OSError(errno.EOPNOTSUPP, "this system has no O_DIRECT")
            return
        import fcntl

        flags = fcntl.fcntl(self.descriptor, fcntl.F_GETFL)
        flags = flags | os.O_DIRECT if direct else flags & ~os.O_DIRECT
        fcntl.fcntl(self.descriptor, fcntl.F_SETFL, flags)

    def is_cached(self, offset: int) -> bool:
        """Returns whether the page at ``offset`` is in the page cache; ``False`` where the system does not say."""
        return is_in_page_cache(self.descriptor, offset)

    def flush(self) -> None:
        """Returns when everything written is on the disk."""
        getattr(os, "fdatasync", os.fsync)(self.descriptor)

    def forget(self, offset: int, nbytes: int) -> None:
        """Drops what the page cache holds of a range, as far as it is on the disk."""
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self.descriptor, offset, nbytes, os.POSIX_FADV_DONTNEED)

    def close(self) -> None:
        """Closes the file, which gives its room on the disk back. Idempotent."""
        descriptor, self.descriptor = self.descriptor, -1
        if descriptor >= 0:
            _open_files.discard(self._record)
            del self._record  # no call before the next one: until here, and no longer, it closes what an interrupt left
            os.close(descriptor)


class _Open(FinalizerRecord[SpillFile]):
    """Closes a file that goes without having been closed, in C alone; see [Note: finalizers] in ``forking.py``."""

    __slots__ = ("close",)
    close: Callable[[], None]


#: Also those of files that have gone since one was last opened.
_open_files: set[_Open] = set()


def _open_unnamed(directory: Path) -> int:
    """Returns a descriptor of a new file, mode 0600, that is in no directory."""
    if hasattr(os, "O_TMPFILE"):
        # A filesystem may have no unnamed files; anything worse than that shows below as well.
        with contextlib.suppress(OSError):
            return os.open(directory, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
    # Named before it is there: whatever interrupts this, the name is known and goes.
    name, descriptor = directory / f".eager_offload-{secrets.token_hex(16)}", -1
    try:
        try:
            descriptor = os.open(name, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600)
        finally:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(name)
    except BaseException:
        if descriptor >= 0:
            os.close(descriptor)
        raise
    return descriptor
