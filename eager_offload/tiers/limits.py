"""How much of this machine's memory and disks one process may take, and what stands in the way of more.

    machine     available memory; what the kernel commits to, where it is set to keep its word
    groups      limits of the control groups that the process is in (``cgroups.py``)
    process     its own limits: address space, data, file size
    node        how many processes of the run share all this (``ranks.py``)

What is found is the least of these. It is asked for anew whenever it is needed, because others take memory too.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import psutil

from eager_offload.config import size_text
from eager_offload.tiers.cgroups import group_limits, read
from eager_offload.tiers.ranks import Ranks, ranks_here

#: The part of the memory that is available now that saved tensors may take. The other half is for what the process
#: still has to allocate itself: data loading, checkpoints on their way to disk, the page cache that feeds both.
HOST_FRACTION = 0.5
#: The part of each limit on memory that is left for others while training goes on: see ``guard.py``.
RESERVED_PART = 1 / 16
#: The part of a disk's free room that spill files may take. The rest is for the checkpoints that a run writes.
DISK_FRACTION = 0.75


def _limit_of_process(name: str) -> int | None:
    try:
        import resource
    except ImportError:  # Windows has no such limits
        return None
    number = getattr(resource, name, None)
    soft = resource.RLIM_INFINITY if number is None else resource.getrlimit(number)[0]
    return None if soft == resource.RLIM_INFINITY else soft


@dataclass(frozen=True)
class System:
    """Where limits are looked up. A test puts its own in place of the machine's."""

    root: Path = Path("/")
    """What stands in place of ``/``: ``proc`` and whatever is mounted are looked for below it."""
    environ: Mapping[str, str] = field(default_factory=lambda: os.environ)
    """Where launchers say how many processes they have started."""
    process_limit: Callable[[str], int | None] = _limit_of_process
    """The soft limit of this process under a name such as ``RLIMIT_AS``, in bytes; ``None`` for no limit."""


