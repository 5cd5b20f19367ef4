"""H28: how processes end, and what is left of their files."""

from __future__ import annotations

import functools
import json
import signal
import tempfile
import textwrap
from typing import NamedTuple

import pytest

from tests.processes import printed_by

#: What every child process begins with. It trains with the disk tier, on the host runtime or on the simulated one.
PRELUDE = """
import contextlib, gc, json, os, signal, sys, threading, traceback
import torch
import eager_offload as eo
from eager_offload.runtime import transfer_threads
from tests.simulation.simulated import SimulatedRuntime
from eager_offload.tiers.disk import DiskSlot

transfer_threads._STOP_SECONDS = 0.1  # the end of a process waits for so long for a transfer that never ends
directory, backend, reports = sys.argv[1:]
torch.set_num_threads(1)
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs inherit that it is ignored

simulated = SimulatedRuntime() if backend == "simulated" else None
if simulated is not None:
    import torch._dynamo  # which the checker brings in: once, and not in each fork

@contextlib.contextmanager
def checked():
    # The happens-before checker, around what does not end the process by itself.
    if simulated is None:
        yield
    else:
        with simulated.checked() as checker:
            yield
        checker.assert_clean()

def make():
    windows = {"max_inflight_bytes": "1MiB", "prefetch_bytes": "1MiB"}  # a full one would wait
    fields = {"tier": "disk", "disk_path": directory, "min_bytes": 0, "keep_last_bytes": 0}
    return eo.Offload(runtime=simulated, **fields, **windows)

def loss_of(x):
    return ((x * 2).tanh() @ x.exp()).sin().sum()

def data(seed):
    return torch.randn(64, 64, generator=torch.Generator().manual_seed(seed)).requires_grad_()

def forward(offload, seed=0):
    x = data(seed)
    with offload:
        return loss_of(x)

def trains(offload, seed=0):
    expected, x = data(seed), data(seed)
    loss_of(expected).backward()
    offload.reset_stats()
    with offload:
        loss = loss_of(x)
    offload.stats(synchronize=True)
    loss.backward()
    assert torch.equal(expected.grad, x.grad)
    stats = offload.stats(synchronize=True)
    eligible = stats.saved_bytes - stats.kept_bytes.get("parameter", 0)
    assert stats.offloaded_bytes + stats.shared_bytes >= 0.9 * eligible > 0, stats
    assert stats.bytes_out > 0 and stats.bytes_in > 0, stats
    return True

def hold_transfers_back():
    # From here on no copy ends. A simulated one runs in the thread that waits for it: none does.
    if backend == "disk":
        DiskSlot.write = lambda slot, tensor: threading.Event().wait()

def code_of(pid):
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
"""

#: Runs programs one after the other, each in a fork of a process in which nothing has happened yet but the imports.
NURSERY = """
def run(name, program, kill):
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(reading)
        exec(program, {**globals(), "ready": lambda: os.write(writing, b"ready")})
        raise SystemExit(0)  # and on to the end of the interpreter
    os.close(writing)
    assert os.read(reading, 5) == b"ready", name
    assert os.listdir(directory) == [], f"{name}: the file has a name"
    if kill is not None:
        os.kill(pid, kill)
    code = code_of(pid)
    assert code == (0 if kill is None else -kill), f"{name}: ended with {code}"
    assert os.listdir(directory) == [], f"{name}: left a file"

gc.collect()
gc.freeze()  # or each fork would copy what its collector looks through
for name, program, kill in PROGRAMS:
    sys.stderr.flush()
    with open(f"{reports}/stderr", "w+") as complaints:
        os.dup2(complaints.fileno(), 2)
        error = None
        try:
            run(name, program, kill)
        except Exception:
            error = traceback.format_exc()
        complaints.seek(0)
        print(json.dumps([name, error, complaints.read()]), flush=True)
"""


class Life(NamedTuple):
    """A program for a process, and how it ends: by itself, or by a signal once it is ready."""

    program: str
    kill: int | None = None


class Ended(NamedTuple):
    """How a process has ended."""

    error: str | None
    """What was wrong with it; ``None`` where all was well."""
    complaints: str
    """What it wrote to ``stderr``."""


@functools.cache
def ends(backend: str) -> dict[str, Ended]:
    """How the process of each of ``LIVES`` has ended; they are forked one by one off a single process."""
    programs = [
        (name, textwrap.dedent(life.program), life.kill)
        for name, life in LIVES.items()
        if backend != "simulated" or name not in FOR_THE_DISK
    ]
    with tempfile.TemporaryDirectory() as directory, tempfile.TemporaryDirectory() as reports:
        printed = printed_by("-c", PRELUDE + f"PROGRAMS = {programs!r}\n" + NURSERY, directory, backend, reports)
    return {name: Ended(error, complaints) for name, error, complaints in map(json.loads, printed.splitlines())}


def under_check(program: str) -> str:
    """``program`` inside ``checked()``; it is ready when it is through."""
    return "with checked():\n" + textwrap.indent(textwrap.dedent(program), "    ") + "\nready()\n"


IN_FLIGHT = """
offload = make()
trains(offload)
hold_transfers_back()
losses = [forward(offload) for _ in range(3)]
ready()
"""

WAITING = IN_FLIGHT + "threading.Event().wait()\n"

