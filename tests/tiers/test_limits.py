"""What one process may take of the machine, and what it is told stands in the way of more."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeAlias

import psutil
import pytest
import torch.distributed as dist

from eager_offload.tiers import limits
from eager_offload.tiers.limits import (
    System,
    disk_budget,
    disk_headroom,
    host_budget,
    host_headroom,
    pinning_limit,
    ranks_here,
)
from tests.processes import printed_by
from tests.tiers.machines import GIB, LAUNCHERS, MIB, FakeMachine


@pytest.fixture
def machine(tmp_path: Path) -> FakeMachine:
    return FakeMachine(tmp_path)


# -- pinning --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("release", "locked", "used", "pinned", "name", "remedy"),
    [
        ("5.15.167.4-microsoft-standard-WSL2\n", 64 << 10, 0, 768 * MIB, "WSL2", 'host_budget="768MiB"'),
        ("6.8.0-generic\n", GIB - MIB, 0, 768 * MIB, "memlock", "ulimit -l"),
        ("6.8.0-generic\n", 8 * MIB, 0, 0, "memlock", "ulimit -l"),
        ("6.8.0-generic\n", 8 * MIB, 4 * GIB - 400 * MIB, GIB, "container", "docker run --memory"),
        ("6.8.0-generic\n", None, 3 * GIB, GIB, "driver", 'host_budget="1GiB"'),
        ("6.8.0-generic\n", None, 0, 0, "driver", "pin_memory=False"),
    ],
)
def test_what_keeps_memory_from_being_pinned_has_a_name(
    machine: FakeMachine, release: str, locked: int | None, used: int, pinned: int, name: str, remedy: str
) -> None:
    machine.write("proc/sys/kernel/osrelease", release)
    machine.belongs_to("/job", version=2)
    machine.set_group_v2("/sys/fs/cgroup/job", most=4 * GIB, used=used)
    machine.process_limits |= {} if locked is None else {"RLIMIT_MEMLOCK": locked}
    limit = pinning_limit(pinned, 256 * MIB, machine.system)
    assert limit.reason.startswith(f"{name}: ")
    assert remedy in limit.remedy


# -- how many share it ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("environ", "ranks"),
    [
        *LAUNCHERS.values(),
        ({"LOCAL_WORLD_SIZE": "8"}, 8),
        ({"RAY_LOCAL_WORLD_SIZE": "8", "WORLD_SIZE": "16", "MASTER_ADDR": "192.0.2.7"}, 8),
        ({"OMPI_COMM_WORLD_LOCAL_SIZE": "4"}, 4),
        ({"MPI_LOCALNRANKS": "6", "PMI_SIZE": "12"}, 6),
        ({"MASTER_ADDR": "127.0.0.1", "WORLD_SIZE": "4"}, 4),
        ({"MASTER_ADDR": "Localhost", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"}, 2),
        ({"MASTER_ADDR": "localhost"}, 1),
        ({"WORLD_SIZE": "4"}, 4),
        ({"WORLD_SIZE": "1"}, 1),
        ({"WORLD_SIZE": "many"}, 1),
        ({"LOCAL_WORLD_SIZE": "0", "OMPI_COMM_WORLD_LOCAL_SIZE": "-3", "MPI_LOCALNRANKS": "9" * 99}, 1),
    ],
)
def test_h26_the_launcher_says_how_many_processes_share_the_node(environ: dict[str, str], ranks: int) -> None:
    assert ranks_here(environ).number == ranks


@pytest.fixture
def group(tmp_path: Path) -> Iterator[None]:
    """A process group of six ranks of which this process is rank 1, and none talks."""
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("fake", store=store, rank=1, world_size=6)
    yield
    dist.destroy_process_group()


def test_h26_a_group_that_no_launcher_has_counted_shares_the_node(group: None) -> None:
    assert ranks_here({}) == (6, True)
    assert ranks_here({"MASTER_ADDR": "localhost"}) == (6, False), "started by hand, they meet on this machine"
    assert ranks_here({"RAY_LOCAL_WORLD_SIZE": "3", "MASTER_ADDR": "192.0.2.7"}) == (3, False)


WARNED = """
import os, sys, warnings
import torch, eager_offload as eo
warnings.simplefilter("always")

def train(address, **fields):
    os.environ["MASTER_ADDR"] = address
    offload = eo.Offload(tier="disk", disk_path=sys.argv[1], min_bytes=0, keep_last_bytes=0, **fields)
    with warnings.catch_warnings(record=True) as caught:
        with offload:
            y = (torch.ones(1 << 18, requires_grad=True) * 2).exp().sum()
        y.backward()
        assert offload.stats(synchronize=True).bytes_out > 0
    return [(one.filename, str(one.message)) for one in caught if "processes of this run" in str(one.message)]

