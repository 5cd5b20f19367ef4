"""The ledger of a node: how much of the memory that its processes share each of them has taken.

[Note: the file]
The ledger is a file in ``/dev/shm`` for the processes of one user, one pid namespace and one control group with a
limit. Each process has a row, with its pid and the time when it started: pids are used again. Rows of processes that
are gone are free. The last process to leave removes the file. One that is killed cannot, so the next process that joins
a ledger removes the files in which nobody is alive.

[Note: the lock]
A process sums up the rows of others and writes its own under ``flock``, which the kernel takes from a process that
dies. Meanwhile the process asks the system for what it has left, and does nothing else: memory is taken without the
lock. A process that is stopped just then keeps the lock all the same, so the others wait for ``_PATIENCE`` at most. The
file is open only meanwhile: its descriptor can never become another file's, and a forked child closes its copy, which
would keep the lock.
"""

from __future__ import annotations

import errno
import os
import stat
import struct
import time
from collections.abc import Callable, Iterator, Sequence
from io import FileIO
from multiprocessing.util import Finalize
from pathlib import Path
from typing import NamedTuple, TypeVar

from eager_offload.errors import SystemErrorsSuppressed
from eager_offload.tiers.forking import tell_after_fork

T = TypeVar("T")

#: Seconds until a process that finds the lock taken goes on without the ledger; and between two tries.
_PATIENCE, _PAUSE = 1.0, 0.002
#: Seconds for which a lock that was waited for in vain is only tried.
_IMPATIENT = 30.0
#: The pid, the start time, an entry.
_ROW = struct.Struct("=QQqqq")


class Entry(NamedTuple):
    """What one process has of the memory that is shared, in bytes."""

    held: int = 0
    """For saved tensors, by budgets that follow the machine: taken, or about to be."""
    coming: int = 0
    """About to be taken, by budgets of both kinds: the system does not count these bytes yet."""
    need: int = 0
    """What a step has needed of ``held``; ``UNKNOWN`` before the first has ended."""


#: The need of a process that has not ended a step yet.
UNKNOWN = -1


