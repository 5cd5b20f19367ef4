"""H28, H32: how processes end, and what is left of their files."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from tests.hazards.backends import Backend, lane_of
from tests.hazards.programs import Settled, assert_moved, leaf

#: What every child begins with. It trains with the disk tier, on the host runtime or on the simulated one.
PRELUDE = """
import os, signal, sys, threading
import torch
import eager_offload as eo
from eager_offload.tiers.disk import DiskSlot

directory, backend = sys.argv[1:]
torch.set_num_threads(1)

def make():
    runtime = None
    if backend == "simulated":
        from eager_offload.runtime.simulated import SimulatedRuntime
        runtime = SimulatedRuntime()
    return eo.Offload(runtime=runtime, tier="disk", disk_path=directory, min_bytes=0, keep_last_bytes=0)

def step(offload, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(64, 64, generator=generator).requires_grad_()
    with offload:
        loss = ((x * 2).tanh() @ x.exp()).sin().sum()
    loss.backward()
    return x.grad

def expected(seed=0):
    x = torch.randn(64, 64, generator=torch.Generator().manual_seed(seed)).requires_grad_()
    ((x * 2).tanh() @ x.exp()).sin().sum().backward()
    return x.grad

def forward(offload):
    x = torch.randn(64, 64, requires_grad=True)
    with offload:
        return ((x * 2).tanh() @ x.exp()).sin().sum()

def ready():
    print("ready", flush=True)

def hold_transfers_back():
    # A copy that never ends: everything is in flight from here on.
    def never(slot, tensor):
        threading.Event().wait()
    DiskSlot.write = never

def check(offload):
    stats = offload.stats(synchronize=True)
    assert stats.bytes_out > 0, stats
    assert stats.offloaded_bytes + stats.shared_bytes >= 0.9 * (stats.saved_bytes - stats.kept_bytes.get("parameter", 0)), stats

assert torch.equal(step(make()), expected())
"""

BACKENDS = ["disk", "simulated"]


@contextmanager
def child(program: str, directory: Path, backend: str) -> Iterator[subprocess.Popen[str]]:
    """Runs ``program`` in a process of its own."""
    process = subprocess.Popen(
        [sys.executable, "-c", PRELUDE + textwrap.dedent(program), str(directory), backend],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[2],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            process.kill()
        process.communicate()


def finish(process: subprocess.Popen[str]) -> str:
    """Waits for the end of a child that has to succeed, and returns what it said."""
    said, complaints = process.communicate(timeout=120)
    assert process.returncode == 0, complaints
    return said


def wait_until_ready(process: subprocess.Popen[str]) -> None:
    assert process.stdout is not None
    line = process.stdout.readline()
    if line.strip() != "ready":
        _, complaints = process.communicate(timeout=120)
        pytest.fail(complaints)


# -- H28 --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT], ids=str)
@pytest.mark.parametrize("backend", BACKENDS)
def test_h28_a_killed_process_leaves_no_file(backend: str, number: signal.Signals, tmp_path: Path) -> None:
    program = """
        offload = make()
        hold_transfers_back()
        losses = [forward(offload) for _ in range(3)]
        ready()
        threading.Event().wait()
    """
    with child(program, tmp_path, backend) as process:
        wait_until_ready(process)
        assert list(tmp_path.iterdir()) == [], "the file has a name while it is used"
        process.send_signal(number)
        process.wait(timeout=60)
        assert process.returncode == -number or number is signal.SIGINT
    assert list(tmp_path.iterdir()) == []


ENDINGS = {
    "at the end of the program": "",
    "by sys.exit": "sys.exit(0)",
    "by os._exit": "os._exit(0)",
    "by an error": "raise SystemExit(0) from RuntimeError()",
    "in another thread's hands": "thread = threading.Thread(target=forward, args=(offload,)); thread.start(); thread.join()",
    "with the graph in a cycle": "cycle = [losses]; cycle.append(cycle); del losses",
    "after close": "del losses" if False else "",
}
del ENDINGS["after close"]


@pytest.mark.parametrize("ending", ENDINGS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_h28_a_process_ends_with_copies_in_flight(backend: str, ending: str, tmp_path: Path) -> None:
    program = f"""
        offload = make()
        hold_transfers_back()
        losses = [forward(offload) for _ in range(3)]
        ready()
        {ENDINGS[ending]}
    """
    with child(program, tmp_path, backend) as process:
        said, complaints = process.communicate(timeout=120)
        assert process.returncode == 0, complaints
        assert said.strip() == "ready"
        assert complaints.strip() == ""
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("backend", BACKENDS)
def test_h28_a_process_ends_with_offloads_that_nobody_closed(backend: str, tmp_path: Path) -> None:
    program = """
        offloads = [make() for _ in range(4)]
        losses = [forward(offload) for offload in offloads for _ in range(3)]
        for offload in offloads:
            check(offload)
        offloads[0].close()
        del offloads[1]
        losses[0].backward()
        ready()
    """
    with child(program, tmp_path, backend) as process:
        assert finish(process).strip() == "ready"
    assert list(tmp_path.iterdir()) == []


FORK = """
    offload = make()
    held = forward(offload)        # offloaded before the fork, and still needed after it
    step(offload)
    pid = os.fork()
    if pid == 0:
        try:
            assert not [t for t in threading.enumerate() if t.name.startswith("eager_offload")]
            {child}
            os._exit(0)
        except BaseException:
            import traceback
            traceback.print_exc()
            os._exit(1)
    _, status = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    held.backward()
    assert torch.equal(step(offload, 5), expected(5))
    check(offload)
    ready()
"""

CHILDREN = {
    "trains on with the same offload": "assert torch.equal(step(offload, 1), expected(1)); check(offload)",
    "trains on with one of its own": "own = make(); assert torch.equal(step(own, 2), expected(2)); check(own); own.close()",
    "drops what it inherited": "del held, offload",
    "closes what it inherited": "offload.close(); assert torch.equal(step(offload, 3), expected(3)); check(offload)",
    "uses no offload": "assert torch.equal(expected(4), expected(4))",
    "forks again": "p = os.fork(); p or (step(offload, 6), os._exit(0)); assert os.waitstatus_to_exitcode(os.waitpid(p, 0)[1]) == 0",
}


@pytest.mark.parametrize("what", CHILDREN)
@pytest.mark.parametrize("backend", BACKENDS)
def test_h28_a_forked_child(backend: str, what: str, tmp_path: Path) -> None:
    """Forked with transfer threads alive, as a data loader forks its workers."""
    with child(FORK.format(child=CHILDREN[what]), tmp_path, backend) as process:
        assert finish(process).strip() == "ready"
    assert list(tmp_path.iterdir()) == []


def test_h28_a_child_is_told_that_its_parents_bytes_are_not_its_own(tmp_path: Path) -> None:
    program = """
        try:
            held.backward()
        except eo.OffloadError as error:
            assert "fork" in str(error), error
        else:
            raise AssertionError("the child read its parent's file")
        assert torch.equal(step(offload, 1), expected(1))
    """
    code = textwrap.indent(textwrap.dedent(program).strip(), " " * 12).strip()
    with child(FORK.replace("step(offload)\n", "step(offload); offload.stats(synchronize=True)\n").format(child=code), tmp_path, "disk") as process:
        assert finish(process).strip() == "ready"


def test_h28_a_fork_in_the_middle_of_a_transfer_does_not_hang(tmp_path: Path) -> None:
    program = """
        offload, started, go_on, write = make(), threading.Event(), threading.Event(), DiskSlot.write
        def held_back(slot, tensor):
            started.set()
            assert go_on.wait(60)
            write(slot, tensor)
        DiskSlot.write = held_back
        loss = forward(offload)
        assert started.wait(60)
        pid = os.fork()                # the transfer thread holds whatever locks a transfer takes
        if pid == 0:
            DiskSlot.write = write
            own = make()
            ok = torch.equal(step(offload, 1), expected(1)) and torch.equal(step(own, 2), expected(2))
            os._exit(0 if ok else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        go_on.set()
        check(offload)
        loss.backward()
        ready()
    """
    with child(program, tmp_path, "disk") as process:
        assert finish(process).strip() == "ready"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("backend", BACKENDS)
def test_h28_a_data_loader_with_workers(backend: str, tmp_path: Path) -> None:
    program = """
        class Squares(torch.utils.data.Dataset):
            def __len__(self):
                return 8
            def __getitem__(self, index):
                return step(make(), index)     # the workers train, too
        offload = make()
        step(offload)
        loader = torch.utils.data.DataLoader(Squares(), batch_size=2, num_workers=2, multiprocessing_context="fork")
        for number, batch in enumerate(loader):
            assert torch.equal(batch[0], expected(2 * number))
            assert torch.equal(step(offload, number), expected(number))
        check(offload)
        ready()
    """
    with child(program, tmp_path, backend) as process:
        assert finish(process).strip() == "ready"
    assert list(tmp_path.iterdir()) == []


# -- H32 --------------------------------------------------------------------------------------------------------------


def deleted_files(directory: Path) -> list[int]:
    """Descriptors of this process on files without a name that lie in ``directory``."""
    found = []
    for entry in Path("/proc/self/fd").iterdir():
        try:
            target = os.readlink(entry)
        except OSError:
            continue
        if target.startswith(f"{directory}/") and target.endswith(" (deleted)"):
            found.append(int(entry.name))
    return found


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="descriptors are looked up in /proc")
def test_h32_the_spill_file_has_no_name_and_is_for_its_owner_only(backend: Backend, tmp_path: Path) -> None:
    mask = os.umask(0)  # nothing of the mode is the mask's doing
    try:
        offload = backend.offload(tier="disk", disk_path=tmp_path)
    finally:
        os.umask(mask)
    secret = leaf(64, 64, grad=False)
    w = leaf(64, 64, seed=2)

    def step() -> None:
        with Settled(offload):
            loss = (w * secret.clone()).sum()
        assert list(tmp_path.iterdir()) == []
        (descriptor,) = deleted_files(tmp_path)
        status = os.fstat(descriptor)
        assert status.st_nlink == 0
        assert stat.S_IMODE(status.st_mode) == 0o600
        assert status.st_uid == os.getuid()
        if backend.name == "disk":
            assert secret.numpy().tobytes() in _content(descriptor), "the bytes are somewhere else"
        loss.backward()
        assert torch.equal(w.grad if w.grad is not None else w, secret)

    step()
    assert_moved(offload.stats())
    assert lane_of(offload).tiers[0].used_bytes == 0
    offload.close()
    assert deleted_files(tmp_path) == [], "the file is still open"
    assert list(tmp_path.iterdir()) == []


def _content(descriptor: int) -> bytes:
    # Through a descriptor of its own: the library's may ask for aligned memory.
    again = os.open(f"/proc/self/fd/{descriptor}", os.O_RDONLY)
    try:
        return os.pread(again, os.fstat(descriptor).st_size, 0)
    finally:
        os.close(again)


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="descriptors are looked up in /proc")
def test_h32_a_child_program_does_not_inherit_the_file(backend: Backend, tmp_path: Path) -> None:
    offload = backend.offload(tier="disk", disk_path=tmp_path)
    w = leaf(64, 64)
    with Settled(offload):
        loss = (w * 2).tanh().exp().sum()
    (descriptor,) = deleted_files(tmp_path)
    assert not os.get_inheritable(descriptor)
    listing = subprocess.run(["ls", "-l", "/proc/self/fd"], close_fds=False, capture_output=True, text=True, check=True)
    assert str(tmp_path) not in listing.stdout
    loss.backward()
    del loss
    assert_moved(offload.stats())
