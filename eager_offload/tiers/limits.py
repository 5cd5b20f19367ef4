"""Limits on the host memory and disk space of this process.

    machine     available memory; the kernel's commit limit if it does not overcommit
    groups      limits of the process's control group and of the groups around it
    process     rlimits: address space, data, file size
    node        memory taken by the library's other processes on the node (``ledger.py``)

The smallest limit binds. Limits are read again whenever they are needed, because other programs take memory too.

[Note: frequency of looks]
A look at the limits takes a few hundred microseconds. A look also admits later slabs in advance: up to an eighth of the
room found, and at most a 16th of the memory held or 32 MiB, whichever is larger. So looks become more frequent near the
limit. After a refusal, the next 256 MiB of requests are refused without a look. Both results are dropped when slabs are
freed. A forward begins with a look if a tier has refused a request or handed out 1 GiB since the last look.

[Note: mounted control groups]
Containers, Kubernetes pods, Slurm jobs and systemd services are control groups. The kernel kills a process that exceeds
their limits, which ``MemAvailable`` ignores. ``/proc/self/cgroup`` names the process's group in each hierarchy,
``/proc/self/mountinfo`` the mounted part of each hierarchy. In a container that part may be the group itself, may begin
above the group, or may have another root. If the name is not found, the mount is taken for the group. Groups above the
mount are invisible, but version 1 reports their smallest limit (``hierarchical_memory_limit``).

[Note: reserve]
A 16th of every limit is never taken: the kernel kills whichever process crosses the limit, and others take memory
between two looks. New slabs have all their pages touched, so that the next look counts them.
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
from eager_offload.tiers.base import NoRoomError, Shortage
from eager_offload.tiers.forking import ForkSafeLock, Living, tell_after_fork
from eager_offload.tiers.ledger import UNKNOWN, Entry, Ledger

#: Fraction of available memory for saved tensors. The rest is for data loading, checkpoints and the page cache.
HOST_FRACTION = 0.5
#: Fraction of each memory limit that is never taken: see [Note: reserve].
RESERVED_PART = 1 / 16
#: Cost of copying unpinned host memory. "How to Optimize Data Transfers in CUDA C/C++" (NVIDIA) measured 2.3 instead of
#: 5.8 GB/s on one PC, and 5.4 instead of 6.2 GB/s on another.
PAGEABLE_COST = "make the host wait, and took 1.2 to 2.6 times as long in NVIDIA's measurements"
#: Fraction of a disk's free space for spill files. The rest is for the run's checkpoints.
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
    """Sources of the limits; tests replace them."""

    root: Path = Path("/")
    """Root directory of ``proc`` and of all mounts."""
    environ: Mapping[str, str] = field(default_factory=lambda: os.environ)
    """Environment, in which launchers give the number of processes."""
    process_limit: Callable[[str], int | None] = _limit_of_process
    """Returns a soft limit of this process (e.g. ``RLIMIT_AS``) in bytes; ``None`` for no limit."""


THIS = System()


@dataclass(frozen=True, slots=True)
class Limit:
    kind: str
    """``memory``, ``commit``, ``cgroup``, ``rlimit`` or ``disk``."""
    where: str
    """File, directory or name of the limit (e.g. ``MemAvailable``)."""
    capacity: int
    """The limit, in bytes."""
    room: int
    """Unused bytes below the limit."""
    reason: str
    """A clause that describes the limit, with numbers."""
    remedy: str
    """A clause in the imperative that tells the user how to raise it."""

    @property
    def reserve(self) -> int:
        """Bytes that are left for others: see [Note: reserve]."""
        return int(self.capacity * RESERVED_PART)


class Headroom(NamedTuple):
    limits: tuple[Limit, ...]
    """All limits, the one with the least room first."""

    @property
    def binding(self) -> Limit:
        return self.limits[0]

    @property
    def nbytes(self) -> int:
        """Bytes up to the binding limit, with no reserve."""
        return self.binding.room


def host_headroom(system: System = THIS) -> Headroom:
    """Returns the current limits on the host memory of this process."""
    meminfo = _kibibytes(_read(system.root / "proc/meminfo"))
    return _least(
        _available(meminfo),
        *_committed(system, meminfo),
        *_groups(system),
        *_of_process(system, "RLIMIT_AS", "VmSize", "addresses", "-v"),
        *_of_process(system, "RLIMIT_DATA", "VmData", "data", "-d"),
    )


def host_capacity() -> int:
    """Returns the smallest capacity of all limits, in bytes: host memory if no program used any."""
    return min(limit.capacity for limit in host_headroom().limits)


def pinning_limit(pinned: int, nbytes: int, system: System = THIS) -> Shortage:
    """Returns the likely reason why ``nbytes`` cannot be pinned in addition to ``pinned`` bytes."""
    within = f'set host_budget="{size_literal(pinned)}"' if pinned else "set pin_memory=False"
    if "microsoft" in (_read(system.root / "proc/sys/kernel/osrelease") or "").lower():
        reason = "WSL2: Windows lets a process pin a small part of its memory"
        return Shortage(reason, f"train on Linux without WSL2, or {within}")
    locked = system.process_limit("RLIMIT_MEMLOCK")
    # If more is pinned than may be locked, the driver (e.g. NVIDIA's) does not count pinned memory as locked.
    if locked is not None and pinned <= locked < pinned + nbytes:
        reason = f"memlock: this process may lock {size_text(locked)} of memory (RLIMIT_MEMLOCK)"
        return Shortage(reason, "raise it (ulimit -l, docker run --ulimit memlock=-1, LimitMEMLOCK of a service)")
    for limit in _groups(system):
        if limit.room < nbytes + limit.reserve:
            return Shortage(f"container: {limit.reason}", limit.remedy)
    # Memory that other parts of the program have pinned is not in ``pinned``, and may count as locked.
    also = "" if locked is None else f", and this process may lock {size_text(locked)} (RLIMIT_MEMLOCK)"
    reason = f"driver: it gives no reason{also}"
    return Shortage(reason, f"end other programs that pin memory, or {within}")


def file_size_limit(system: System = THIS) -> int | None:
    """Returns the limit on the size of a file in bytes; ``None`` for no limit."""
    return system.process_limit("RLIMIT_FSIZE")


def host_part() -> int:
    """Returns this rank's equal part of the available host memory, in bytes."""
    return host_headroom().nbytes // ranks_here().number


