"""Files for a real disk tier whose system calls count, fail, or do half of their work."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import ClassVar, TypeAlias, TypeVar

from eager_offload.tiers.spill import SpillFile, Usage

T = TypeVar("T")
#: What becomes of a call: an error in its place, or what is done once it has been made.
Strike: TypeAlias = OSError | Callable[[], object] | None


def failure(number: int) -> OSError:
    return OSError(number, os.strerror(number))


def _struck(strike: Strike, call: Callable[..., T], *arguments: object) -> T:
    if isinstance(strike, OSError):
        raise strike
    result = call(*arguments)
    if strike is not None:
        strike()
    return result


class Watched(SpillFile):
    """Counts the bytes that the system moved; a test reaches each open file through ``opened``."""

    opened: ClassVar[list[Watched]] = []

    written = 0
    on_write: Strike = None
    on_read: Strike = None
    on_allocate: Strike = None
    on_truncate: Strike = None
    on_usage: Strike = None

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        Watched.opened.append(self)

    def write_from(self, source: memoryview, offset: int) -> int:
        moved = _struck(self.on_write, super().write_from, source, offset)
        self.written += moved
        return moved

    def read_into(self, target: memoryview, offset: int) -> int:
        return _struck(self.on_read, super().read_into, target, offset)

    def allocate(self, offset: int, nbytes: int) -> None:
        _struck(self.on_allocate, super().allocate, offset, nbytes)

    def truncate(self, length: int) -> None:
        _struck(self.on_truncate, super().truncate, length)

    def usage(self) -> Usage:
        return _struck(self.on_usage, super().usage)

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


class Halting(Watched):
    """Moves part of what it is asked to, in the pattern of ``lengths``; 0 is a call that succeeds and moves nothing."""

    lengths: Iterator[int] = iter(())

    def halt(self, *lengths: int) -> None:
        self.lengths = iter(lengths * 10_000)

    def write_from(self, source: memoryview, offset: int) -> int:
        return self._some_of(super().write_from, source, offset)

    def read_into(self, target: memoryview, offset: int) -> int:
        return self._some_of(super().read_into, target, offset)

    def _some_of(self, move: Callable[[memoryview, int], int], memory: memoryview, offset: int) -> int:
        length = next(self.lengths, len(memory))
        if length % 512:  # the call stops early, after whole sectors, and says less than it did
            move(memory[: -(-length // 4096) * 4096], offset)
            return min(length, len(memory))
        return move(memory[:length], offset) if length else 0