@dataclass(frozen=True, slots=True)
class Limit:
    """One thing that bounds what this process can take."""

    kind: str
    """``memory``, ``commit``, ``cgroup``, ``rlimit`` or ``disk``."""
    where: str
    """The file, the limit's name or the directory that sets it."""
    capacity: int
    """What it is set to, in bytes."""
    room: int
    """What is left of it, in bytes, for all processes that it binds."""
    sharers: int
    """How many processes of the run it binds together: each may take this part of the room."""
    reason: str
    """A sentence that says what binds, with numbers."""
    remedy: str
    """What a user can do about it: a clause in the imperative."""

    @property
    def nbytes(self) -> int:
        """Bytes that this process can take of the room."""
        return self.room // self.sharers

    @property
    def spare(self) -> int:
        """Bytes that it may take so that something is left for others; below 0 where too little is."""
        return self.nbytes - int(self.capacity * RESERVED_PART) // self.sharers

    def budget(self, held: int = 0) -> int:
        """Returns the bytes for its saved tensors, which have ``held`` of them already.

        The budgets of all processes of a run together do not grow by what one has taken before the others.
        """
        return int((self.room + held) // self.sharers * HOST_FRACTION)


class Headroom(NamedTuple):
    """How much more this process can take."""

    limits: tuple[Limit, ...]
    """Everything that bounds it, the least first."""

    @property
    def binding(self) -> Limit:
        """What stands in the way of more: the limit with the least bytes."""
        return self.limits[0]

    @property
    def nbytes(self) -> int:
        """Bytes that it can take: all of them, with nothing left for other processes."""
        return self.binding.nbytes


def host_headroom(system: System | None = None) -> Headroom:
    """Returns how much more host memory this process can take at this moment, and what binds.

    Args:
        system: where it is looked up; this machine where it is left out.
    """
    system = System() if system is None else system
    ranks = ranks_here(system.environ)
    meminfo = _kibibytes(read(system.root / "proc/meminfo"))
    return _least(
        _available(meminfo, ranks),
        *_committed(system, meminfo, ranks),
        *_groups(system, ranks),
        *_of_process(system, "RLIMIT_AS", "VmSize", "addresses", "-v"),
        *_of_process(system, "RLIMIT_DATA", "VmData", "data", "-d"),
    )


def host_capacity(system: System | None = None) -> int:
    """Returns the bytes of host memory that this process could take if nothing else did: the least of its limits.

    Args:
        system: as for ``host_headroom``.
    """
    return min(limit.capacity for limit in host_headroom(system).limits)


def file_size_limit(system: System | None = None) -> int | None:
    """Returns the bytes that a file of this process may have (``RLIMIT_FSIZE``); ``None`` for no limit."""
    return (System() if system is None else system).process_limit("RLIMIT_FSIZE")


def disk_headroom(path: Path, system: System | None = None, *, length: int = 0) -> Headroom:
    """Returns how much more this process can write to a file in the directory ``path``, and what binds.

    Args:
        length: the bytes that the file has.
        system: where limits are looked up; this machine where it is left out.

    Raises:
        OSError: ``path`` cannot be looked at.
    """
    system = System() if system is None else system
    ranks, usage = ranks_here(system.environ), shutil.disk_usage(path)
    reason = f"the disk of {path} has {size_text(usage.free)} free{_divided(ranks)}"
    remedy = "make room there, or name a larger disk in disk_path"
    limits = [Limit("disk", str(path), usage.total, usage.free, ranks.number, reason, remedy)]
    if (most := file_size_limit(system)) is not None:
        reason = f"no file of this process may exceed {size_text(most)} (RLIMIT_FSIZE)"
        room = max(most - length, 0)
        limits.append(Limit("rlimit", "RLIMIT_FSIZE", most, room, 1, reason, "raise the limit (ulimit -f)"))
    return _least(*limits)


def host_budget(system: System | None = None) -> int:
    """Returns the bytes of host memory for this process's saved tensors: ``HOST_FRACTION`` of its headroom."""
    return min(limit.budget() for limit in host_headroom(system).limits)


def disk_budget(path: Path, system: System | None = None) -> int:
    """Returns the bytes on the disk of ``path`` for this process's spill file: ``DISK_FRACTION`` of what is free there.

    Raises:
        OSError: ``path`` cannot be looked at.
    """
    parts = {"disk": DISK_FRACTION}  # others take nothing of the size that a file may have
    return min(int(limit.nbytes * parts.get(limit.kind, 1)) for limit in disk_headroom(path, system).limits)


def pinning_limit(system: System | None = None) -> int | None:
    """Returns the bytes that this process may lock in memory (``RLIMIT_MEMLOCK``); ``None`` for no limit.

    Not every driver counts what it pins against it (NVIDIA's does not), so it bounds no headroom; where pinning fails,
    it is the first thing to look at.
    """
    return (System() if system is None else system).process_limit("RLIMIT_MEMLOCK")


# -- what bounds memory ---------------------------------------------------------------------------------------------


def _available(meminfo: Mapping[str, int], ranks: Ranks) -> Limit:
    room, capacity = meminfo.get("MemAvailable"), meminfo.get("MemTotal")
    if room is None or capacity is None:
        memory = psutil.virtual_memory()
        room, capacity = int(memory.available), int(memory.total)
    reason = f"{size_text(room)} of this machine's {size_text(capacity)} of memory are available{_divided(ranks)}"
    remedy = "end other programs that take memory, or take a machine with more of it"
    return Limit("memory", "MemAvailable", capacity, room, ranks.number, reason, remedy)


def _committed(system: System, meminfo: Mapping[str, int], ranks: Ranks) -> list[Limit]:
    """Returns what the kernel may still promise, where it promises no more than it has (overcommit mode 2)."""
    mode = (read(system.root / "proc/sys/vm/overcommit_memory") or "").strip()
    capacity, promised = meminfo.get("CommitLimit"), meminfo.get("Committed_AS")
    if mode != "2" or capacity is None or promised is None:
        return []
    reason = (
        f"the kernel promises {size_text(capacity)} in all and has promised {size_text(promised)} already "
        f"(vm.overcommit_memory=2){_divided(ranks)}"
    )
    remedy = "raise vm.overcommit_ratio, or set vm.overcommit_memory to 0"
    return [Limit("commit", "CommitLimit", capacity, max(capacity - promised, 0), ranks.number, reason, remedy)]


def _groups(system: System, ranks: Ranks) -> Iterator[Limit]:
    for group in group_limits(system.root):
        reason = (
            f"the control group {group.file.parent} may use {size_text(group.limit)} ({group.file.name}) and "
            f"uses {size_text(max(group.used - group.reclaimable, 0))}, not counting file cache{_divided(ranks)}"
        )
        remedy = (
            "give the container or job more memory (docker run --memory, resources.limits.memory in Kubernetes, "
            "sbatch --mem)"
        )
        yield Limit("cgroup", str(group.file), group.limit, group.room, ranks.number, reason, remedy)


def _of_process(system: System, name: str, used_name: str, what: str, option: str) -> Iterator[Limit]:
    """Yields a limit of the process's own, if there is one; it binds no other process."""
    capacity = system.process_limit(name)
    if capacity is not None:
        status = _kibibytes(read(system.root / "proc/self/status"))
        used = status[used_name] if used_name in status else int(psutil.Process().memory_info().vms)
        reason = f"this process may have {size_text(capacity)} of {what} ({name}) and has {size_text(used)}"
        yield Limit("rlimit", name, capacity, max(capacity - used, 0), 1, reason, f"raise the limit (ulimit {option})")


def _least(*limits: Limit) -> Headroom:
    return Headroom(tuple(sorted(limits, key=lambda limit: limit.nbytes)))


def _kibibytes(text: str | None) -> dict[str, int]:
    """Returns the lines ``Name:   123 kB`` of a file of the kernel's, in bytes."""
    return {name: int(number) << 10 for name, number in re.findall(r"^(\w+):\s+(\d+) kB$", text or "", re.MULTILINE)}


def _divided(ranks: Ranks) -> str:
    guess = ", since nothing tells how many of them are on this node" if ranks.is_guess else ""
    return f", shared by {ranks.number} processes of this run{guess}" if ranks.number > 1 else ""
