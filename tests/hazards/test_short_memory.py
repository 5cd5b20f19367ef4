"""H26: host memory is short, at the start or all of a sudden. Training goes on, exact, and is not killed for it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, nullcontext
from pathlib import Path
from subprocess import PIPE
from typing import Any, NamedTuple

import pytest
from torch import Tensor

from eager_offload.tiers import guard, host
from eager_offload.tiers.guard import Guard
from eager_offload.tiers.limits import Headroom, host_headroom
from tests.hazards.backends import Backend, SimulatedBackend, assert_settled
from tests.hazards.programs import Settled, assert_identical, assert_moved, leaf
from tests.tiers.machines import MIB, FakeMachine, RealGroup, real_group

ROOT = Path(__file__).parents[2]
#: Of one saved tensor; bytes.
NBYTES = 512 * 512 * 4
DEPTH = 6


class SmallMachine(FakeMachine):
    """Less is available by as much as host tiers hold."""

    #: Bytes that are available for them.
    available = 48 * MIB

    def look(self) -> Headroom:
        held = sum(arena._held for arena in host._arenas if not arena.is_closed)
        self.set_memory(total=64 * MIB, available=max(self.available - held, 0))
        return host_headroom(self.system)


@pytest.fixture
def backend(machine: SmallMachine) -> Iterator[Backend]:
    with SimulatedBackend() as running:
        yield running
        running.assert_nothing_is_held()


@pytest.fixture
def machine(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> SmallMachine:
    """A machine of 64 MiB, of which 4 are always left to others, in place of this one."""
    machine = SmallMachine(tmp_path_factory.mktemp("machine"), total=64 * MIB)
    for module in (guard, host):
        monkeypatch.setattr(module, "host_headroom", machine.look)
    monkeypatch.setattr(guard, "_guard", Guard())
    return machine


def step(around: Any = None, depth: int = DEPTH) -> Tensor:
    x = leaf(512, 512)
    with around or nullcontext():
        y = x
        for _ in range(depth):
            y = (y * 1.01).sin()
        loss = y.sum()
    loss.backward()
    return x.grad


# -- an injected reading --------------------------------------------------------------------------------------------


def test_h26_headroom_that_shrinks_in_mid_training_keeps_what_comes_on_the_device(
    backend: Backend, machine: SmallMachine
) -> None:
    offload = backend.offload()
    assert_identical(step(), step(Settled(offload)))
    before = assert_settled(offload)
    assert_moved(before)
    assert before.demotions == {}
    machine.available = 12 * MIB
    with pytest.warns(RuntimeWarning, match=r"this machine's 64\.0 MiB of memory are available\. To change that, end"):
        assert_identical(step(depth=4 * DEPTH), step(Settled(offload), depth=4 * DEPTH))
    stats = assert_settled(offload)
    assert stats.demotions["budget"] > 0
    assert stats.kept_bytes["budget"] >= NBYTES
    assert stats.bytes_out > before.bytes_out, "the slabs that there are serve on"
    demoted = stats.demotions["budget"]
    machine.available = 48 * MIB
    guard.process_guard().forget()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert_identical(step(depth=2 * DEPTH), step(Settled(offload), depth=2 * DEPTH))
    assert assert_settled(offload).demotions["budget"] == demoted, "there is room again"


def test_a_budget_in_bytes_holds_where_memory_is_short_and_one_warning_says_so(
    backend: Backend, machine: SmallMachine
) -> None:
    offload = backend.offload(host_budget="1TiB")
    machine.available = 4 * MIB
    expected = step(depth=30)
    with pytest.warns(RuntimeWarning, match="host_budget=1TiB is taken as it was given"):
        assert_identical(expected, step(Settled(offload), depth=30))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert_identical(expected, step(Settled(offload), depth=30))
    stats = assert_settled(offload)
    assert stats.demotions == {}
    assert stats.host_bytes_peak >= 30 * NBYTES
    assert_moved(stats)


# -- real limits ----------------------------------------------------------------------------------------------------

#: Trains on batches that the process holds anyway, so that whatever is offloaded comes on top. It says when it is about
#: to, and waits for a line: the test that reads it may set a limit then, to less than half of what offloading asks for.
PROGRAM = """
import os, resource, sys, warnings
from pathlib import Path
import torch
import eager_offload as eo

