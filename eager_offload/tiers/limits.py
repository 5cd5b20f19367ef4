"""How much of this machine's memory and disks one process may take, and what stands in the way of more.

    machine     available memory; what the kernel commits to, where it is set to keep its word
    groups      limits of the control groups that the process is in, and of those around them
    process     its own limits: address space, data, file size
    node        what its processes have taken of all this (``ledger.py``)

What is found is the least of these. It is asked for anew whenever it is needed, because others take memory too.

[Note: how often]
To look takes a few hundred microseconds. What one look has found admits slabs up to an eighth of it and up to a GiB, so
the nearer the limit, the more often; and what one look has refused is refused for the next 256 MiB that are asked for.
Both are forgotten when slabs have gone back to the system. When a forward begins, there is another look if a tier has
refused anything or has handed out a GiB since the last one.

[Note: where the groups are]
A container, a Kubernetes pod, a Slurm job and a systemd service are control groups. Their limits are not in what the
kernel calls available memory, and a process that goes beyond one is killed. ``/proc/self/cgroup`` names the process's
group within each hierarchy, and ``/proc/self/mountinfo`` which part of a hierarchy is mounted where. In a container
that part may be the process's group itself, or begin somewhere above it, or be named from another root than the
mount's; what cannot be found by its name is taken to be the mount itself. Groups above the mount cannot be seen.
Version 1 tells their least limit all the same (``hierarchical_memory_limit``).

[Note: what is left for others]
Of every limit a 16th is never taken: the kernel kills the process that crosses a limit, not the one that took most, and
between two looks others take memory too. Slabs have all their pages from the start, so that a look sees what was taken
before.
"""

from __future__ import annotations

import os
import re
import shutil
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from pathlib import Path
from typing import NamedTuple, Protocol, TypeVar

import psutil
import torch.distributed as dist

from eager_offload.config import size_literal, size_text
from eager_offload.errors import SystemErrorsSuppressed, warn_once
from eager_offload.tiers.base import Shortage
from eager_offload.tiers.forking import ForkSafeLock, Living, tell_after_fork
from eager_offload.tiers.ledger import UNKNOWN, Entry, Ledger

#: The part of the memory that is available now that saved tensors may take. The other half is for what the process
#: still has to allocate itself: data loading, checkpoints on their way to disk, the page cache that feeds both.
HOST_FRACTION = 0.5
#: The part of each limit on memory that is left for others while training goes on: see ``limits.py``.
RESERVED_PART = 1 / 16
#: What copies of host memory cost that is not pinned. "How to Optimize Data Transfers in CUDA C/C++" (NVIDIA) measured
#: 2.3 instead of 5.8 GB/s on one PC, and 5.4 instead of 6.2 GB/s on another.
PAGEABLE_COST = "make the host wait, and took 1.2 to 2.6 times as long in NVIDIA's measurements"
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
    """What is left of it, in bytes."""
    reason: str
    """A sentence that says what binds, with numbers."""
    remedy: str
    """What a user can do about it: a clause in the imperative."""

    @property
    def reserve(self) -> int:
        """Bytes of it that are left for others."""
        return int(self.capacity * RESERVED_PART)

    @property
    def is_own(self) -> bool:
        """Whether it binds this process alone."""
        return self.kind == "rlimit"


class Headroom(NamedTuple):
    """How much more this process can take."""

    limits: tuple[Limit, ...]
    """Everything that bounds it, the least room first."""

    @property
    def binding(self) -> Limit:
        """What stands in the way of more: the limit with the least bytes."""
        return self.limits[0]

    @property
    def nbytes(self) -> int:
        """Bytes that it can take: all of them, with nothing left for other processes."""
        return self.binding.room


