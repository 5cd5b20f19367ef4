"""The ledger of a node: a file with the host memory that each process of the library has taken.

[Note: ledger file]
The ledger is a file in ``/dev/shm`` for the processes of one user, one pid namespace and one control group with a
limit. Each process has a row with its pid and its start time, since pids are reused. Rows of dead processes are free.
The last process to leave removes the file. A killed process cannot, so the next process that joins a ledger removes all
files without living processes.

[Note: ledger lock]
A process reads the other rows and writes its own under ``flock``, which the kernel releases if the process dies. With
the lock held, the process only reads the system's limits; memory is taken without the lock. A process that is stopped
(SIGSTOP) keeps the lock, so the others wait for ``_PATIENCE`` seconds at most. The file is open only while it is used,
so that its descriptor is never mistaken for another file's. A forked child closes its copy, which would keep the lock.
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

#: Seconds to wait for the lock before continuing without the ledger, and between two tries.
_PATIENCE, _PAUSE = 1.0, 0.002
#: Seconds after a timeout during which the lock is tried without waiting.
_IMPATIENT = 30.0
#: Pid, start time, entry.
_ROW = struct.Struct("=QQqqq")


class Entry(NamedTuple):
    """The host memory of one process, in bytes."""

    held: int = 0
    """For saved tensors under automatic budgets: taken, or about to be."""
    coming: int = 0
    """About to be taken under any budget, so not yet counted by the system."""
    need: int = 0
    """The part of ``held`` that recent steps have needed; ``UNKNOWN`` before the first step has ended."""


UNKNOWN = -1


class Ledger:
    """The row of this process in the ledger of its node. Guarded by the lock of its owner (``HostBound``).
    ``directory``: a directory in memory that all processes of the node share."""

    def __init__(self, directory: Path = Path("/dev/shm")) -> None:
        self._directory = directory
        #: The file that was opened last, for ``after_fork``.
        self._file: FileIO | None = None
        self._join_anew()
        tell_after_fork(self)

    def _join_anew(self) -> None:
        self._path: Path | None = None
        #: Inode of the file, offset of this process's row, and start time of this process.
        self._inode = self._offset = self._start = 0
        self._is_over = False
        self._impatient_until = 0.0

    def after_fork(self) -> None:
        """Closes the child's copy of the file. The child joins when it takes memory."""
        if self._file is not None:
            self._file.close()
        self._join_anew()

    def settle(self, group: Callable[[], str], decide: Callable[[Sequence[Entry]], tuple[Entry, T]]) -> T:
        """Calls ``decide`` with the entries of all other processes and writes its entry, with the ledger locked.

        Args:
            group: returns the name of the control group; called when this process joins.
            decide: returns this process's new entry and the result of ``settle``.

        Raises:
            OSError: there is no ledger, or another process holds the lock for too long.
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
                except BlockingIOError:  # the holder is stopped: do not wait again each time
                    self._impatient_until = time.monotonic() + _IMPATIENT
                    raise
                if not is_there:
                    continue  # its last process has just removed the file: make a new one
                try:
                    rows = list(_rows(file))
                    own = next((at for at, pid, *_ in rows if pid == os.getpid()), None)
                    free = (at for at, pid, *_ in rows if not pid)
                    offset = next(free, len(rows) * _ROW.size) if own is None else own
                    entry, made = decide([entry for at, pid, entry in rows if pid and at != own])
                    os.pwrite(file.fileno(), _ROW.pack(os.getpid(), start, *entry), offset)
                    # Only now does the row belong to this process, so that ``update`` may write there.
                    self._start, self._offset, self._inode = start, offset, os.fstat(file.fileno()).st_ino
                finally:
                    _unlock(file)
                return made

    def update(self, entry: Entry) -> None:
        """Writes the entry. Needs no lock, because no other process writes to this row."""
        if self._inode and self._path is not None:
            with SystemErrorsSuppressed(), self._open(self._path) as file:
                if os.fstat(file.fileno()).st_ino == self._inode:
                    os.pwrite(file.fileno(), _ROW.pack(os.getpid(), self._start, *entry), self._offset)

    def leave(self) -> None:
        """Clears the row when the process ends, and removes the file if no other process has a row."""
        self._is_over = True
        if self._inode and self._path is not None:
            self._remove(self._path)

    def _joined(self, group: str) -> Path:
        """Returns the path of the ledger of ``group``, and removes ledgers without living processes."""
        owner = f"eager_offload-{os.geteuid()}-{os.stat('/proc/self/ns/pid').st_ino}"
        path = self._directory / f"{owner}-{group}"
        for other in self._directory.glob(f"{owner}-*"):
            if other != path:
                self._remove(other)
        Finalize(None, self.leave, exitpriority=0)  # not atexit, which processes forked by multiprocessing do not run
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
        """Opens the ledger. Returns a C object, whose ``with`` closes the file even if an interrupt hits ``__exit__``.

        Raises:
            OSError: the file is missing, or others than this user may access it.
        """

        def opened(path: str, mode: int) -> int:
            # Another user may have put a symlink or a pipe there: do not follow the one or wait for the other.
            return os.open(path, mode | flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o600)

        file = self._file = FileIO(os.fspath(path), "r+", opener=opened)
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o077:
            file.close()
            raise OSError(errno.EPERM, "not a file of this user alone", str(path))
        return file


def _lock(file: FileIO, path: Path, patience: float) -> bool:
    """Locks the file within ``patience`` seconds. Returns whether ``path`` still names the file."""
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
    """Unlocks explicitly: a child forked in ``_open``, before ``_file`` was set, has a copy that ``close`` leaves."""
    from fcntl import LOCK_UN, flock

    flock(file, LOCK_UN)


def _rows(file: FileIO) -> Iterator[tuple[int, int, Entry]]:
    """Yields the offset, pid and entry of each row; the pid of a free row is 0."""
    data = os.pread(file.fileno(), os.fstat(file.fileno()).st_size, 0)
    for at in range(0, len(data) - _ROW.size + 1, _ROW.size):
        pid, start, *entry = _ROW.unpack_from(data, at)
        yield at, pid if pid and _start_of(pid) == start else 0, Entry(*entry)


def _start_of(pid: int) -> int:
    """Returns the start time of a process in clock ticks since boot; 0 if the process has ended.

    Raises:
        OSError: the time cannot be read (e.g. no file descriptor is free).
    """
    try:
        with FileIO(f"/proc/{pid}/stat") as file:
            fields = file.read(4096).rpartition(b")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    return 0 if fields[:1] in ([b"Z"], [b"X"]) else int(fields[19])