def disk_headroom(path: Path, system: System = THIS, *, length: int = 0) -> Headroom:
    """Returns the limits on the growth of a file of ``length`` bytes in the directory ``path``.

    Raises:
        OSError: ``path`` cannot be read.
    """
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


def host_budget(system: System = THIS) -> int:
    """Returns ``HOST_FRACTION`` of the headroom, in bytes."""
    return int(host_headroom(system).nbytes * HOST_FRACTION)


def disk_budget(path: Path, system: System = THIS) -> int:
    """Returns ``DISK_FRACTION`` of the free disk space of ``path``, within the file size limit, in bytes.

    Raises:
        OSError: ``path`` cannot be read.
    """
    parts = {"disk": DISK_FRACTION}  # the limit on the file's size is not shared with other programs
    return min(int(limit.room * parts.get(limit.kind, 1)) for limit in disk_headroom(path, system).limits)


# -- limits on memory -----------------------------------------------------------------------------------------------


def _available(meminfo: Mapping[str, int]) -> Limit:
    room, capacity = meminfo.get("MemAvailable"), meminfo.get("MemTotal")
    if room is None or capacity is None:
        memory = psutil.virtual_memory()
        room, capacity = int(memory.available), int(memory.total)
    reason = f"{size_text(room)} of this machine's {size_text(capacity)} of memory are available"
    remedy = "end other programs that take memory, or take a machine with more of it"
    return Limit("memory", "MemAvailable", capacity, room, reason, remedy)


