"""H26: host memory is short, at the start or all of a sudden. Training goes on, exact, and is not killed for it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, nullcontext
from pathlib import Path
from subprocess import PIPE
from typing import Any

import pytest
from torch import Tensor

from eager_offload import OffloadStats
from eager_offload.tiers import host, limits
from eager_offload.tiers.limits import Headroom, host_bound, host_headroom
from tests.hazards.backends import SimulatedBackend, assert_settled
from tests.hazards.programs import Settled, assert_identical, assert_moved
from tests.programs import leaf
from tests.tiers.machines import MIB, FakeMachine, RealGroup, real_group

ROOT = Path(__file__).parents[2]
#: Of one saved tensor; bytes.
NBYTES = 512 * 512 * 4


# -- an injected reading --------------------------------------------------------------------------------------------


class SmallMachine(FakeMachine):
    """Less is available by as much as host tiers hold."""

    #: Bytes that are available for them.
    available = 48 * MIB

    def look(self) -> Headroom:
        held = sum(pool._held for pool in host._pools if not pool.is_closed)
        self.set_memory(total=64 * MIB, available=max(self.available - held, 0))
        return host_headroom(self.system)


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[SmallMachine]:
    """A machine of 64 MiB, of which 4 are always left to others, in place of this one."""
    machine = SmallMachine(tmp_path, total=64 * MIB)
    monkeypatch.setattr(limits, "host_headroom", machine.look)
    monkeypatch.setattr(host_bound, "_ledger", None)  # the other processes here are on the real machine
    host_bound.forget()
    yield machine
    host_bound.forget()


def trainer(backend: SimulatedBackend, **fields: Any) -> Callable[..., OffloadStats]:
    """Takes a step of so many layers, exact, without a warning or with the one that is given; returns the stats."""
    offload = backend.offload(**fields)

    def step(around: Any, layers: int) -> Tensor:
        y = x = leaf(512, 512)
        with around:
            for _ in range(layers):
                y = (y * 1.01).sin()
            loss = y.sum()
        loss.backward()
        return x.grad

    def train(layers: int, warning: str = "") -> OffloadStats:
        expected = step(nullcontext(), layers)
        with pytest.warns(RuntimeWarning, match=warning) if warning else warnings.catch_warnings(action="error"):
            assert_identical(expected, step(Settled(offload), layers))
        return assert_settled(offload)

    return train


def test_h26_headroom_that_shrinks_in_mid_training_keeps_what_comes_on_the_device(machine: SmallMachine) -> None:
    with SimulatedBackend() as backend:
        train = trainer(backend)
        before = train(6)
        assert_moved(before)
        assert before.fallbacks == {}
        machine.available = 12 * MIB
        stats = train(24, r"this machine's 64\.0 MiB of memory are available\)\. To change that, end")
        assert stats.fallbacks["budget"] > 0
        assert stats.kept_bytes["budget"] >= NBYTES
        assert stats.bytes_out > before.bytes_out, "the slabs that there are serve on"
        machine.available = 48 * MIB
        host_bound.forget()
        assert train(12).fallbacks == stats.fallbacks, "there is room again"
        backend.assert_nothing_is_held()


def test_a_budget_in_bytes_holds_where_memory_is_short_and_one_warning_says_so(machine: SmallMachine) -> None:
    with SimulatedBackend() as backend:
        train = trainer(backend, host_budget="1TiB")
        machine.available = 4 * MIB
        train(30, "host_budget=1TiB is taken as it was given")
        stats = train(30)
        assert stats.fallbacks == {}
        assert stats.host_bytes_peak >= 30 * NBYTES
        assert_moved(stats)
        backend.assert_nothing_is_held()


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
offload = eo.Offload(tier="host", min_bytes=0, keep_last_bytes=0)
with offload:
    begun = torch.ones(1 << 14, requires_grad=True).exp().sum()
assert offload.stats(synchronize=True).bytes_out > 0  # from now on others keep its share for it
print("ready", flush=True)
sys.stdin.readline()
if not group:
    # A 16th of the limit is left to others.
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, ((used + room) * 16 // 15,) * 2)

with warnings.catch_warnings(record=True) as told:
    warnings.simplefilter("always")
    for _ in range(2):
        assert torch.equal(gradient(offload), expected)
stats = offload.stats(synchronize=True)
print(stats.bytes_out, stats.fallbacks["budget"], stats.host_bytes_peak)
print([str(one.message) for one in told if "no room" in str(one.message)][0], flush=True)
sys.stdin.readline()
"""
#: Of one batch, and for the slabs of one process; bytes.
BATCH, ROOM = 8 * MIB, 72 * MIB


def train(group: RealGroup | None = None, ranks: int = 1) -> list[str]:
    """What users are told of ``ranks`` processes of ``PROGRAM``: in each some bytes move, and it ends well."""
    # glibc would take 64 MiB of addresses for each new thread.
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "MALLOC_ARENA_MAX": "1"}
    command, told = [sys.executable, "-c", PROGRAM, str(ROOM), "" if group is None else str(group.directory)], []
    with ExitStack() as stack:
        if group is not None:
            group.set_limit(1 << 40)  # its processes have a ledger of their own
        started = [
            subprocess.Popen(command, stdin=PIPE, stdout=PIPE, stderr=PIPE, text=True, cwd=ROOT, env=environ)
            for _ in range(ranks)
        ]
        for process in started:
            stack.enter_context(process)
            stack.callback(process.kill)
        for process in started:
            assert process.stdout.readline() == "ready\n", process.stderr.read()[-2000:]
        if group is not None:
            group.set_limit((group.used + ranks * ROOM) * 16 // 15)
        for process in started:
            process.stdin.write("go\n")
            process.stdin.flush()
        for process in started:
            moved, refused, held = map(int, process.stdout.readline().split())
            told.append(process.stdout.readline())
            assert refused > 0
            assert moved >= 2 * BATCH
            assert BATCH <= held < 20 * BATCH
        for process in started:
            _, complaints = process.communicate("end\n", timeout=60)
            assert process.returncode != -signal.SIGKILL, "the kernel killed it"
            assert process.returncode == 0, complaints[-2000:]
    return told


def test_h26_a_limit_on_addresses_below_what_offloading_wants_ends_exact_and_says_so() -> None:
    pytest.importorskip("resource")
    (told,) = train()
    assert "RLIMIT_AS" in told
    assert "ulimit -v" in told


@pytest.mark.long
@pytest.mark.parametrize("ranks", [1, 2])
def test_h26_a_control_group_below_what_offloading_wants_does_not_kill_the_run(ranks: int) -> None:
    with real_group() as group:
        told = train(group, ranks)
        assert group.kills == 0
        for text in told:
            assert "the control group" in text
            assert str(group.directory) in text
            assert ("the 2 processes that share it" in text) == (ranks == 2)