KILLED = {
    f"killed by {number.name}": Life(WAITING, int(number)) for number in (signal.SIGKILL, signal.SIGTERM, signal.SIGINT)
}

WITH_COPIES_IN_FLIGHT = {
    "at the end of the program": Life(IN_FLIGHT),
    "by sys.exit": Life(IN_FLIGHT + "sys.exit(0)"),
    "by os._exit": Life(IN_FLIGHT + "os._exit(0)"),
    "with a graph in a cycle": Life(IN_FLIGHT + "cycle = [losses]; cycle.append(cycle); del losses"),
    "with graphs in a thread": Life(
        IN_FLIGHT + "t = threading.Thread(target=forward, args=(offload,)); t.start(); t.join()"
    ),
    "with nothing but the offload": Life(IN_FLIGHT + "del losses"),
    "with nothing but the graphs": Life(IN_FLIGHT + "del offload"),
}

OFFLOADS_LEFT_OPEN = """
    offloads = [make() for _ in range(4)]
    assert all(trains(offload) for offload in offloads)
    losses = [forward(offload) for offload in offloads for _ in range(3)]
    offloads[0].close()
    del offloads[1]
    losses[0].backward()
    losses[3].backward()
    ready()
"""

CHILDREN = {
    "trains on with the same offload": "trains(offload, 1)",
    "trains on with one of its own": "own = make(); trains(own, 2); own.close(); trains(own, 3)",
    "drops what it inherited": "del held, offload; trains(make(), 4)",
    "closes what it inherited": "offload.close(); trains(offload, 5)",
    "uses no offload": "loss_of(data(6)).backward()",
    "forks again": "p = os.fork(); p or (trains(offload, 7) and os._exit(0)); assert code_of(p) == 0",
}

#: Forked with transfer threads alive and copies in flight, as a data loader forks its workers.
FORK = f"""
    offload = make()
    held = forward(offload)  # offloaded before the forks, and needed after them
    assert trains(offload)
    for name, program in {CHILDREN!r}.items():
        trains(offload, 8)
        forward(offload)
        pid = os.fork()
        if pid == 0:
            try:
                assert not [t for t in threading.enumerate() if t.name.startswith("eager_offload")], name
                exec(program)
            except BaseException:
                traceback.print_exc()
                os._exit(1)
            os._exit(0)
        assert code_of(pid) == 0, name
    held.backward()
    assert trains(offload, 9)
"""

IN_THE_MIDDLE_OF_A_TRANSFER = """
    offload, started, go_on, write = make(), threading.Event(), threading.Event(), DiskSlot.write
    def held_back(slot, tensor):
        started.set()
        assert go_on.wait(60)
        write(slot, tensor)
    DiskSlot.write = held_back
    loss = forward(offload)
    assert started.wait(60)
    pid = os.fork()  # the transfer thread holds whatever locks a transfer takes
    if pid == 0:
        DiskSlot.write = write
        loss.backward()  # its sources are here, and no copy of them begins
        os._exit(0 if trains(offload, 1) and trains(make(), 2) else 1)
    assert code_of(pid) == 0
    go_on.set()
    assert trains(offload)
    loss.backward()
    ready()
"""

THE_PARENTS_BYTES = """
    offload = make()
    held = forward(offload)
    offload.stats(synchronize=True)
    pid = os.fork()
    if pid == 0:
        try:
            held.backward()
        except eo.OffloadError as error:
            assert "fork" in str(error), error
            os._exit(0 if trains(offload, 1) else 1)
        os._exit(2)
    assert code_of(pid) == 0
    held.backward()
    assert trains(offload)
"""

A_DATA_LOADER = """
    offload = make()
    assert trains(offload)
    class Squares(torch.utils.data.Dataset):
        def __len__(self):
            return 8
        def __getitem__(self, index):
            return int(trains(offload, index) and trains(make(), index))
    loader = torch.utils.data.DataLoader(Squares(), batch_size=2, num_workers=2, multiprocessing_context="fork")
    for number, batch in enumerate(loader):
        assert batch.tolist() == [1, 1]
        assert trains(offload, number)
"""

LIVES = {
    **KILLED,
    **WITH_COPIES_IN_FLIGHT,
    "with offloads that were not closed": Life(OFFLOADS_LEFT_OPEN),
    "a forked child trains on": Life(under_check(FORK)),
    "a fork in the middle of a transfer does not hang": Life(IN_THE_MIDDLE_OF_A_TRANSFER),
    "a child is told that its parent's bytes are not its own": Life(under_check(THE_PARENTS_BYTES)),
    "a data loader whose workers train too": Life(under_check(A_DATA_LOADER)),
}
#: What happens in a transfer thread, which a simulated device has none of.
FOR_THE_DISK = {"a fork in the middle of a transfer does not hang"}
#: What ends without a word.
QUIET = {*WITH_COPIES_IN_FLIGHT, "with offloads that were not closed"}


@pytest.mark.xdist_group("processes")
@pytest.mark.parametrize(
    ("backend", "name"),
    [("disk", name) for name in LIVES]
    + [pytest.param("simulated", name, marks=pytest.mark.long) for name in LIVES if name not in FOR_THE_DISK],
)
def test_h28_a_process_ends_well_and_leaves_no_file(backend: str, name: str) -> None:
    ended = ends(backend)[name]
    assert ended.error is None, f"{ended.error}\n{ended.complaints}"
    assert name not in QUIET or ended.complaints == ""
