"""The memory limits of control groups: of the group that this process is in and of every group around it.

A container, a Kubernetes pod, a Slurm job and a systemd service are control groups. Their limits are not in what the
kernel calls available memory, and a process that goes beyond one is killed.

[Note: where the groups are]
``/proc/self/cgroup`` names the process's group within each hierarchy, and ``/proc/self/mountinfo`` which part of a
hierarchy is mounted where. In a container that part may be the process's group itself, or begin somewhere above it, or
be named from another root than the mount's; what cannot be found by its name is taken to be the mount itself. Groups
above the mount cannot be seen. Version 1 tells their least limit all the same (``hierarchical_memory_limit``).
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

#: Bytes; version 1 writes "no limit" as the largest multiple of a page that a long holds.
_NO_LIMIT = 1 << 62


class GroupLimit(NamedTuple):
    """One limit that one group sets. All sizes in bytes."""

    #: The file that sets it.
    file: Path
    limit: int
    #: What the group uses, with everything in it, and file cache.
    used: int
    #: File cache that the kernel would drop before it killed anything.
    reclaimable: int

    @property
    def room(self) -> int:
        """Bytes that still go into the group."""
        return max(self.limit - self.used + self.reclaimable, 0)


class _Group(NamedTuple):
    directory: Path
    #: Of the cgroup interface: 1 or 2.
    version: int


def group_limits(root: Path = Path("/")) -> list[GroupLimit]:
    """Returns the limits on memory that bind this process, from its own group outwards.

    Args:
        root: what stands in place of ``/``.
    """
    membership = read(root / "proc/self/cgroup")
    if membership is None:
        return []
    groups = _groups(root, membership)
    limits = [limit for group in groups for limit in _limits(group)]
    own = next((group for group in groups if group.version == 1), None)
    if own is not None:
        limits += _unseen_limit(own)
    return limits


def read(file: Path) -> str | None:
    """Returns the text of a file of the kernel's; ``None`` where it cannot be read."""
    try:
        descriptor = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        parts = []
        while part := os.read(descriptor, 1 << 16):
            parts.append(part)
    except OSError:
        return None
    finally:
        os.close(descriptor)
    return b"".join(parts).decode(errors="surrogateescape")


# -- which groups there are -----------------------------------------------------------------------------------------


@lru_cache(maxsize=8)
def _groups(root: Path, membership: str) -> tuple[_Group, ...]:
    """Returns the groups that can be seen and may have a limit, by what ``/proc/self/cgroup`` says."""
    groups: list[_Group] = []
    mounts = list(_mounts(root))
    for line in membership.splitlines():
        _, controllers, path = line.split(":", 2)
        version = 1 if "memory" in controllers.split(",") else 2
        if version == 2 and controllers:
            continue
        for directory in _way_up(Path(path), [mount for mount in mounts if mount.version == version]):
            groups.append(_Group(directory, version))
            # Memory of a group's children is its own too, but for groups of long ago that said otherwise.
            if version == 1 and _number(directory.parent / "memory.use_hierarchy") == 0:
                break
    return tuple(groups)


class _Mount(NamedTuple):
    version: int
    #: Which group is mounted.
    group: Path
    point: Path


def _mounts(root: Path) -> Iterator[_Mount]:
    for line in (read(root / "proc/self/mountinfo") or "").splitlines():
        # "36 35 98:0 /group /mount\040point options [tags] - type source super,options"
        left, _, right = line.partition(" - ")
        kind, _, options = right.partition(" ")
        if kind == "cgroup2" or (kind == "cgroup" and "memory" in options.rpartition(" ")[2].split(",")):
            fields = left.split(" ")
            point = re.sub(r"\\([0-7]{3})", lambda code: chr(int(code[1], 8)), fields[4])
            yield _Mount(2 if kind == "cgroup2" else 1, Path(fields[3]), root / point.lstrip("/"))


def _way_up(group: Path, mounts: list[_Mount]) -> list[Path]:
    """Returns the directories of ``group`` and of those around it, up to where the hierarchy is mounted."""
    for mount in mounts:
        if ".." in group.parts:
            break  # the group is outside of all that this process may see
        inner = group.relative_to(mount.group) if group.is_relative_to(mount.group) else group.relative_to("/")
        directory = mount.point / inner
        if directory.is_dir():
            return [directory, *[outer for outer in directory.parents if outer.is_relative_to(mount.point)]]
    return [mount.point for mount in mounts[:1]]


# -- what a group says ----------------------------------------------------------------------------------------------


#: By version: files with a limit, each with the one that says what is used of it. Above `high` nothing is killed, but
#: everything is slowed down until it is below again; `memsw` counts what is swapped out as well.
_FILES = {
    1: (
        ("memory.limit_in_bytes", "memory.usage_in_bytes"),
        ("memory.memsw.limit_in_bytes", "memory.memsw.usage_in_bytes"),
    ),
    2: (("memory.max", "memory.current"), ("memory.high", "memory.current")),
}
#: By version, in ``memory.stat``: file cache, and what of it is not on disk yet and has to be written before it goes.
_CACHE = {1: ("total_active_file", "total_inactive_file"), 2: ("active_file", "inactive_file")}
_NOT_WRITTEN = {1: ("total_dirty", "total_writeback"), 2: ("file_dirty", "file_writeback")}


def _limits(group: _Group) -> Iterator[GroupLimit]:
    for limit_name, used_name in _FILES[group.version]:
        limit = _number(group.directory / limit_name)
        used = None if limit is None else _number(group.directory / used_name)
        if limit is not None and used is not None:
            yield GroupLimit(group.directory / limit_name, limit, used, _reclaimable(group))


def _unseen_limit(group: _Group) -> Iterator[GroupLimit]:
    """Yields the least limit of all groups around, which need not be mounted: at least this group uses it."""
    limit = _statistics(group.directory).get("hierarchical_memory_limit", _NO_LIMIT)
    if limit < _NO_LIMIT and limit != _number(group.directory / "memory.limit_in_bytes"):
        used = _number(group.directory / "memory.usage_in_bytes")
        if used is not None:
            yield GroupLimit(group.directory / "memory.stat", limit, used, _reclaimable(group))


def _reclaimable(group: _Group) -> int:
    """Returns the bytes of file cache that can be dropped at once."""
    statistics = _statistics(group.directory)
    cache, not_written = (
        sum(statistics.get(name, 0) for name in names[group.version]) for names in (_CACHE, _NOT_WRITTEN)
    )
    return max(cache - not_written, 0)


def _statistics(directory: Path) -> dict[str, int]:
    """Returns ``memory.stat`` by name."""
    pairs = [line.split(" ", 1) for line in (read(directory / "memory.stat") or "").splitlines()]
    return {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2 and pair[1].isdecimal()}


def _number(file: Path) -> int | None:
    """Returns the number in a file; ``None`` for no limit (``max``) and for a file that is not there."""
    text = (read(file) or "").strip()
    return int(text) if text.isdecimal() and int(text) < _NO_LIMIT else None