def host_headroom(system: System | None = None) -> Headroom:
    """Returns how much more host memory this process could take at this moment if no other did, and what binds.

    Args:
        system: where it is looked up; this machine where it is left out.
    """
    system = System() if system is None else system
    meminfo = _kibibytes(_read(system.root / "proc/meminfo"))
    return _least(
        _available(meminfo),
        *_committed(system, meminfo),
        *_groups(system),
        *_of_process(system, "RLIMIT_AS", "VmSize", "addresses", "-v"),
        *_of_process(system, "RLIMIT_DATA", "VmData", "data", "-d"),
    )


def host_capacity() -> int:
    """Returns the bytes of host memory that this process could take if nothing else did: the least of its limits."""
    return min(limit.capacity for limit in host_headroom().limits)


def pinning_limit(pinned: int, nbytes: int, system: System | None = None) -> Shortage:
    """Returns what keeps ``nbytes`` from being pinned beside ``pinned`` bytes that are, as far as it can be told.

    Not every driver counts what it pins as locked memory, NVIDIA's does not: bytes beyond that limit show it.
    """
    system = System() if system is None else system
    within = f'set host_budget="{size_literal(pinned)}"' if pinned else "set pin_memory=False"
    if "microsoft" in (_read(system.root / "proc/sys/kernel/osrelease") or "").lower():
        reason = "WSL2: Windows lets a process pin a small part of its memory"
        return Shortage(reason, f"train on Linux without WSL2, or {within}")
    locked = system.process_limit("RLIMIT_MEMLOCK")
    if locked is not None and pinned <= locked < pinned + nbytes:
        reason = f"memlock: this process may lock {size_text(locked)} of memory (RLIMIT_MEMLOCK)"
        return Shortage(reason, "raise it (ulimit -l, docker run --ulimit memlock=-1, LimitMEMLOCK of a service)")
    for limit in _groups(system):
        if limit.room < nbytes + limit.reserve:
            return Shortage(f"container: {limit.reason}", limit.remedy)
    reason = "driver: it gives no reason, and neither WSL2, memlock nor a container is one"
    return Shortage(reason, f"end other programs that pin memory, or {within}")


def file_size_limit(system: System | None = None) -> int | None:
    """Returns the bytes that a file of this process may have (``RLIMIT_FSIZE``); ``None`` for no limit."""
    return (System() if system is None else system).process_limit("RLIMIT_FSIZE")