def _committed(system: System, meminfo: Mapping[str, int]) -> list[Limit]:
    """Returns the kernel's commit limit, which applies in overcommit mode 2 only."""
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
    """Parses lines such as ``MemTotal:   123 kB`` into bytes by name."""
    return {name: int(number) << 10 for name, number in re.findall(r"^(\w+):\s+(\d+) kB$", text or "", re.MULTILINE)}


# -- control groups ----------------------------------------------------------------------------------------------------

#: Bytes. For "no limit", version 1 reports the largest multiple of a page that fits into a long.
_NO_LIMIT = 1 << 62


def _groups(system: System) -> Iterator[Limit]:
    """Yields the limits of the control groups, from the process's own group outwards."""
    membership = _read(system.root / "proc/self/cgroup")
    groups = () if membership is None else _groups_of(system.root, membership)
    found = [
        (version, directory / name, _number(directory / name), used_name)
        for version, directory in groups
        for name, used_name in _FILES[version]
    ]
    own = next((directory for version, directory in groups if version == 1), None)
    if own is not None:
        # The smallest limit of all groups around, even unmounted ones. Their usage is at least that of this group.
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
        used -= max(cache - not_written, 0)  # the kernel drops clean file cache before it kills a process
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
def _groups_of(root: Path, membership: str) -> tuple[tuple[int, Path], ...]:
    """Returns versions and directories of visible memory groups in ``membership`` (``/proc/self/cgroup``)."""
    groups: list[tuple[int, Path]] = []
    for line in membership.splitlines():
        _, controllers, path = line.split(":", 2)
        version = 1 if "memory" in controllers.split(",") else 2
        if version == 2 and controllers:
            continue
        for directory in _way_up(Path(path), list(_mounts(root, version))):
            groups.append((version, directory))
            # Without use_hierarchy (old kernels), limits of outer groups do not apply.
            if version == 1 and _number(directory.parent / "memory.use_hierarchy") == 0:
                break
    return tuple(groups)


def _mounts(root: Path, version: int) -> Iterator[tuple[Path, Path]]:
    """Yields the control group at the root of each mount of memory groups, and the mount point."""
    for line in (_read(root / "proc/self/mountinfo") or "").splitlines():
        # "36 35 98:0 /group /mount\040point options [tags] - type source super,options"
        left, _, right = line.partition(" - ")
        kind, _, options = right.partition(" ")
        has_memory = kind == "cgroup2" or "memory" in options.rpartition(" ")[2].split(",")
        if kind == ("cgroup2" if version == 2 else "cgroup") and has_memory:
            fields = left.split(" ")
            point = re.sub(r"\\([0-7]{3})", lambda code: chr(int(code[1], 8)), fields[4])
            yield Path(fields[3]), root / point.lstrip("/")


def _way_up(group: Path, mounts: list[tuple[Path, Path]]) -> list[Path]:
    for mounted, point in mounts:
        if ".." in group.parts:
            break  # the group is outside the process's cgroup namespace
        directory = point / (group.relative_to(mounted) if group.is_relative_to(mounted) else group.relative_to("/"))
        if directory.is_dir():
            return [directory, *[outer for outer in directory.parents if outer.is_relative_to(point)]]
    return [point for _, point in mounts[:1]]


#: By version: (limit, usage) pairs of files. Above `high` the kernel throttles processes but kills none; `memsw`
#: includes swapped memory.
_FILES = {
    1: (
        ("memory.limit_in_bytes", "memory.usage_in_bytes"),
        ("memory.memsw.limit_in_bytes", "memory.memsw.usage_in_bytes"),
    ),
    2: (("memory.max", "memory.current"), ("memory.high", "memory.current")),
}
#: By version, in ``memory.stat``: file cache, and its dirty part, which cannot be dropped before it is written.
_CACHE = {1: ("total_active_file", "total_inactive_file"), 2: ("active_file", "inactive_file")}
_NOT_WRITTEN = {1: ("total_dirty", "total_writeback"), 2: ("file_dirty", "file_writeback")}