class Ledger:
    """The row of this process in the ledger of its node. The lock of its owner guards it.

    Args:
        directory: where files are memory that all processes of the node see.
    """

    def __init__(self, directory: Path = Path("/dev/shm")) -> None:
        self._directory = directory
        #: While it is open.
        self._file: FileIO | None = None
        self._join_anew()
        tell_after_fork(self)

    def _join_anew(self) -> None:
        self._path: Path | None = None
        #: Which file it was, where the row begins in it, and when this process has started.
        self._inode = self._offset = self._start = 0
        self._is_over = False
        self._impatient_until = 0.0

    def after_fork(self) -> None:
        """Starts the child without a row: it joins when it takes memory."""
        if self._file is not None:
            self._file.close()
        self._join_anew()

    def settle(self, group: Callable[[], str], decide: Callable[[Sequence[Entry]], tuple[Entry, T]]) -> T:
        """Writes the entry that ``decide`` makes of the entries of all other processes, with the ledger locked.

        Args:
            group: returns what names the control group, when this process joins.
            decide: returns the entry, and what this returns.

        Raises:
            OSError: there is no ledger, or another process does not unlock it.
        """
        start = _start_of(os.getpid())
        if self._is_over or not start:
            raise OSError(errno.ESRCH, "this process cannot be in a ledger")
        if self._path is None:
            self._path = self._joined(group())
        while True:
            with self._open(self._path, os.O_CREAT) as file:
                patience = _PATIENCE if time.monotonic() >= self._impatient_until else 0.0
                try:
                    is_there = _lock(file, self._path, patience)
                except BlockingIOError:  # whoever holds it stands still, and is not waited for each time
                    self._impatient_until = time.monotonic() + _IMPATIENT
                    raise
                if not is_there:
                    continue  # its last process has removed it meanwhile
                try:
                    rows = list(_rows(file))
                    own = next((at for at, pid, *_ in rows if pid == os.getpid()), None)
                    free = (at for at, pid, *_ in rows if not pid)
                    offset = next(free, len(rows) * _ROW.size) if own is None else own
                    entry, made = decide([entry for at, pid, entry in rows if pid and at != own])
                    os.pwrite(file.fileno(), _ROW.pack(os.getpid(), start, *entry), offset)
                    # Not before: ``update`` writes there.
                    self._start, self._offset, self._inode = start, offset, os.fstat(file.fileno()).st_ino
                finally:
                    _unlock(file)
                return made

    def update(self, entry: Entry) -> None:
        """Writes the entry without the lock: no other process writes to this row."""
        if self._inode and self._path is not None:
            with SystemErrorsSuppressed(), self._open(self._path) as file:
                if os.fstat(file.fileno()).st_ino == self._inode:
                    os.pwrite(file.fileno(), _ROW.pack(os.getpid(), self._start, *entry), self._offset)

    def leave(self) -> None:
        """Takes the row out as the process ends, and removes the file if no other process has a row."""
        self._is_over = True
        if self._inode and self._path is not None:
            self._remove(self._path)

    def _joined(self, group: str) -> Path:
        """Returns the path of the ledger of ``group``; removes ledgers that processes have left behind."""
        owner = f"eager_offload-{os.geteuid()}-{os.stat('/proc/self/ns/pid').st_ino}"
        path = self._directory / f"{owner}-{group}"
        for other in self._directory.glob(f"{owner}-*"):
            if other != path:
                self._remove(other)
        Finalize(None, self.leave, exitpriority=0)  # a process that multiprocessing has forked runs no atexit
        return path

    def _remove(self, path: Path) -> None:
        with SystemErrorsSuppressed(), self._open(path) as file:
            if _lock(file, path, _PATIENCE):
                try:
                    rows = list(_rows(file))
                    for at in [at for at, pid, _ in rows if pid == os.getpid()]:
                        os.pwrite(file.fileno(), bytes(_ROW.size), at)
                    if not {pid for _, pid, _ in rows} - {0, os.getpid()}:
                        path.unlink()
                finally:
                    _unlock(file)

    def _open(self, path: Path, flags: int = 0) -> FileIO:
        """Returns the file, for a ``with`` of C: an interrupt on the way into an ``__exit__`` in Python would keep it.

        Raises:
            OSError: it is not there, or it is not a file that this user alone can write.
        """

        def opened(path: str, mode: int) -> int:
            # A symlink, or a file that somebody else has put there, is not followed and not waited for.
            return os.open(path, mode | flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o600)

        file = self._file = FileIO(os.fspath(path), "r+", opener=opened)
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o077:
            file.close()
            raise OSError(errno.EPERM, "not a file of this user alone", str(path))
        return file


def _lock(file: FileIO, path: Path, patience: float) -> bool:
    """Locks the file, within so many seconds; returns whether it still has its name."""
    try:
        from fcntl import LOCK_EX, LOCK_NB, flock
    except ImportError as error:  # Windows
        raise OSError(errno.ENOSYS, "this system has no flock") from error
    latest = time.monotonic() + patience
    while True:
        try:
            flock(file, LOCK_EX | LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= latest:
                raise
            time.sleep(_PAUSE)
            continue
        try:
            return os.path.samestat(os.stat(path, follow_symlinks=False), os.fstat(file.fileno()))
        except FileNotFoundError:
            return False


def _unlock(file: FileIO) -> None:
    """Unlocks the file, also for a child that was forked before this process knew its descriptor."""
    from fcntl import LOCK_UN, flock

    flock(file, LOCK_UN)


def _rows(file: FileIO) -> Iterator[tuple[int, int, Entry]]:
    """Yields where each row begins, the pid, and the entry; 0 is the pid of a row that is free."""
    data = os.pread(file.fileno(), os.fstat(file.fileno()).st_size, 0)
    for at in range(0, len(data) - _ROW.size + 1, _ROW.size):
        pid, start, *entry = _ROW.unpack_from(data, at)
        yield at, pid if pid and _start_of(pid) == start else 0, Entry(*entry)


def _start_of(pid: int) -> int:
    """Returns when a process has started, in ticks since the machine has; 0 where it has ended.

    Raises:
        OSError: that cannot be read, such as where no file descriptor is free.
    """
    try:
        with FileIO(f"/proc/{pid}/stat") as file:
            fields = file.read(4096).rpartition(b")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    return 0 if fields[:1] in ([b"Z"], [b"X"]) else int(fields[19])
