"""Spill files: unnamed files that are written and read with direct I/O."""

from __future__ import annotations

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

#: Free space left for other programs: this share of the disk, but at most this many bytes.
FLOOR_SHARE, FLOOR_BYTES = 1 / 20, 4 << 30
#: A file grows by this many bytes, or by the request if that is larger.
_GROWTH = 64 << 20

#: Size of a bounce buffer in bytes, and the number of buffers. Further transfers wait for a buffer.
_BOUNCE_BYTES = 4 << 20
_BOUNCE_BUFFERS = 4
#: Bytes written through the page cache before they are flushed and dropped from the cache.
_CACHED_BYTES = 16 << 20
#: Consecutive calls that may move no bytes (or fail with EINTR, EAGAIN) before a transfer fails.
_PATIENCE = 8

#: A call that moves part of a buffer to or from an offset of the file, and returns the number of bytes moved.
_Move: TypeAlias = Callable[[memoryview, int], int]

#: Errors of a call that the filesystem does not support.
_REFUSALS = (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS)
#: Errors of a full disk, an exhausted quota, a file at its size limit.
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class Usage(NamedTuple):
    """The space of a disk and of a file, in bytes."""

    total: int
    #: Available to this process.
    free: int
    #: Length of the file.
    length: int
    #: Disk space allocated for the file.
    occupied: int


class _Bounce:
    """Aligned buffers for direct I/O."""

    def __init__(self) -> None:
        self._permits = threading.BoundedSemaphore(_BOUNCE_BUFFERS)
        self._idle: deque[Tensor] = deque()

    @contextmanager
    def buffer(self) -> Iterator[int]:
        """Yields the address of a buffer. Waits if all are in use."""
        with self._permits:
            try:
                buffer = self._idle.pop()
            except IndexError:
                # No huge pages: most transfers use only one page, for their odd end.
                buffer = anonymous_slab(_BOUNCE_BYTES, huge=False)
            yield buffer.data_ptr()
            # Keep one buffer for the next transfer, and free the others.
            if not self._idle:
                self._idle.append(buffer)

    def release_idle(self) -> None:
        self._idle.clear()