def _statistics(directory: Path) -> dict[str, int]:
    pairs = [line.split(" ", 1) for line in (_read(directory / "memory.stat") or "").splitlines()]
    return {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2 and pair[1].isdecimal()}


def _number(file: Path) -> int | None:
    """Returns the number in a file; ``None`` for no limit (``max``) and for a missing file."""
    text = (_read(file) or "").strip()
    return int(text) if text.isdecimal() and int(text) < _NO_LIMIT else None


# -- how many processes share this node -------------------------------------------------------------------------------

#: Variables in which launchers export the number of processes on this node: torchrun and compatible launchers, worker
#: groups on Ray, Open MPI, Hydra (MPICH, Intel MPI), and Horovod.
_NUMBERS = (
    "LOCAL_WORLD_SIZE",
    "RAY_LOCAL_WORLD_SIZE",
    "OMPI_COMM_WORLD_LOCAL_SIZE",
    "MPI_LOCALNRANKS",
    "HOROVOD_LOCAL_SIZE",
)
#: Number of ranks set by an adapter; 0 for none. (Lightning exports the number of the whole run only.)
ranks_of_adapter = 0
#: Values of MASTER_ADDR if all ranks are on this node.
_HERE = ("localhost", "127.0.0.1", "::1")


class Ranks(NamedTuple):
    """The ranks of a run that share this node."""

    number: int
    """An upper bound."""
    is_guess: bool = False
    """Whether the number counts the whole run, because the number on this node is unknown."""


def ranks_here(environ: Mapping[str, str] | None = None) -> Ranks:
    """Returns the number of ranks that share this node's disks, and its memory if there is no ledger.

    Ignores invalid values of environment variables.
    """
    environ = os.environ if environ is None else environ
    numbers = (_positive(environ.get(name, "")) for name in _NUMBERS)
    if number := next(filter(None, numbers), ranks_of_adapter):
        return Ranks(number)
    has_group = dist.is_available() and dist.is_initialized()
    total = _positive(environ.get("WORLD_SIZE", "")) or (dist.get_world_size() if has_group else 1)
    is_here = environ.get("MASTER_ADDR", "").strip().lower() in _HERE  # e.g. torch.multiprocessing
    return Ranks(total, is_guess=total > 1 and not is_here)


def rank() -> int:
    """Returns the global rank that a launcher (e.g. torchrun) has set, or 0."""
    return _positive(os.environ.get("RANK", ""))


def warn_of_guess() -> None:
    if (found := ranks_here()).is_guess:
        warn_once(
            "ranks",
            f"nothing tells how many of the {found.number} processes of this run are on this node, so each takes its "
            "share as if all were. Set LOCAL_WORLD_SIZE to how many there are, or give host_budget and disk_budget in "
            "bytes",
        )


def _positive(text: str) -> int:
    text = text.strip()
    return int(text) if text.isascii() and text.isdecimal() and len(text) < 10 else 0


# -- admission of slabs -----------------------------------------------------------------------------------------------

#: See [Note: frequency of looks]. The ledger counts bytes admitted ahead as taken, so no other process is given them.
_TRUSTED, _TRUSTED_OF_HELD, _TRUSTED_BYTES = 8, 16, 32 << 20
#: Memory has to be idle at this many looks, each at the start of a forward, before other processes may have it.
_LOOKS = 4
#: Bytes that are refused without another look.
_REFUSED = 256 << 20


T = TypeVar("T")


class Taker(Protocol):
    """A pool that takes host memory."""

    coming: int
    """Bytes of the slab that the pool is about to take. Set by ``HostBound``, reset to 0 by the pool."""
    least_idle: int
    """Fewest bytes that were idle at any time since ``restart_idle``."""

    @property
    def bytes_by_machine(self) -> int | None:
        """Bytes held under automatic budgets; ``None`` if the pool has no such budget."""


