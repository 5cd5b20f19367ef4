"""Machines made of files, for code that looks up limits; real control groups, where a test may make one; and nodes.

``python -m tests.tiers.machines`` runs what the processes of a node go through that share one ledger, and prints what
was wrong. They are forked off a process in which nothing has happened but the imports. What the node has available is
counted in memory that all of them map; the slabs are real.
"""

from __future__ import annotations

import json
import mmap
import multiprocessing
import os
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from eager_offload.tiers import host, ledger, limits
from eager_offload.tiers.host import HostTier
from eager_offload.tiers.ledger import Ledger
from eager_offload.tiers.limits import Headroom, HostBound, Limit, System
from eager_offload.tiers.memory import anonymous_slab
from eager_offload.tiers.pool import Pool

MIB, GIB = 1 << 20, 1 << 30
#: How version 1 writes "no limit".
NO_LIMIT = 9223372036854771712


class FakeMachine:
    """Below ``root`` lies what a machine with this much memory, and one process in it, shows in its files."""

    def __init__(self, root: Path, *, total: int = 64 * GIB, available: int = 48 * GIB) -> None:
        self.root = root
        self.environ: dict[str, str] = {}
        self.process_limits: dict[str, int] = {}
        self._membership: list[str] = []
        self._mounts: list[str] = ["22 1 0:20 / /proc rw - proc proc rw", "23 1 8:1 / / rw - ext4 /dev/root rw"]
        self.write("proc/self/cgroup", "")
        self.set_memory(total=total, available=available)

    @property
    def system(self) -> System:
        return System(self.root, self.environ, self.process_limits.get)

    def write(self, path: str, text: str) -> None:
        file = self.root / path.lstrip("/")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)

    def set_memory(self, *, total: int = 64 * GIB, available: int, committed: tuple[int, int] | None = None) -> None:
        lines = {"MemTotal": total, "MemFree": available // 2, "MemAvailable": available, "SwapTotal": 0}
        if committed is not None:
            lines["CommitLimit"], lines["Committed_AS"] = committed
        self.write("proc/meminfo", "".join(f"{name}:   {n >> 10} kB\n" for name, n in lines.items()) + "HugePages: 0\n")

    def set_process(self, *, addresses: int, data: int) -> None:
        self.write("proc/self/status", f"Name:\tpython\nVmSize:\t {addresses >> 10} kB\nVmData:\t {data >> 10} kB\n")

    def belongs_to(self, group: str, *, version: int, mounted: str = "/", point: str | None = None) -> None:
        """The process is in ``group``; ``mounted`` and what is in it are seen at ``point``."""
        if version == 1:
            point = point or "/sys/fs/cgroup/memory"
            self._membership += [f"5:cpu,cpuacct:{group}", f"4:memory:{group}"]
            self._mounts += [
                f"31 23 0:28 {mounted} /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu,cpuacct",
                f"32 23 0:29 {mounted} {point} rw,nosuid shared:9 - cgroup cgroup rw,memory",
            ]
        else:
            point = point or "/sys/fs/cgroup"
            self._membership.append(f"0::{group}")
            self._mounts.append(f"33 23 0:30 {mounted} {point} rw,nosuid - cgroup2 cgroup2 rw,nsdelegate")
        (self.root / point.lstrip("/")).mkdir(parents=True, exist_ok=True)
        self.write("proc/self/cgroup", "\n".join(self._membership) + "\n")
        self.write("proc/self/mountinfo", "\n".join(self._mounts) + "\n")

    def set_group_v2(self, directory: str, **numbers: int) -> None:
        """A group with these of: ``most`` and ``high``, its limits; ``used`` bytes, ``cache`` and ``dirty`` of them."""
        used, cache, dirty = (numbers.get(name, 0) for name in ("used", "cache", "dirty"))
        # What lies in tmpfs counts as file, and cannot be dropped.
        statistics = {"anon": used - cache, "file": cache + MIB, "shmem": MIB, "active_file": cache // 2}
        statistics |= {"inactive_file": cache - cache // 2, "file_dirty": dirty, "file_writeback": 0}
        limits = {"max": numbers.get("most", "max"), "high": numbers.get("high", "max"), "current": used}
        self._set_group(directory, limits, statistics)

    def set_group_v1(self, directory: str, *, hierarchical: bool = True, **numbers: int) -> None:
        """A group with these of: ``most``, ``with_swap`` and ``least_around``, its limits; ``used`` and ``cache``."""
        most, used, cache = numbers.get("most", NO_LIMIT), numbers.get("used", 0), numbers.get("cache", 0)
        limits = {"limit_in_bytes": most, "usage_in_bytes": used, "use_hierarchy": int(hierarchical)}
        limits |= {"memsw.limit_in_bytes": numbers.get("with_swap", NO_LIMIT), "memsw.usage_in_bytes": used}
        statistics = {"cache": cache, "active_file": 0}
        statistics |= {"hierarchical_memory_limit": numbers.get("least_around", most), "total_dirty": 0}
        statistics |= {"total_active_file": cache // 2, "total_inactive_file": cache - cache // 2}
        self._set_group(directory, limits, statistics)

    def _set_group(self, directory: str, numbers: dict[str, object], statistics: dict[str, int]) -> None:
        for name, number in numbers.items():
            self.write(f"{directory}/memory.{name}", f"{number}\n")
        self.write(f"{directory}/memory.stat", "".join(f"{name} {n}\n" for name, n in statistics.items()))


# -- real ones ------------------------------------------------------------------------------------------------------


class RealGroup:
    """A control group that a test has made, inside of the one that the test itself is in."""

    def __init__(self, directory: Path, limit_file: str) -> None:
        self.directory = directory
        self._limit_file = directory / limit_file

    def set_limit(self, nbytes: int) -> None:
        self._limit_file.write_text(str(nbytes))

    @property
    def used(self) -> int:
        """Bytes that what is in it uses, file cache counted."""
        return int(self._first("memory.current", "memory.usage_in_bytes"))

    @property
    def kills(self) -> int:
        """How many processes in it the kernel has killed for its limit."""
        pairs = dict(line.split(" ", 1) for line in self._first("memory.events", "memory.oom_control").splitlines())
        return int(pairs.get("oom_kill", 0))

    def _first(self, *names: str) -> str:
        """The text of the one of these files that it has: of version 2, or of version 1."""
        return next(file.read_text() for file in map(self.directory.joinpath, names) if file.exists())


@contextmanager
def real_group() -> Iterator[RealGroup]:
    """A new group below this process's own, which is gone at the end; skips the test where none can be made."""
    parent, limit_file = _own_group()
    directory = parent / f"eager_offload_test_{os.getpid()}"
    try:
        directory.mkdir()
    except OSError as error:
        pytest.skip(f"no control group can be made here: {error.strerror}")
    try:
        if not (directory / limit_file).exists():
            # Version 2 hands a controller down only where that is asked for.
            with suppress(OSError):
                (parent / "cgroup.subtree_control").write_text("+memory")
        if not (directory / limit_file).exists():
            pytest.skip("control groups here do not limit memory")
        yield RealGroup(directory, limit_file)
    finally:
        for _ in range(10):  # it may stay for a moment after its last process; one that stays hides no failure
            with suppress(OSError):
                directory.rmdir()
                break
            time.sleep(0.05)


def _own_group() -> tuple[Path, str]:
    """The directory of this process's group, and the file that sets a limit in it."""
    with suppress(OSError):
        lines = [line.split(":", 2) for line in Path("/proc/self/cgroup").read_text().splitlines()]
        for _, controllers, path in lines:
            if "memory" in controllers.split(","):
                return Path("/sys/fs/cgroup/memory") / path.lstrip("/"), "memory.limit_in_bytes"
        for number, _, path in lines:
            if number == "0":
                return Path("/sys/fs/cgroup") / path.lstrip("/"), "memory.max"
    pytest.skip("this process is in no control group")


# -- nodes ----------------------------------------------------------------------------------------------------------

#: Of the memory that is available; half of it is the budget of all processes.
AVAILABLE, BUDGET = 128 * MIB, 64 * MIB


class Node:
    """The machine: how much memory each process has, and where the ledger is."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.ledgers = directory / "shm"
        self.ledgers.mkdir()
        self._cells = memoryview(mmap.mmap(-1, 4096)).cast("q")
        self._number = 0
        #: Is called once, by the next process that looks, inside of the ledger's lock.
        self.meanwhile: Callable[[], object] = lambda: None

    def look(self) -> Headroom:
        meanwhile, self.meanwhile = self.meanwhile, lambda: None
        meanwhile()
        room = AVAILABLE - sum(self._cells)
        return Headroom((Limit("memory", "MemAvailable", 16 * MIB, room, "some is available", "take more"),))

    def allocate(self, cell: int, nbytes: int) -> Tensor:
        self._cells[cell] += nbytes
        return anonymous_slab(nbytes)

    def free(self, cell: int, nbytes: int) -> None:
        self._cells[cell] = nbytes

    @property
    def held(self) -> list[int]:
        """MiB of each process."""
        return [self._cells[cell] // MIB for cell in range(self._number)]

    @contextmanager
    def process(self, environ: dict[str, str] | None = None) -> Iterator[Process]:
        """A process on it, with these variables; it ends well at the end of the block."""
        one = Process(self, self._number, environ or {})
        self._number += 1
        try:
            yield one
            one.end()
        finally:
            one.kill()
            self.free(one.cell, 0)

    @property
    def files(self) -> list[str]:
        return sorted(path.name for path in self.ledgers.iterdir())


class Process:
    """A process that does what it is told: it has a budget that follows the machine."""

    def __init__(self, node: Node, cell: int, environ: dict[str, str]) -> None:
        self.cell = cell
        context = multiprocessing.get_context("fork")
        self._pipe, theirs = context.Pipe()
        self.process = context.Process(target=_live, args=(node, cell, environ, theirs))
        self.process.start()
        theirs.close()

    def begin(self, name: str, *arguments: Any) -> None:
        self._pipe.send((name, arguments))

    def answer(self) -> Any:
        assert self._pipe.poll(60), "no answer"
        return self._pipe.recv()

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            self.begin(name, *arguments)
            return self.answer()

        return call

    def end(self) -> None:
        with suppress(BrokenPipeError):
            self._pipe.send(("", ()))
        self.process.join()  # not with a time: a child that lives on has the pipe on which that waits

    def kill(self) -> None:
        self.process.kill()
        self.process.join()


class Calls:
    """What a process can be told."""

    def __init__(self, node: Node, cell: int) -> None:
        self._node, self._cell = node, cell
        self._bound = HostBound(Ledger(node.ledgers))
        self._make()

    def _make(self) -> None:
        pool = self._pool = Pool(
            lambda nbytes: self._node.allocate(self._cell, nbytes),
            slab_bytes=MIB,
            idle_bytes=1 << 40,
            bound=self._bound,
            on_freed=lambda: self._node.free(self._cell, pool._held),
        )
        self._tier, self._slots = HostTier(pool), list[Any]()
        host._pools.add(pool)

    def take(self, mebibytes: int) -> int:
        """Takes as much as it gets of so many MiB; returns how many it holds."""
        for _ in range(mebibytes + 257):  # what is refused once is refused for 256 MiB
            if len(self._slots) < mebibytes and (slot := self._tier.reserve(MIB)) is not None:
                self._slots.append(slot)
        return len(self._slots)

    def step(self) -> int:
        """Ends a step and begins the next; returns how many MiB it holds."""
        self._slots.clear()
        self._tier._next_look = 0
        self._tier.release_idle()
        return self._pool.held_bytes // MIB

    def has_ledger(self) -> bool:
        return not self._bound.is_alone

    def reason(self) -> str:
        return self._tier.shortage.reason

    def warned(self) -> list[str]:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            self._tier.warn(set())
        return [str(one.message) for one in caught]

    def take_while(self, what: str) -> int:
        """Takes a MiB; while it looks, it waits for ever, is stopped, raises, or forks a child that lives on."""

        def meanwhile() -> None:
            if what == "stopped":
                os.kill(os.getpid(), signal.SIGSTOP)
            elif what == "raises":
                raise TimeoutError("of the user's signal handler")
            elif os.fork() == 0 or what == "waits":
                signal.pause()

        self._node.meanwhile = meanwhile
        return self.take(1)

    def take_and_time_out(self) -> str:
        try:
            return str(self.take_while("raises"))
        except TimeoutError as error:
            return str(error)

    def close(self) -> None:
        """Has no tier any more."""
        self._slots.clear()
        self._tier.close()

    def fork(self, cell: int) -> int:
        """Forks a child, which takes 4 MiB; returns how many it has got."""
        pid = os.fork()
        if pid == 0:
            self._cell = cell
            self._make()
            os._exit(self.take(4))
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def _live(node: Node, cell: int, environ: dict[str, str], pipe: Connection) -> None:
    for name in [*limits._NUMBERS, "WORLD_SIZE", "MASTER_ADDR"]:
        os.environ.pop(name, None)
    os.environ.update(environ)
    limits.host_headroom = node.look  # type: ignore[assignment]  # of this process alone
    calls = Calls(node, cell)
    while (told := pipe.recv())[0]:
        name, arguments = told
        pipe.send(getattr(calls, name)(*arguments))


# -- what launchers set ------------------------------------------------------------------------------------------------

_RANKS = {"WORLD_SIZE": "4", "MASTER_ADDR": "192.0.2.7"}  # an address of no machine, for documentation
#: The variables that a process finds, and the number of processes that it takes for those of this node where it has no
#: ledger: two launched them here, and as many elsewhere.
LAUNCHERS: dict[str, tuple[dict[str, str], int]] = {
    "torchrun": ({**_RANKS, "LOCAL_WORLD_SIZE": "2", "LOCAL_RANK": "{}", "RANK": "{}"}, 2),
    "srun": ({"SLURM_NTASKS": "4", "SLURM_LOCALID": "{}", "SLURM_PROCID": "{}"}, 1),
    "srun, with the variables of torch": ({**_RANKS, "SLURM_NTASKS": "4", "SLURM_LOCALID": "{}", "RANK": "{}"}, 4),
    "mpirun of Open MPI": ({"OMPI_COMM_WORLD_LOCAL_SIZE": "2", "OMPI_COMM_WORLD_SIZE": "4"}, 2),
    "mpirun of MPICH": ({"MPI_LOCALNRANKS": "2", "MPI_LOCALRANKID": "{}", "PMI_SIZE": "4", "PMI_RANK": "{}"}, 2),
    "Ray Train": ({**_RANKS, "LOCAL_WORLD_SIZE": "2", "LOCAL_RANK": "{}", "NODE_RANK": "0", "RANK": "{}"}, 2),
    "verl": ({**_RANKS, "RAY_LOCAL_WORLD_SIZE": "2", "RAY_LOCAL_RANK": "{}", "RANK": "{}", "WG_PREFIX": "a"}, 2),
    "PyTorchJob": ({**_RANKS, "PET_NNODES": "2", "RANK": "{}"}, 4),
    "accelerate": ({**_RANKS, "LOCAL_WORLD_SIZE": "2", "ACCELERATE_MIXED_PRECISION": "no", "RANK": "{}"}, 2),
    "deepspeed": ({**_RANKS, "LOCAL_SIZE": "2", "LOCAL_RANK": "{}", "CROSS_RANK": "0", "RANK": "{}"}, 4),
    "Horovod": ({"HOROVOD_SIZE": "4", "HOROVOD_LOCAL_SIZE": "2", "HOROVOD_LOCAL_RANK": "{}"}, 2),
    "nothing": ({}, 1),
}


def launched(node: Node, name: str, rank: int) -> AbstractContextManager[Process]:
    return node.process({key: value.format(rank) for key, value in LAUNCHERS[name][0].items()})


def two_processes_share_one_ledger(node: Node, name: str) -> None:
    with launched(node, name, 0) as one, launched(node, name, 1) as other:
        assert one.take(48) == 48, "no other takes any"
        assert one.has_ledger()
        assert len(node.files) == 1
        assert other.take(48) == 14, "2 MiB are admitted to the first already"
        assert "64.0 MiB, which is 50% of the memory that the 2 processes that share it could take" in other.reason()
        assert not one.warned() + other.warned()
    assert node.files == []


def without_a_ledger_each_has_its_share(node: Node, name: str) -> None:
    node.ledgers.rmdir()
    ranks = LAUNCHERS[name][1]
    with launched(node, name, 0) as one:
        assert one.take(100) == {1: 64, 2: 42, 4: 25}[ranks], "as if the others had as much"
        assert not one.has_ledger()
        told = one.warned()
        assert len(told) == (ranks == 4), told
        assert all("how many of the 4 processes of this run are on this node" in text for text in told)


# -- other scenarios ---------------------------------------------------------------------------------------------------


def tasks_of_one_job(node: Node) -> None:
    """Slurm has a group for each task, below that of the job, which has the limit."""
    machine = FakeMachine(node.directory / "machine")
    limits.THIS = machine.system
    names = set()
    for job, task in ((1, 0), (1, 1), (2, 0)):
        machine.write("proc/self/cgroup", f"0::/job_{job}/task_{task}\n")
        machine.write("proc/self/mountinfo", "33 23 0:30 / /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw\n")
        machine.set_group_v2(f"/sys/fs/cgroup/job_{job}/task_{task}", used=MIB)
        machine.set_group_v2(f"/sys/fs/cgroup/job_{job}", most=64 * MIB, used=MIB)
        names.add(limits._name_of_group())
    assert len(names) == 2, names
    machine.write("proc/self/cgroup", "")
    assert limits._name_of_group() == "machine"


def eight_of_which_one_is_killed(node: Node) -> None:
    with processes(node, 8) as ranks:
        for one in ranks:
            one.take(1)
        for one in ranks:
            one.begin("take", 100)
        found = [one.answer() for one in ranks]
        assert node.held == found
        assert sum(found) <= 64
        assert min(found) >= 4, "each has a share, but for what others are about to take just now"
        ranks[3].kill()
        node.free(3, 0)
        assert min(one.take(100) for one in ranks[:3]) >= 9, "a seventh: what it had is free"
        assert sum(node.held) <= 64
    assert node.files == []


@contextmanager
def processes(node: Node, number: int) -> Iterator[list[Process]]:
    if number == 0:
        yield []
    else:
        with node.process() as one, processes(node, number - 1) as others:
            yield [one, *others]


def one_is_killed_while_it_has_the_lock(node: Node) -> None:
    with node.process() as one, node.process() as other:
        one.begin("take_while", "waits")
        while not node.files:
            pass
        with suppress(AssertionError):  # until it has the lock, at the latest when this one has waited for it
            assert other.take(1) == 1
        one.kill()
        assert other.take(100) == 64
        assert other.has_ledger()
    assert node.files == []


def one_is_stopped_while_it_has_the_lock(node: Node) -> None:
    ledger._PATIENCE = 0.05
    with node.process({"LOCAL_WORLD_SIZE": "2"}) as one, node.process({"LOCAL_WORLD_SIZE": "2"}) as other:
        one.begin("take_while", "stopped")
        os.waitpid(one.process.pid, os.WUNTRACED)
        assert other.take(100) == 42, "nobody waits for it"
        assert not other.has_ledger()
        os.kill(one.process.pid, signal.SIGCONT)
        assert one.answer() == 1
        assert one.has_ledger()
    assert node.files == []


def what_a_signal_handler_raises_is_the_users(node: Node) -> None:
    with node.process() as one, node.process() as other:
        assert one.take_and_time_out() == "of the user's signal handler"
        assert other.take(4) == 4
        assert one.take(4) == 4
        assert one.has_ledger()
        assert other.has_ledger()
    assert node.files == []


def what_one_does_not_use_for_a_while_another_gets(node: Node) -> None:
    with node.process() as one, node.process() as other:
        assert one.take(32) == 32
        for looks in range(5):
            assert one.step() == 32, looks
            one.take(8)
        assert other.take(60) == 32
        assert other.step() == 32
        assert one.step() == 8, "its steps have done with a part of its share"
        assert other.take(56) == 56
        assert one.take(20) == 8
        assert other.step() == 32, "it gives back what the other one needs of its share"
        assert one.take(20) == 20
    assert node.files == []


def one_that_is_closed_keeps_nothing_for_itself(node: Node) -> None:
    with node.process() as one, node.process() as other:
        assert one.take(32) == 32
        one.step()
        one.close()
        assert other.take(64) == 64
    assert node.files == []


def one_forks(node: Node) -> None:
    with node.process() as one, node.process() as other:
        assert one.take(4) == 4
        assert one.fork(2) == 4, "the child takes for itself"
        node.free(2, 0)
        assert other.take_while("forks") == 1, "a child that lives on"
        assert one.take(16) == 16, "does not keep the lock"
        assert one.has_ledger()
    assert len(node.files) <= 1


def what_one_needs_no_more_another_gets(node: Node) -> None:
    with node.process() as one, node.process() as other:
        assert one.take(100) == 64
        assert other.take(100) == 0
        assert one.step() == 32, "it gives back what the other lacks of its share"
        assert other.take(100) == 32
        assert other.step() == 32, "its slabs are idle, and nobody lacks them"
        one.take(8)
        assert one.step() == 32
    assert node.files == []


def one_that_needs_little_keeps_little_from_others(node: Node) -> None:
    with node.process() as one, node.process() as other:
        assert other.take(4) == 4
        assert one.take(100) == 32, "the other has a step to end"
        assert other.step() == 4
        assert one.take(100) == 60
        assert other.take(20) == 4
        assert one.step() == 32, "now the other needs more"
        assert other.take(20) == 20
    assert node.files == []


def what_the_dead_have_left_goes(node: Node) -> None:
    with node.process() as one:
        one.take(1)
        one.kill()
    (left,) = node.files
    (node.ledgers / left).rename(node.ledgers / f"{left}-another")
    with node.process() as one:
        assert one.take(1) == 1
        assert node.files == [left]
    assert node.files == []


def files_of_others(node: Node) -> None:
    with node.process() as one:
        one.take(1)
        (name,) = node.files
    victim = node.directory / "victim"
    victim.write_bytes(b"precious")
    victim.chmod(0o600)
    path = node.ledgers / name
    for arrange in (
        lambda: path.symlink_to(victim),
        lambda: (path.touch(), path.chmod(0o666)),
        lambda: os.mkfifo(path, 0o600),
        lambda: path.mkdir(),
    ):
        arrange()
        with node.process() as one:
            assert one.take(100) == 64
            assert not one.has_ledger()
        assert victim.read_bytes() == b"precious"
        path.rmdir() if path.is_dir() else path.unlink()


SCENARIOS: dict[str, Callable[[Node], None]] = {
    **{f"{name}: one ledger": partial(two_processes_share_one_ledger, name=name) for name in LAUNCHERS},
    **{f"{name}: no ledger": partial(without_a_ledger_each_has_its_share, name=name) for name in LAUNCHERS},
    **{
        one.__name__: one
        for one in (
            tasks_of_one_job,
            eight_of_which_one_is_killed,
            one_is_killed_while_it_has_the_lock,
            one_is_stopped_while_it_has_the_lock,
            what_a_signal_handler_raises_is_the_users,
            what_one_does_not_use_for_a_while_another_gets,
            one_that_is_closed_keeps_nothing_for_itself,
            one_forks,
            what_one_needs_no_more_another_gets,
            one_that_needs_little_keeps_little_from_others,
            what_the_dead_have_left_goes,
            files_of_others,
        )
    },
}


def main(names: list[str]) -> None:
    """Prints what each scenario has complained of, in a process of its own."""
    told = {}
    for name in names or SCENARIOS:
        with tempfile.TemporaryDirectory() as directory:
            report = Path(directory) / "report"
            pid = os.fork()
            if pid == 0:
                os.setsid()
                try:
                    SCENARIOS[name](Node(Path(directory)))
                    report.touch()
                except BaseException:
                    report.write_text(traceback.format_exc())
                os._exit(0)
            os.waitpid(pid, 0)
            with suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)  # those that it has left behind
            told[name] = report.read_text()
    print(json.dumps(told))


if __name__ == "__main__":
    main(sys.argv[1:])
