"""Files for a real disk tier whose system calls count, fail, or do half of their work."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import ClassVar

from eager_offload.tiers.rawfile import RawFile


def failure(number: int) -> OSError:
    return OSError(number, os.strerror(number))


class Watched(RawFile):
    """Counts the bytes that the system moved; a test reaches each open file through ``opened``."""

    opened: ClassVar[list[Watched]] = []

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self.directory = directory
        self.written = self.read = 0
        self.on_write: OSError | None = None
        self.on_read: OSError | None = None
        self.on_allocate: OSError | None = None
        Watched.opened.append(self)

    def write_from(self, source: memoryview, offset: int) -> int:
        if self.on_write is not None:
            raise self.on_write
        moved = super().write_from(source, offset)
        self.written += moved
        return moved

    def read_into(self, target: memoryview, offset: int) -> int:
        if self.on_read is not None:
            raise self.on_read
        moved = super().read_into(target, offset)
        self.read += moved
        return moved

    def allocate(self, offset: int, nbytes: int) -> None:
        if self.on_allocate is not None:
            raise self.on_allocate
        super().allocate(offset, nbytes)

    @property
    def stat(self) -> os.stat_result:
        return os.fstat(self.descriptor)

    def overwrite(self, offset: int, what: bytes) -> None:
        """What a faulty disk does: changes bytes behind everyone's back."""
        self.set_direct(False)
        os.pwrite(self.descriptor, what, offset)
        os.fsync(self.descriptor)
        self.set_direct(True)

    def cached_pages(self) -> int:
        """How many pages of the file the page cache holds."""
        length = self.stat.st_size
        with mmap.mmap(self.descriptor, length) as mapped:
            pages = (ctypes.c_ubyte * (-(-length // mmap.PAGESIZE)))()
            anchor = ctypes.c_char.from_buffer(mapped)
            libc = ctypes.CDLL(None, use_errno=True)
            assert libc.mincore(ctypes.c_void_p(ctypes.addressof(anchor)), ctypes.c_size_t(length), pages) == 0
            del anchor
        return sum(page & 1 for page in pages)


class Cached(Watched):
    """A filesystem that refuses direct I/O."""

    def set_direct(self, direct: bool) -> None:
        if direct:
            raise failure(errno.EINVAL)
        super().set_direct(False)


class Picky(Watched):
    """Takes a source at 512 bytes while it is small, as the probe's is, and asks for whole pages after that."""

    refused = 0

    def write_from(self, source: memoryview, offset: int) -> int:
        address = ctypes.addressof(ctypes.c_char.from_buffer(source))
        if len(source) > 16384 and address % 4096:
            self.refused += 1
            raise failure(errno.EINVAL)
        return super().write_from(source, offset)


class Computing(Watched):
    """While it writes, compute goes on."""

    goes_on: Callable[[], object] | None = None

    def write_from(self, source: memoryview, offset: int) -> int:
        moved = super().write_from(source, offset)
        if self.goes_on is not None:
            self.goes_on()
        return moved


class Halting(Watched):
    """Moves part of what it is asked to, in the pattern of ``lengths``; 0 is a call that succeeds and moves nothing."""

    lengths: ClassVar[tuple[int, ...]] = ()

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self._next: Iterator[int] = iter(())

    def halt(self, *lengths: int) -> None:
        self._next = iter(lengths * 10_000)

    def write_from(self, source: memoryview, offset: int) -> int:
        return self._some_of(super().write_from, source, offset)

    def read_into(self, target: memoryview, offset: int) -> int:
        return self._some_of(super().read_into, target, offset)

    def _some_of(self, move: Callable[[memoryview, int], int], memory: memoryview, offset: int) -> int:
        length = next(self._next, len(memory))
        if length % 512:  # the call stops early, after whole sectors, and says less than it did
            move(memory[: -(-length // 4096) * 4096], offset)
            return min(length, len(memory))
        return move(memory[:length], offset) if length else 0