class SpillFile:
    """An unnamed file of mode 0600, from which slots are cut. Closed with the last reference.

    Any number of threads may read and write; one at a time may call ``grow``. The methods from ``read_into`` to
    ``close`` make one or two system calls each and raise their ``OSError``. Tests override these methods.

    [Note: direct I/O]
    A buffered write leaves a copy in the page cache, which would use up the memory that offloading frees. Thus the file
    uses direct I/O if the filesystem supports it. Direct I/O requires alignment:

    1. Offsets and lengths are always multiples of 4096 bytes here.
    2. The alignment required of memory is found by trying; recent kernels require little. A source with this alignment
       is written in place.
    3. A target is read in place only in whole pages. If a page also held other data, the disk's write combined with a
       fork could lose the latest write to that data.
    4. All other bytes, and the odd end of every transfer, go through a bounce buffer.

    If direct I/O is refused, or accepted but ignored, each piece is flushed and dropped from the page cache.

    Raises:
        OSError: no file can be made in the directory.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        #: The whole file, from which the tier cuts slots.
        self.slab = Slab(0)
        #: Sizes of writes in bytes, which the tier adds up and removes. A deque, because appending needs no lock.
        self.uncounted: deque[int] = deque()
        #: Why the file could not grow the last time, unless the disk was full; ``None`` after it has grown.
        self.refusal: str | None = None
        #: Whether the file belongs to the parent of this forked process.
        self.inherited = False
        self.bounce = _Bounce()
        #: -1 after ``close``.
        self.descriptor = descriptor = _open_unnamed(directory)
        self._record = _Open(self, methodcaller("close"))
        self._record.close = partial(os.close, descriptor)
        _open_files.difference_update([record for record in list(_open_files) if record() is None])
        _open_files.add(self._record)
        if hasattr(os, "posix_fadvise"):
            # No read-ahead: reads are not sequential, and pages read ahead would stay in the page cache.
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_RANDOM)
        #: Alignment of memory for direct I/O in bytes; ``None``: transfers use the page cache.
        self.memory_alignment = self._probe()
        tell_after_fork(self)

    def _probe(self) -> int | None:
        """Returns the smallest alignment with which direct I/O works; ``None`` if it works with none."""
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
                    # Some filesystems accept O_DIRECT and use the page cache (e.g. ext4 with data=journal).
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

    def room(self) -> int:
        """Returns the bytes by which the file may grow: free space above the floor, up to the file size limit."""
        try:
            usage = self.usage()
        except OSError:
            return 0
        floor, most = min(int(usage.total * FLOOR_SHARE), FLOOR_BYTES), file_size_limit()
        # If the filesystem could not allocate blocks ahead, parts of the file have yet to take their space.
        free = usage.free - floor - max(usage.length - usage.occupied, 0)
        return max(free if most is None else min(free, most - usage.length), 0)

    def grow(self, need: int, limit: int) -> int:
        """Extends the file by ``need`` to ``limit`` bytes, which takes a while. The caller then updates the slab.
        Returns the growth in bytes; 0 if the disk has no room."""
        # Check the room first: a failing allocation would fill the disk for a moment, and other programs would fail.
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
                    # The filesystem cannot allocate ahead; a write that finds no space fails and is counted then.
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

    def write(self, address: int, nbytes: int, offset: int) -> None:
        """Writes ``nbytes`` bytes of memory to ``offset``, a multiple of ``PAGE``, padded to whole pages.

        Raises:
            OSError, MemoryError: a system call failed.
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
                # The device requires more alignment than the probe has shown.
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
            OSError, MemoryError: a system call failed.
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
        done = idle_calls = 0
        while done < len(memory):
            try:
                moved = move_some(memory[done:], offset + done)
            except (InterruptedError, BlockingIOError):  # EINTR, EAGAIN: repeat the call
                moved = 0
            before, done = done, done + moved
            if self.memory_alignment is not None:
                # Direct I/O continues at a whole page; the rest of the last one is moved again.
                done = done // PAGE * PAGE
            if done > before:
                idle_calls = 0
            elif idle_calls == _PATIENCE:
                raise OSError(errno.EIO, "the call moves no bytes, however often it is repeated")
            else:
                idle_calls += 1

    def failed(self, what: str, nbytes: int, error: OSError | MemoryError) -> TransferError:
        """Returns the error for a transfer of ``nbytes`` bytes that failed with ``error``."""
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
        """Closes the child's descriptor, which would keep the parent's disk space allocated."""
        self.inherited = True
        self.close()

    # -- system calls ---------------------------------------------------------------------------------------------

    def read_into(self, target: memoryview, offset: int) -> int:
        """Reads at ``offset`` into ``target``. Returns the number of bytes read, 0 at the end of the file."""
        return os.preadv(self.descriptor, [target], offset)

    def write_from(self, source: memoryview, offset: int) -> int:
        """Writes ``source`` at ``offset``. Returns the number of bytes written."""
        return os.pwritev(self.descriptor, [source], offset)

    def allocate(self, offset: int, nbytes: int) -> None:
        """Extends the file to ``offset + nbytes`` and allocates the disk space."""
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(self.descriptor, offset, nbytes)
        else:
            self.truncate(offset + nbytes)

    def usage(self) -> Usage:
        disk, file = os.fstatvfs(self.descriptor), os.fstat(self.descriptor)
        return Usage(disk.f_blocks * disk.f_frsize, disk.f_bavail * disk.f_frsize, file.st_size, file.st_blocks * 512)

    def truncate(self, length: int) -> None:
        os.ftruncate(self.descriptor, length)

    def set_direct(self, direct: bool) -> None:
        """Switches direct I/O on or off.

        Raises:
            OSError: the system or the filesystem has no direct I/O.
        """
        if not hasattr(os, "O_DIRECT"):
            if direct:
                raise OSError(errno.EOPNOTSUPP, "this system has no O_DIRECT")
            return
        import fcntl

        flags = fcntl.fcntl(self.descriptor, fcntl.F_GETFL)
        flags = flags | os.O_DIRECT if direct else flags & ~os.O_DIRECT
        fcntl.fcntl(self.descriptor, fcntl.F_SETFL, flags)

    def is_cached(self, offset: int) -> bool:
        return is_in_page_cache(self.descriptor, offset)

    def flush(self) -> None:
        """Waits until all writes are on the disk."""
        getattr(os, "fdatasync", os.fsync)(self.descriptor)

    def forget(self, offset: int, nbytes: int) -> None:
        """Drops a range from the page cache, except for dirty pages."""
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self.descriptor, offset, nbytes, os.POSIX_FADV_DONTNEED)

    def close(self) -> None:
        """Closes the file, which frees its disk space. Idempotent."""
        descriptor, self.descriptor = self.descriptor, -1
        if descriptor >= 0:
            _open_files.discard(self._record)
            # Until here, the record closes the file after an interrupt. No call may come between these two lines, or an
            # interrupt could leave the file to both or to neither.
            del self._record
            os.close(descriptor)


class _Open(FinalizerRecord[SpillFile]):
    """Closes a file that dies without ``close``, without Python code: see [Note: finalizers] in ``forking.py``."""

    __slots__ = ("close",)
    close: Callable[[], None]


#: Keeps the records alive. Records of dead files are removed when the next file is opened.
_open_files: set[_Open] = set()


def _open_unnamed(directory: Path) -> int:
    """Creates a file of mode 0600 that has no name, and returns its descriptor."""
    if hasattr(os, "O_TMPFILE"):
        # The filesystem may not support unnamed files. Any other error occurs again below.
        with suppress(OSError):
            return os.open(directory, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
    # Choose the name before the file exists, so that it is removed even after an interrupt.
    name, descriptor = directory / f".eager_offload-{secrets.token_hex(16)}", -1
    try:
        try:
            descriptor = os.open(name, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600)
        finally:
            with suppress(FileNotFoundError):
                os.unlink(name)
    except BaseException:
        if descriptor >= 0:
            os.close(descriptor)
        raise
    return descriptor
