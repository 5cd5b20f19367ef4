"""Which directories can take a spill file."""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path

import psutil

from eager_offload.errors import ConfigError, lacks_descriptor
from eager_offload.tiers.limits import file_size_limit
from eager_offload.tiers.rawfile import RawFile
from eager_offload.tiers.spill import SpillFile

#: Filesystems whose files are memory: to spill there moves nothing out of it.
IN_MEMORY = frozenset({"tmpfs", "ramfs", "devtmpfs", "hugetlbfs"})
#: Bytes that have to be free in a directory that the user did not name, or the budget where that is less.
_ROOM = 1 << 30
_ACCEPTED = "a writable directory on a disk (not tmpfs), or None for one that is found"


def open_spill_file(path: Path | None, budget: int | None, file_type: type[RawFile]) -> SpillFile:
    """Opens a new spill file in ``path``; for ``None``, in the first usual directory that serves.

    Args:
        budget: what the file may come to hold, in bytes, if that is known.

    Raises:
        ConfigError: the named directory cannot serve, or none could be found.
        OSError: the process has no free file descriptor, see ``lacks_descriptor``; which says nothing of directories.
    """
    if path is None:
        return _first_that_serves(_ROOM if budget is None else min(_ROOM, budget), file_type)
    try:
        return _open(path, 0, file_type)
    except OSError as error:
        if lacks_descriptor(error):
            raise
        raise ConfigError(f"disk_path: {str(path)!r} cannot serve: {error}; accepted is {_ACCEPTED}.") from error


def filesystem_of(path: Path) -> str:
    """Returns the type of the filesystem of ``path``, such as ``"ext4"``; empty where the system does not say."""
    real = Path(os.path.realpath(path))
    around = [part for part in psutil.disk_partitions(all=True) if real.is_relative_to(part.mountpoint)]
    # Of several mounts on one point the last is the one that is seen.
    return max(reversed(around), key=lambda part: len(Path(part.mountpoint).parts)).fstype if around else ""


def usual_directories() -> list[Path]:
    """Returns the directories that are tried where the user names none, in their order, each once."""
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    places = [Path(tempfile.gettempdir()), Path(cache).expanduser()]
    with suppress(FileNotFoundError):  # it may be gone
        places.append(Path.cwd())
    return list(dict.fromkeys(places))


def _first_that_serves(room: int, file_type: type[RawFile]) -> SpillFile:
    reasons = []
    for path in usual_directories():
        try:
            return _open(path, room, file_type)
        except OSError as error:
            if lacks_descriptor(error):
                raise
            reasons.append(f"{str(path)!r}: {error}")
    raise ConfigError(f"disk_path: given None, and no place was found ({'; '.join(reasons)}); accepted is {_ACCEPTED}.")


def _open(path: Path, room: int, file_type: type[RawFile]) -> SpillFile:
    """Raises ``OSError`` where the directory cannot take a spill file."""
    if not hasattr(os, "pwritev"):
        raise OSError('this system has no pwritev, which the disk tier needs: take tier="host"')
    if not path.exists():
        raise FileNotFoundError("it does not exist")
    if not path.is_dir():
        raise NotADirectoryError("it is no directory")
    kind = filesystem_of(path)
    if kind in IN_MEMORY:
        raise OSError(f"it is on {kind}, which is memory itself")
    free = shutil.disk_usage(path).free
    if free < room:
        raise OSError(f"only {free} bytes are free there")
    if not os.access(path, os.W_OK | os.X_OK):
        raise PermissionError("it is not writable")
    try:
        return SpillFile(path, file_type)
    except OSError as error:
        if error.errno == errno.EFBIG and (most := file_size_limit()) is not None:
            raise OSError(f"no file of this process may exceed {most} bytes (RLIMIT_FSIZE, ulimit -f)") from error
        raise