class _Node(NamedTuple):
    """The ledger entries of the node; see [Note: shares]. Results are in bytes."""

    own: Entry
    others: list[Entry]

    def bound_by(self, limit: Limit) -> list[Entry]:
        """Returns the entries of all processes that share ``limit``; the first is this process's."""
        return [self.own] if limit.kind == "rlimit" else [self.own, *self.others]

    def sharers(self, limit: Limit) -> int:
        """Returns the number of processes with automatic budgets, this one included."""
        return 1 + sum(1 for one in self.bound_by(limit)[1:] if one.need)

    def spare(self, limit: Limit) -> int:
        """Returns the room above the reserve; negative if the reserve is used."""
        return limit.room - sum(one.coming for one in self.bound_by(limit)) - limit.reserve

    def budget(self, limit: Limit) -> int:
        """Returns the budget for the saved tensors of all processes."""
        room = limit.room + sum(one.held - one.coming for one in self.bound_by(limit))
        return int(room * HOST_FRACTION)

    def share(self, limit: Limit) -> int:
        """Returns the part of the budget that is guaranteed to each process."""
        return self.budget(limit) // self.sharers(limit)

    def left(self, limit: Limit) -> tuple[int, int]:
        """Returns the free bytes of the budget, and the part of them that is kept for other processes."""
        share, bound = self.share(limit), self.bound_by(limit)
        kept = [(share if one.need == UNKNOWN else min(one.need, share)) - one.held for one in bound[1:]]
        return self.budget(limit) - sum(one.held for one in bound), sum(max(one, 0) for one in kept)

    def admits(self, limit: Limit) -> int:
        """Returns the bytes that this process may take now: free and not kept for others, or left of its share."""
        left, kept = self.left(limit)
        return max(left - kept, min(left, self.share(limit) - self.own.held))

    def missing(self, limit: Limit) -> int:
        """Returns the bytes that this process should give back, so that others get their shares."""
        left, share = self.left(limit)[0], self.share(limit)
        wanted = [(share if one.need == UNKNOWN else one.need) - one.held for one in self.bound_by(limit)[1:]]
        more = sum(max(one, 0) for one in wanted) - left
        return max(-self.spare(limit) // self.sharers(limit), min(more, self.own.held - min(self.own.need, share)))


class HostBound:
    """Admits or refuses each slab of host memory before the process takes it. Thread-safe.

    [Note: automatic budget]
    With ``host_budget="auto"``, the saved tensors of all processes of a node together take at most ``HOST_FRACTION`` of
    the memory that would be available without them. The budget is computed for each slab, because other programs start
    and end, and a virtual machine may gain memory as more is touched. Slabs in use stay.

    [Note: shares]
    We want each process to take as much of the budget as it needs. However, ranks often need equal amounts, and the
    fastest must not take memory that a slower rank is about to need. Thus each process with an automatic budget has an
    equal *share*. The unused part is kept for the process: all of the share until its first step has ended, then as
    much as its recent steps needed, nothing after its tiers are closed. When a forward begins, idle slabs beyond that
    are freed if another process lacks memory.

    Without a ledger, the launcher tells the number of processes (``ranks_here``). Each is assumed to hold as much as
    this one and to need all of its share.

    [Note: budget in bytes]
    A budget that the user gives in bytes applies even if it exceeds the limits, since the user may know better. One
    warning says so. Only the system itself can refuse.
    """

    def __init__(self, ledger: Ledger | None = None) -> None:
        self._ledger = ledger
        self._lock = ForkSafeLock()
        self._takers: Living[Taker] = Living()
        self.after_fork()
        tell_after_fork(self)

    def after_fork(self) -> None:
        """Resets the child to a process that has taken nothing."""
        #: Whether the last look had no ledger.
        self.is_alone = self._ledger is None
        #: Bytes that may still be taken without a look.
        self._admitted = 0
        #: Size of the last refused request, and why: requests of at least that size are refused without a look.
        self._refused: tuple[int, Shortage] | None = None
        self._refused_bytes = 0
        #: ``Entry.need`` at the last looks; their maximum; and the bytes refused in this step.
        self._needs = deque[int](maxlen=_LOOKS)
        self._need, self._lacked = UNKNOWN, 0

    def join(self, taker: Taker) -> None:
        """Counts the memory of ``taker``, for as long as ``taker`` lives."""
        with self._lock.lock:
            self._takers.add(taker)

    def admit(self, nbytes: int, taker: Taker | None = None, *, given: bool = True) -> None:
        """Admits a slab of ``nbytes`` bytes, which ``taker`` then takes from the system.

        Args:
            given: whether the slab is for a budget in bytes, which only the reserve can refuse.

        Raises:
            NoRoomError: the slab is refused, which does not count as a lack: a smaller request may follow.
        """
        with self._lock.lock:
            if taker is not None:
                taker.coming = 0  # the previous slab has been taken
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
                raise NoRoomError(shortage, nbytes)

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
                    f"{HOST_FRACTION:.0%} of the memory that {who} could take ({limit.reason})",
                    f"{limit.remedy}, or give host_budget in bytes",
                )
        is_refused = nbytes > left
        if taker is not None and (given or not is_refused):
            taker.coming = nbytes
        if not given and is_refused:
            self._refused, self._refused_bytes = (nbytes, shortage), 0
        elif not given:
            most = max(node.own.held // _TRUSTED_OF_HELD, _TRUSTED_BYTES)
            self._admitted, self._refused = min((left - nbytes) // _TRUSTED, most), None
        return shortage if is_refused else None

    def _look(self, decide: Callable[[Sequence[Limit], _Node], T]) -> T:
        """Reads the limits and the ledger, returns the result of ``decide``, and writes this process's entry.

        Raises:
            NoRoomError: the limits cannot be read.
        """

        def look(others: Sequence[Entry] | None) -> tuple[Entry, T]:
            own = self._entry()
            if others is None:
                others = [own._replace(need=UNKNOWN)] * (ranks_here().number - 1)
            try:
                limits = host_headroom().limits
            except OSError as error:  # no free file descriptor
                if error.errno is None:  # raised by a signal handler: see SystemErrorsSuppressed
                    raise
                reason, remedy = f"the free memory of the system cannot be read ({error.strerror})", "close files"
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
        """Raises ``NoRoomError`` if ``nbytes`` for an automatic budget would be refused without a look."""
        with self._lock.lock:
            refused = self._refused
            if refused is not None and nbytes >= refused[0] and self._refused_bytes < _REFUSED:
                self._refused_bytes += nbytes
                raise NoRoomError(refused[1], nbytes)

    def lack(self, nbytes: int) -> None:
        """Counts refused bytes as memory that the process needs and lacks."""
        with self._lock.lock:
            self._lacked += nbytes
            if self._need != UNKNOWN:
                self._need = max(self._need, self._entry().held + self._lacked)

    def missing_bytes(self) -> int:
        """Looks when a forward begins, and returns the idle bytes to give back for other processes."""

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
        """Writes this process's entry to the ledger."""
        with self._lock.lock:
            if self._ledger is not None:
                self._ledger.update(self._entry())

    def forget(self) -> None:
        """Drops the results of the last look, because slabs were freed."""
        with self._lock.lock:
            self._admitted, self._refused = 0, None
            self.update()


def _name_of_group() -> str:
    """Returns the key of the ledger: the nearest control group with a limit, or "machine"."""
    for limit in _groups(THIS):
        status = os.stat(Path(limit.where).parent)
        return f"{status.st_dev:x}-{status.st_ino:x}"
    return "machine"


#: One for the process, since all its pools draw on the same memory.
host_bound = HostBound(Ledger())