room, group = int(sys.argv[1]), sys.argv[2]
torch.set_num_threads(1)
eo.release_freed_memory()
if group:
    Path(group, "cgroup.procs").write_text(str(os.getpid()))
batches = [torch.randn(1 << 10, 1 << 11, generator=torch.Generator().manual_seed(seed)) for seed in range(20)]

def gradient(around):
    w = torch.ones(1 << 11, 1, requires_grad=True)
    loss = torch.zeros(())
    for batch in batches:
        with around:
            loss = loss + (batch @ w).sum()  # all else that this makes is small
    if around is not nothing:
        around.stats(synchronize=True)
    loss.backward()
    return w.grad

nothing = torch.enable_grad()
expected = gradient(nothing)
print("ready", flush=True)
sys.stdin.readline()
if not group:
    # A 16th of the limit is left to others.
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, ((used + room) * 16 // 15,) * 2)

offload = eo.Offload(tier="host", min_bytes=0, keep_last_bytes=0)
with warnings.catch_warnings(record=True) as told:
    warnings.simplefilter("always")
    for _ in range(2):
        assert torch.equal(gradient(offload), expected)
stats = offload.stats(synchronize=True)
print(stats.bytes_out, stats.demotions["budget"], stats.host_bytes_peak)
print([str(one.message) for one in told if "no room" in str(one.message)][0], flush=True)
sys.stdin.readline()
"""
#: Of one batch, and for the slabs of one process; bytes.
BATCH, ROOM = 8 * MIB, 72 * MIB


class Trained(NamedTuple):
    """What a process did that ran ``PROGRAM``, and what its user was told."""

    moved: int
    demoted: int
    held: int
    reported: str


def train(group: RealGroup | None = None, ranks: int = 1) -> list[Trained]:
    """Runs ``PROGRAM``, in ``ranks`` processes at once; each has to end well."""
    # glibc would take 64 MiB of addresses for each new thread.
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "LOCAL_WORLD_SIZE": str(ranks), "MALLOC_ARENA_MAX": "1"}
    command = [sys.executable, "-c", PROGRAM, str(ROOM), "" if group is None else str(group.directory)]
    with ExitStack() as stack:
        processes = [
            stack.enter_context(
                subprocess.Popen(command, stdin=PIPE, stdout=PIPE, stderr=PIPE, text=True, cwd=ROOT, env=environ)
            )
            for _ in range(ranks)
        ]
        for process in processes:
            stack.callback(process.kill)
        for process in processes:
            assert process.stdout.readline() == "ready\n", process.stderr.read()[-2000:]
        if group is not None:
            group.set_limit((group.used + ranks * ROOM) * 16 // 15)
        for process in processes:
            process.stdin.write("go\n")
            process.stdin.flush()
        said = [(process.stdout.readline(), process.stdout.readline()) for process in processes]
        for process in processes:
            _, complaints = process.communicate("end\n", timeout=60)
            assert process.returncode != -signal.SIGKILL, "the kernel killed it"
            assert process.returncode == 0, complaints[-2000:]
    return [Trained(*(int(number) for number in numbers.split()), reported) for numbers, reported in said]


def assert_some_moved(trained: Trained) -> None:
    assert trained.demoted > 0
    assert trained.moved >= 2 * BATCH
    assert BATCH <= trained.held < 20 * BATCH


def test_h26_a_limit_on_addresses_below_what_offloading_wants_ends_exact_and_says_so() -> None:
    pytest.importorskip("resource")
    (trained,) = train()
    assert_some_moved(trained)
    assert "RLIMIT_AS" in trained.reported
    assert "ulimit -v" in trained.reported


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.long)])
def test_h26_a_control_group_below_what_offloading_wants_does_not_kill_the_run(ranks: int) -> None:
    with real_group() as group:
        trained = train(group, ranks)
        assert group.kills == 0
        for one in trained:
            assert_some_moved(one)
            assert "the control group" in one.reported
            assert str(group.directory) in one.reported
            assert ("shared by 2 processes" in one.reported) == (ranks == 2)