assert train("localhost") == []
assert train("192.0.2.7", disk_budget="1GiB") == []
(where, text), = train("192.0.2.7")
assert where == "<string>", where
assert "nothing tells how many of the 4 processes of this run are on this node" in text, text
assert train("192.0.2.7") == []
"""


def test_h26_where_nothing_tells_how_many_ranks_are_here_the_user_is_told_once(directory: Path) -> None:
    printed_by("-c", WARNED, directory, WORLD_SIZE="4")


def test_h26_ranks_on_one_node_divide_a_disk_and_not_the_size_that_a_file_may_have(
    machine: FakeMachine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = type("Usage", (), {"free": 400 * GIB, "total": 900 * GIB})
    monkeypatch.setattr(limits.shutil, "disk_usage", lambda _: usage)
    alone, memory = disk_headroom(tmp_path, machine.system), host_headroom(machine.system)
    machine.environ["LOCAL_WORLD_SIZE"] = "2"
    both = disk_headroom(tmp_path, machine.system)
    assert (alone.nbytes, both.nbytes) == (400 * GIB, 200 * GIB)
    assert "shared by 2 processes" in both.binding.reason
    assert "shared by" not in alone.binding.reason
    assert disk_budget(tmp_path, machine.system) == 150 * GIB
    assert host_headroom(machine.system) == memory, "it has a ledger"
    machine.process_limits["RLIMIT_FSIZE"] = 150 * GIB
    assert disk_headroom(tmp_path, machine.system).nbytes == 150 * GIB


# -- what binds -------------------------------------------------------------------------------------------------------

V1, V2 = "/sys/fs/cgroup/memory", "/sys/fs/cgroup"


Arrange: TypeAlias = Callable[[FakeMachine], object]


def v2(group: str, **limits: int) -> Arrange:
    """The process is in ``group`` of version 2, which has these limits."""
    return lambda machine: (
        machine.belongs_to(group, version=2),
        machine.set_group_v2(f"{V2}{group.rstrip('/')}", **limits),
    )


def v1(group: str, mounted: str = "/", below: str | None = None, **limits: int) -> Arrange:
    """The process is in ``group`` of version 1; what is at ``below`` of its mount has these limits."""
    return lambda machine: (
        machine.belongs_to(group, version=1, mounted=mounted),
        machine.set_group_v1(f"{V1}{group if below is None else below}", **limits),
    )


def ancestors_v2(binding: str) -> Arrange:
    def arrange(machine: FakeMachine) -> None:
        machine.belongs_to("/a/b/c", version=2)
        for group in ("/a", "/a/b", "/a/b/c"):
            machine.set_group_v2(f"{V2}{group}", most=4 * GIB if group == binding else 32 * GIB, used=GIB)

    return arrange


def ancestors_v1(binding: str) -> Arrange:
    def arrange(machine: FakeMachine) -> None:
        machine.belongs_to("/slurm/job_7", version=1)
        machine.belongs_to("/", version=2, point=f"{V2}/unified")  # beside them, without controllers
        for group in ("", "/slurm", "/slurm/job_7"):
            most = {"most": 4 * GIB} if group == binding else {}
            machine.set_group_v1(f"{V1}{group}", used=2 * GIB, cache=GIB, **most)

    return arrange


def an_ancestor_that_does_not_count(machine: FakeMachine) -> None:
    v1("/a/b", most=8 * GIB)(machine)
    machine.set_group_v1(f"{V1}/a", most=GIB, hierarchical=False)


def nothing_to_be_read(machine: FakeMachine) -> None:
    machine.write("proc/self/mountinfo", "")
    machine.write("proc/self/cgroup", "0::/nowhere\n")


def of_the_process(name: str) -> Arrange:
    return lambda machine: (
        machine.set_process(addresses=3 * GIB, data=GIB),
        machine.process_limits.update({name: 8 * GIB}),
    )


def committed(overcommits: int) -> Arrange:
    return lambda machine: (
        machine.set_memory(available=48 * GIB, committed=(32 * GIB, 30 * GIB)),
        machine.write("proc/sys/vm/overcommit_memory", f"{overcommits}\n"),
    )


#: Arranges a machine of 48 GiB; the room that a process has there; a part of what binds it, by its place or its reason.
BINDING: dict[str, tuple[Arrange, int, str]] = {
    "no group": (lambda machine: None, 48 * GIB, "48.0 GiB of this machine's 64.0 GiB of memory are available"),
    "v2, below physical memory": (
        v2("/job", most=8 * GIB, used=7 * GIB, cache=2 * GIB, dirty=256 * MIB),
        8 * GIB - 7 * GIB + 2 * GIB - 256 * MIB,
        "may use 8.0 GiB (memory.max) and uses 5.2 GiB, not counting file cache",
    ),
    **{f"v2, {one}": (ancestors_v2(one), 3 * GIB, f"{V2}{one}/memory.max") for one in ("/a", "/a/b", "/a/b/c")},
    "v2, slowed down above": (v2("/job", most=8 * GIB, high=5 * GIB, used=2 * GIB), 3 * GIB, "memory.high"),
    "v2, max is no limit": (v2("/job", used=2 * GIB), 48 * GIB, "are available"),
    "v2, beyond its limit": (v2("/job", high=GIB, used=2 * GIB), 0, "memory.high"),
    "v2, a container is the root": (v2("/", most=8 * GIB, used=GIB), 7 * GIB, f"{V2}/memory.max"),
    **{
        f"v1, {one or 'root'}": (ancestors_v1(one), 3 * GIB, f"{V1}{one}/memory.limit_in_bytes")
        for one in ("", "/slurm", "/slurm/job_7")
    },
    "v1, what is mounted": (v1("/docker/0123", "/docker/0123", "", most=2 * GIB, used=GIB), GIB, "limit_in_bytes"),
    "v1, not found by its name": (v1("/pod/0123", "/elsewhere", "", most=2 * GIB, used=GIB), GIB, "limit_in_bytes"),
    "v1, of groups not mounted": (
        v1("/pod/0123", "/pod/0123", "", used=GIB, least_around=3 * GIB),
        2 * GIB,
        f"{V1}/memory.stat",
    ),
    "v1, with swap": (v1("/job", most=8 * GIB, with_swap=6 * GIB, used=2 * GIB), 4 * GIB, "memsw"),
    "v1, an ancestor that counts no children": (an_ancestor_that_does_not_count, 8 * GIB, "/a/b/"),
    "a group outside": (lambda machine: machine.belongs_to("/../outside", version=2), 48 * GIB, "are available"),
    "nothing can be read": (nothing_to_be_read, 48 * GIB, "are available"),
    "RLIMIT_AS": (of_the_process("RLIMIT_AS"), 5 * GIB, "RLIMIT_AS"),
    "RLIMIT_DATA": (of_the_process("RLIMIT_DATA"), 7 * GIB, "RLIMIT_DATA"),
    "promises that are not kept": (committed(0), 48 * GIB, "are available"),
    "promises that are kept": (committed(2), 2 * GIB, "vm.overcommit_memory=2"),
}
REMEDIES = {"memory.max": "docker run --memory", "RLIMIT_": "ulimit"}


@pytest.mark.parametrize("name", BINDING)
def test_h26_the_least_of_all_limits_binds_and_is_named(name: str, machine: FakeMachine) -> None:
    arrange, room, what = BINDING[name]
    arrange(machine)
    found = host_headroom(machine.system)
    assert found.nbytes == room
    assert what in f"{found.binding.where}: {found.binding.reason}"
    assert host_budget(machine.system) == room // 2
    for where, remedy in REMEDIES.items():
        assert where not in found.binding.where or remedy in found.binding.remedy


def test_this_machine_has_headroom_and_says_what_binds(machine: FakeMachine, tmp_path: Path) -> None:
    found = host_headroom()
    assert 0 < found.nbytes <= psutil.virtual_memory().total
    assert found.nbytes == found.binding.room == min(limit.room for limit in found.limits)
    assert found.binding.reason
    assert found.binding.remedy
    assert System().process_limit("RLIMIT_OF_NOTHING") is None
    machine.write("proc/meminfo", "")
    assert host_headroom(machine.system).binding.capacity == psutil.virtual_memory().total, "where nothing is told"
    assert 0 < host_budget() < psutil.virtual_memory().total
    assert 0 < disk_budget(tmp_path) < psutil.disk_usage(str(tmp_path)).total
    with pytest.raises(FileNotFoundError):
        disk_budget(tmp_path / "missing")
    assert disk_headroom(tmp_path, machine.system).binding.kind == "disk"
    machine.process_limits["RLIMIT_FSIZE"] = MIB  # the size that a file may have
    assert disk_headroom(tmp_path, machine.system).nbytes == MIB
    assert disk_headroom(tmp_path, machine.system).binding.where == "RLIMIT_FSIZE"
