"""One unnamed file and the system calls on it: all that the disk tier asks of the operating system."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
from collections.abc import Callable
from functools import partial
from operator import methodcaller
from pathlib import Path
from typing import NamedTuple

from eager_offload.tiers.finalizers import FinalizerRecord
from eager_offload.tiers.memory import is_in_page_cache


class Usage(NamedTuple):
    """How full a disk is, and what one file has of it; bytes."""

    total: int
    #: What this process may still take.
    free: int
    #: Where the file ends.
    length: int
    #: What the file takes of the disk.
    occupied: int


class RawFile:
    """An open file that has no name, which only its owner could have read while it had one.

    The methods are a system call or two each and raise ``OSError`` as those do. A subclass shows what a tier does when
    the calls fail or do half of their work.
    """

    def __init__(self, directory: Path) -> None:
        #: What the operating system knows the file by; -1 once it is closed.
        self.descriptor = descriptor = _open_unnamed(directory)
        self._record = _Open(self, methodcaller("close"))
        self._record.close = partial(os.close, descriptor)
        _open_files.difference_update([record for record in list(_open_files) if record() is None])
        _open_files.add(self._record)
        if hasattr(os, "posix_fadvise"):
            # What is read next is not what lies next, and what is read ahead into the page cache stays there.
            os.posix_fadvise(self.descriptor, 0, 0, os.POSIX_FADV_RANDOM)

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


class _Open(FinalizerRecord[RawFile]):
    """Closes a file that goes without having been closed, in C alone; see [Note: finalizers] in ``finalizers.py``."""

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