def host_part() -> int:
    """Returns the bytes of host memory that are left for this process as a device: ranks have equal parts of it."""
    return host_headroom().nbytes // ranks_here().number


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
    reason = f"the disk of {path} has {size_text(usage.free)} free"
    if ranks.number > 1:
        guess = ", since nothing tells how many of them are on this node" if ranks.is_guess else ""
        reason += f", shared by {ranks.number} processes of this run{guess}"
    remedy = "make room there, or name a larger disk in disk_path"
    limits = [Limit("disk", str(path), usage.total, usage.free // ranks.number, reason, remedy)]
    if (most := file_size_limit(system)) is not None:
        reason = f"no file of this process may exceed {size_text(most)} (RLIMIT_FSIZE)"
        room = max(most - length, 0)
        limits.append(Limit("rlimit", "RLIMIT_FSIZE", most, room, reason, "raise the limit (ulimit -f)"))
    return _least(*limits)


def host_budget(system: System | None = None) -> int:
    """Returns the bytes of host memory for saved tensors where none are held: ``HOST_FRACTION`` of the room."""
    return int(host_headroom(system).nbytes * HOST_FRACTION)


def disk_budget(path: Path, system: System | None = None) -> int:
    """Returns the bytes on the disk of ``path`` for this process's spill file: ``DISK_FRACTION`` of what is free there.

    Raises:
        OSError: ``path`` cannot be looked at.
    """
    parts = {"disk": DISK_FRACTION}  # others take nothing of the size that a file may have
    return min(int(limit.room * parts.get(limit.kind, 1)) for limit in disk_headroom(path, system).limits)


# -- what bounds memory ---------------------------------------------------------------------------------------------


def _available(meminfo: Mapping[str, int]) -> Limit:
    room, capacity = meminfo.get("MemAvailable"), meminfo.get("MemTotal")
    if room is None or capacity is None:
        memory = psutil.virtual_memory()
        room, capacity = int(memory.available), int(memory.total)
    reason = f"{size_text(room)} of this machine's {size_text(capacity)} of memory are available"
    remedy = "end other programs that take memory, or take a machine with more of it"
    return Limit("memory", "MemAvailable", capacity, room, reason, remedy)


def _committed(system: System, meminfo: Mapping[str, int]) -> list[Limit]:
    """Returns what the kernel may still promise, where it promises no more than it has (overcommit mode 2)."""
    mode = (_read(system.root / "proc/sys/vm/overcommit_memory") or "").strip()
    capacity, promised = meminfo.get("CommitLimit"), meminfo.get("Committed_AS")
    if mode != "2" or capacity is None or promised is None:
        return []
    reason = (
        f"the kernel promises {size_text(capacity)} in all and has promised {size_text(promised)} already "
        "(vm.overcommit_memory=2)"
    )
    remedy = "raise vm.overcommit_ratio, or set vm.overcommit_memory to 0"
    return [Limit("commit", "CommitLimit", capacity, max(capacity - promised, 0), reason, remedy)]


def _of_process(system: System, name: str, used_name: str, what: str, option: str) -> Iterator[Limit]:
    capacity = system.process_limit(name)
    if capacity is not None:
        status = _kibibytes(_read(system.root / "proc/self/status"))
        used = status[used_name] if used_name in status else int(psutil.Process().memory_info().vms)
        reason = f"this process may have {size_text(capacity)} of {what} ({name}) and has {size_text(used)}"
        yield Limit("rlimit", name, capacity, max(capacity - used, 0), reason, f"raise the limit (ulimit {option})")


def _least(*limits: Limit) -> Headroom:
    return Headroom(tuple(sorted(limits, key=lambda limit: limit.room)))


def _kibibytes(text: str | None) -> dict[str, int]:
    """Returns the lines ``Name:   123 kB`` of a file of the kernel's, in bytes."""
    return {name: int(number) << 10 for name, number in re.findall(r"^(\w+):\s+(\d+) kB$", text or "", re.MULTILINE)}


# -- control groups ----------------------------------------------------------------------------------------------------

#: Bytes; version 1 writes "no limit" as the largest multiple of a page that a long holds.
_NO_LIMIT = 1 << 62


class _Group(NamedTuple):
    directory: Path
    #: Of the cgroup interface: 1 or 2.
    version: int


def _groups(system: System) -> Iterator[Limit]:
    """Yields the limits of the control groups that bind this process, from its own group outwards."""
    membership = _read(system.root / "proc/self/cgroup")
    groups = () if membership is None else _groups_of(system.root, membership)
    found = [
        (group.version, group.directory / name, _number(group.directory / name), used_name)
        for group in groups
        for name, used_name in _FILES[group.version]
    ]
    own = next((group.directory for group in groups if group.version == 1), None)
    if own is not None:
        # The least limit of all groups around, which need not be mounted: at least this group uses it.
        least = _statistics(own).get("hierarchical_memory_limit", _NO_LIMIT)
        if least < _NO_LIMIT and least != _number(own / "memory.limit_in_bytes"):
            found.append((1, own / "memory.stat", least, "memory.usage_in_bytes"))
    for version, file, capacity, used_name in found:
        used = None if capacity is None else _number(file.parent / used_name)
        if capacity is None or used is None:
            continue
        statistics = _statistics(file.parent)
        cache, not_written = (
            sum(statistics.get(name, 0) for name in names[version]) for names in (_CACHE, _NOT_WRITTEN)
        )
        used -= max(cache - not_written, 0)  # the kernel would drop that before it killed anything
        reason = (
            f"the control group {file.parent} may use {size_text(capacity)} ({file.name}) and "
            f"uses {size_text(max(used, 0))}, not counting file cache"
        )
        remedy = (
            "give the container or job more memory (docker run --memory, resources.limits.memory in Kubernetes, "
            "sbatch --mem)"
        )
        yield Limit("cgroup", str(file), capacity, max(capacity - used, 0), reason, remedy)


def _read(file: Path) -> str | None:
    with SystemErrorsSuppressed():
        descriptor = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
        try:
            parts = []
            while part := os.read(descriptor, 1 << 16):
                parts.append(part)
        finally:
            os.close(descriptor)
        return b"".join(parts).decode(errors="surrogateescape")
    return None


@lru_cache(maxsize=8)
def _groups_of(root: Path, membership: str) -> tuple[_Group, ...]:
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
    for line in (_read(root / "proc/self/mountinfo") or "").splitlines():
        # "36 35 98:0 /group /mount\040point options [tags] - type source super,options"
        left, _, right = line.partition(" - ")
        kind, _, options = right.partition(" ")
        if kind == "cgroup2" or (kind == "cgroup" and "memory" in options.rpartition(" ")[2].split(",")):
            fields = left.split(" ")
            point = re.sub(r"\\([0-7]{3})", lambda code: chr(int(code[1], 8)), fields[4])
            yield _Mount(2 if kind == "cgroup2" else 1, Path(fields[3]), root / point.lstrip("/"))


def _way_up(group: Path, mounts: list[_Mount]) -> list[Path]:
    for mount in mounts:
        if ".." in group.parts:
            break  # the group is outside of all that this process may see
        inner = group.relative_to(mount.group) if group.is_relative_to(mount.group) else group.relative_to("/")
        directory = mount.point / inner
        if directory.is_dir():
            return [directory, *[outer for outer in directory.parents if outer.is_relative_to(mount.point)]]
    return [mount.point for mount in mounts[:1]]


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


def _statistics(directory: Path) -> dict[str, int]:
    pairs = [line.split(" ", 1) for line in (_read(directory / "memory.stat") or "").splitlines()]
    return {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2 and pair[1].isdecimal()}


def _number(file: Path) -> int | None:
    """Returns the number in a file; ``None`` for no limit (``max``) and for a file that is not there."""
    text = (_read(file) or "").strip()
    return int(text) if text.isdecimal() and int(text) < _NO_LIMIT else None


# -- how many processes share this node -------------------------------------------------------------------------------

#: The variables in which launchers give the number of processes that they started on this node: torchrun (and launchers
#: that start processes as it does), worker groups on Ray, Open MPI, and Hydra (MPICH, Intel MPI).
_NUMBERS = ("LOCAL_WORLD_SIZE", "RAY_LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS")
#: The number by an adapter; 0 for none. Lightning starts processes too, but exports the number of the whole run alone.
ranks_of_adapter = 0
#: Where all ranks meet, if they are all on this node.
_HERE = ("localhost", "127.0.0.1", "::1")


class Ranks(NamedTuple):
    """Ranks of a run that share this node."""

    number: int
    """At most this many."""
    is_guess: bool = False
    """Whether it is all of the run, since nothing tells where they are."""


def ranks_here(environ: Mapping[str, str] | None = None) -> Ranks:
    """Returns how many processes share this node's disks, and its memory where it has no ledger.

    That is 1 where nothing says that there are more.

    A value that makes no sense is passed over.

    Args:
        environ: the environment; that of this process where it is left out.
    """
    environ = os.environ if environ is None else environ
    numbers = (_positive(environ.get(name, "")) for name in _NUMBERS)
    if number := next(filter(None, numbers), ranks_of_adapter):
        return Ranks(number)
    has_group = dist.is_available() and dist.is_initialized()
    total = _positive(environ.get("WORLD_SIZE", "")) or (dist.get_world_size() if has_group else 1)
    is_here = environ.get("MASTER_ADDR", "").strip().lower() in _HERE  # started by hand, as by torch.multiprocessing
    return Ranks(total, is_guess=total > 1 and not is_here)


def rank() -> int:
    """Returns which process of its run this is, as launchers like torchrun say; 0 without one."""
    return _positive(os.environ.get("RANK", ""))


def warn_of_guess() -> None:
    """Warns, once in a process, if nothing tells how many ranks share this node."""
    if (found := ranks_here()).is_guess:
        warn_once(
            "ranks",
            f"nothing tells how many of the {found.number} processes of this run are on this node, so each takes its "
            "share of memory and disks as if all were. Set LOCAL_WORLD_SIZE to how many there are, or give "
            "host_budget and disk_budget in bytes",
        )


def _positive(text: str) -> int:
    text = text.strip()
    return int(text) if text.isascii() and text.isdecimal() and len(text) < 10 else 0


# -- what the process may still take ----------------------------------------------------------------------------------

#: What one look admits without another: such a part of what it has found, and such a part of what is held, or so many
#: bytes if that is more. No other process can take them meanwhile.
_TRUSTED, _TRUSTED_OF_HELD, _TRUSTED_BYTES = 8, 16, 32 << 20
#: As forwards begin: how many of these looks have to find memory idle until other processes may have it.
_LOOKS = 4
#: Bytes that are refused without another look.
_REFUSED = 256 << 20


class NoRoomError(MemoryError):
    """No more may be taken: by a budget, or too little would be left for others."""

    def __init__(self, shortage: Shortage) -> None:
        super().__init__(shortage.reason)
        self.shortage = shortage


T = TypeVar("T")


class Taker(Protocol):
    """A pool that takes host memory."""

    coming: int
    """Bytes that it is about to take; ``HostBound`` sets it, and the pool sets it back to 0."""

    least_idle: int
    """The least bytes of it that were idle at one time since ``restart_idle``."""

    @property
    def bytes_by_machine(self) -> int | None:
        """Bytes that it holds by budgets that follow the machine; ``None`` where it has no such budget."""


class _Node(NamedTuple):
    """What the processes of this node have taken; see [Note: shares]."""

    own: Entry
    others: list[Entry]

    def bound_by(self, limit: Limit) -> list[Entry]:
        """Returns the entries of all processes that the limit binds."""
        return [self.own] if limit.is_own else [self.own, *self.others]

    def sharers(self, limit: Limit) -> int:
        """Returns how many of them take memory by budgets that follow the machine; this process is one."""
        return 1 + sum(1 for one in self.bound_by(limit)[1:] if one.need)

    def spare(self, limit: Limit) -> int:
        """Returns the bytes that may be taken so that something is left for others; below 0 where too little is."""
        return limit.room - sum(one.coming for one in self.bound_by(limit)) - limit.reserve

    def budget(self, limit: Limit) -> int:
        """Returns the bytes that all of them may hold for saved tensors."""
        room = limit.room + sum(one.held - one.coming for one in self.bound_by(limit))
        return int(room * HOST_FRACTION)

    def share(self, limit: Limit) -> int:
        """Returns the bytes of the budget that each may have, whatever the others need."""
        return self.budget(limit) // self.sharers(limit)

    def left(self, limit: Limit) -> tuple[int, int]:
        """Returns the bytes of the budget that nobody holds, and how many of them are kept for other processes."""
        share, bound = self.share(limit), self.bound_by(limit)
        kept = [(share if one.need == UNKNOWN else min(one.need, share)) - one.held for one in bound[1:]]
        return self.budget(limit) - sum(one.held for one in bound), sum(max(one, 0) for one in kept)

    def admits(self, limit: Limit) -> int:
        """Returns the bytes of the budget that this process may take now."""
        left, kept = self.left(limit)
        return max(left - kept, min(left, self.share(limit) - self.own.held))

    def missing(self, limit: Limit) -> int:
        """Returns the bytes that this process should give back, for others to have what is theirs."""
        left, share = self.left(limit)[0], self.share(limit)
        wanted = [(share if one.need == UNKNOWN else one.need) - one.held for one in self.bound_by(limit)[1:]]
        more = sum(max(one, 0) for one in wanted) - left
        return max(-self.spare(limit) // self.sharers(limit), min(more, self.own.held - min(self.own.need, share)))


class HostBound:
    """Says how much host memory the process may take, slab by slab. Thread-safe.

    [Note: a budget that follows the machine]
    The saved tensors of all processes of a node hold by ``host_budget="auto"`` at most ``HOST_FRACTION`` of what there
    would be if they held nothing. That is asked when a slab is taken: other programs come and end, and a virtual
    machine may have more memory the more of it is touched. What is held already stays.

    [Note: shares]
    Each process takes of that budget what it needs. But ranks often need the same, and the first of them must not take
    what a slower one needs too. So each that takes memory has a *share* of the budget, all of them alike. What a
    process lacks of its share is kept for it: everything until its first step has ended, then as much as its last
    steps have needed, and nothing once its tiers are closed. When a forward begins, idle slabs of more than that go
    back if another process lacks them.

    Where there is no ledger, the launcher says how many processes there are (``ranks_here``). The others are taken to
    hold as much as this one, and to need all of their shares.

    [Note: a budget in bytes]
    What the user gives in bytes holds, however little the machine says that it has: it may have more, and nobody else
    knows. Where this would refuse, one warning says so. Only the system itself refuses.

    Args:
        ledger: of the node.
    """

    def __init__(self, ledger: Ledger | None = None) -> None:
        self._ledger = ledger
        self._lock = ForkSafeLock()
        self._takers: Living[Taker] = Living()
        self.after_fork()
        tell_after_fork(self)

    def after_fork(self) -> None:
        """Starts the child as a process that has taken nothing."""
        #: Whether the last look was without a ledger.
        self.is_alone = self._ledger is None
        #: Bytes that the last look admits yet.
        self._admitted = 0
        #: What the last look refused: as many bytes or more are refused again.
        self._refused: tuple[int, Shortage] | None = None
        self._refused_bytes = 0
        #: As in ``Entry``, of the last looks at it; and the bytes that were refused in this step.
        self._needs = deque[int](maxlen=_LOOKS)
        self._need, self._lacked = UNKNOWN, 0

    def join(self, taker: Taker) -> None:
        """Counts what ``taker`` holds, for as long as it lives."""
        with self._lock.lock:
            self._takers.add(taker)

    def admit(self, nbytes: int, taker: Taker | None = None, *, given: bool = True) -> None:
        """Counts ``nbytes`` more that are taken from the system.

        Args:
            taker: the pool that takes them.
            given: whether a budget in bytes is to hold them; then only what is left for others counts.

        Raises:
            NoRoomError: they may not be.
        """
        with self._lock.lock:
            if taker is not None:
                taker.coming = 0  # of the slab before
            if nbytes <= self._admitted:
                self._admitted -= nbytes
                if taker is not None:
                    taker.coming = nbytes
                return
            if not given:
                self.refuse_again(nbytes)
                self._admitted = 0
            shortage = self._look(partial(self._decide, nbytes, taker, given))
            if shortage is not None:
                raise NoRoomError(shortage)

    def _decide(
        self, nbytes: int, taker: Taker | None, given: bool, limits: Sequence[Limit], node: _Node
    ) -> Shortage | None:
        limit = min(limits, key=node.spare)
        left = node.spare(limit)
        shortage = Shortage(
            f"{size_text(nbytes)} more of host memory would leave less than {size_text(limit.reserve)} of it for "
            f"others, for {limit.reason}",
            limit.remedy,
        )
        if not given:
            limit = min(limits, key=node.admits)
            if node.admits(limit) < left:
                left, sharers = node.admits(limit), node.sharers(limit)
                who = "this process" if sharers == 1 else f"the {sharers} processes that share it"
                shortage = Shortage(
                    f'all of host_budget="auto" is in use: {size_text(node.budget(limit))}, which is '
                    f"{HOST_FRACTION:.0%} of what {who} could take ({limit.reason})",
                    f"{limit.remedy}, or give host_budget in bytes",
                )
        is_refused = nbytes > left
        if taker is not None and (given or not is_refused):
            taker.coming = nbytes
        if not given and is_refused:
            self._refused, self._refused_bytes = (nbytes, shortage), 0
            self._lacked += nbytes
            if self._need != UNKNOWN:
                self._need = max(self._need, node.own.held + self._lacked)
        elif not given:
            most = max(node.own.held // _TRUSTED_OF_HELD, _TRUSTED_BYTES)
            self._admitted, self._refused = min((left - nbytes) // _TRUSTED, most), None
        return shortage if is_refused else None

    def _look(self, decide: Callable[[Sequence[Limit], _Node], T]) -> T:
        """Returns what ``decide`` makes of what the system has left; the ledger has what this process holds after it.

        Raises:
            NoRoomError: the system does not say what it has left.
        """

        def look(others: Sequence[Entry] | None) -> tuple[Entry, T]:
            own = self._entry()
            if others is None:
                others = [own._replace(need=UNKNOWN)] * (ranks_here().number - 1)
            try:
                limits = host_headroom().limits
            except OSError as error:  # no free file descriptor to look with
                if error.errno is None:  # see SystemErrorsSuppressed
                    raise
                reason, remedy = f"what the system has left cannot be read ({error.strerror})", "close files"
                raise NoRoomError(Shortage(reason, remedy)) from error
            made = decide(limits, _Node(own, list(others)))
            return self._entry(), made

        if self._ledger is not None:
            with SystemErrorsSuppressed():
                made = self._ledger.settle(_name_of_group, look)
                self.is_alone = False
                return made
        self.is_alone = True
        return look(None)[1]

    def _entry(self) -> Entry:
        pools = [(taker.coming, taker.bytes_by_machine) for taker in self._takers]
        follow = [coming + held for coming, held in pools if held is not None]
        coming = sum(coming for coming, _ in pools)
        return Entry(sum(follow) + self._admitted, coming + self._admitted, self._need if follow else 0)

    def refuse_again(self, nbytes: int) -> None:
        """Raises ``NoRoomError`` where ``admit`` would for a budget that follows the machine, without a look."""
        with self._lock.lock:
            refused = self._refused
            if refused is not None and nbytes >= refused[0] and self._refused_bytes < _REFUSED:
                self._refused_bytes += nbytes
                self._lacked += nbytes
                raise NoRoomError(refused[1])

    def missing_bytes(self) -> int:
        """Looks as a forward begins, and returns how many idle bytes should go back to the system for others."""

        def decide(limits: Sequence[Limit], node: _Node) -> int:
            idle = sum([one.least_idle for one in self._takers if one.bytes_by_machine is not None])
            self._needs.append(node.own.held - idle + self._lacked)
            self._need, self._lacked = max(self._needs), 0
            node = node._replace(own=node.own._replace(need=self._need))
            return max(node.missing(limit) for limit in limits)

        with self._lock.lock:
            self._admitted = 0
            try:
                return max(self._look(decide), 0)
            except NoRoomError:
                return 0

    def update(self) -> None:
        """Tells the other processes what this one holds, once it has taken slabs."""
        with self._lock.lock:
            if self._ledger is not None:
                self._ledger.update(self._entry())

    def forget(self) -> None:
        """Slabs have gone back to the system: what the last look has found does not hold any more."""
        with self._lock.lock:
            self._admitted, self._refused = 0, None
            self.update()


def _name_of_group() -> str:
    """Returns what names the control group whose processes share a ledger: the nearest one with a limit."""
    for limit in _groups(System()):
        status = os.stat(Path(limit.where).parent)
        return f"{status.st_dev:x}-{status.st_ino:x}"
    return "machine"


#: Of this process: all memory comes from the same machine.
host_bound = HostBound(Ledger())
