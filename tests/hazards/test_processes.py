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

#: What every child process begins with.
PRELUDE = """
import gc, json, os, signal, sys, threading, traceback
import torch
import eager_offload as eo
from eager_offload.runtime import transfer_threads
from eager_offload.runtime.host import HostRuntime
from eager_offload.tiers.disk import DiskTier
from eager_offload.tiers.disk import DiskSlot

transfer_threads._STOP_SECONDS = 0.1  # the end of a process waits for so long for a transfer that never ends
directory, reports = sys.argv[1:]
torch.set_num_threads(1)
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs inherit that it is ignored

def make():
    windows = {"max_inflight_bytes": "1MiB", "prefetch_bytes": "1MiB"}  # a full one would wait
    return eo.Offload(tier="disk", disk_path=directory, min_bytes=0, keep_last_bytes=0, **windows)

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

IN_FLIGHT = """
offload = make()
trains(offload)
DiskSlot.write = lambda slot, tensor: threading.Event().wait()  # from here on no copy ends
losses = [forward(offload) for _ in range(3)]
ready()
"""

#: What ends without a word.
QUIET = {
    "at the end of the program": IN_FLIGHT,
    "by sys.exit": IN_FLIGHT + "sys.exit(0)",
    "by os._exit": IN_FLIGHT + "os._exit(0)",
    "with a graph in a cycle": IN_FLIGHT + "cycle = [losses]; cycle.append(cycle); del losses",
    "with graphs in a thread": IN_FLIGHT + "t = threading.Thread(target=forward, args=(offload,)); t.start(); t.join()",
    "with nothing but the offload": IN_FLIGHT + "del losses",
    "with nothing but the graphs": IN_FLIGHT + "del offload",
    "with offloads that were not closed": """
        offloads = [make() for _ in range(4)]
        assert all(trains(offload) for offload in offloads)
        losses = [forward(offload) for offload in offloads for _ in range(3)]
        offloads[0].close()
        del offloads[1]
        losses[0].backward()
        losses[3].backward()
        ready()
    """,
}

CHILDREN = {
    "trains on with the same offload": "trains(offload, 1)",
    "trains on with one of its own": "own = make(); trains(own, 2); own.close(); trains(own, 3)",
    "drops what it inherited": "del held, offload; trains(make(), 4)",
    "closes what it inherited": "offload.close(); trains(offload, 5)",
    "uses no offload": "loss_of(data(6)).backward()",
    "forks again": "p = os.fork(); p or (trains(offload, 7) and os._exit(0)); assert code_of(p) == 0",
}

FORKS = {
    # Forked with transfer threads alive and copies in flight, as a data loader forks its workers.
    "a forked child trains on": f"""
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
        ready()
    """,
    "a child that is forked inside of what its parent has begun trains without, and says so once": """
        import warnings
        from eager_offload.integrations.calls import OffloadedCalls
        offload, model = make(), torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Tanh())
        def gradients():
            return torch.autograd.grad(model(data(0)).exp().sum(), list(model.parameters()))
        def child_trains(words):
            pid = os.fork()
            if pid == 0:
                before = offload.stats().offloaded_bytes
                with warnings.catch_warnings(record=True, action="always") as said:
                    same = [torch.equal(*pair) for _ in range(3) for pair in zip(gradients(), expected)]
                assert all(same) and [words in str(one.message) for one in said] == [True], said
                assert offload.stats().offloaded_bytes == before
                os._exit(0)
            return code_of(pid) == 0
        expected = gradients()
        with offload:
            gradients()
            assert child_trains("forked inside of a `with offload` of its parent's: it trains without")
        calls = OffloadedCalls(model, offload)
        held = model(data(0)).sum()
        assert child_trains("forked after its parent had prepared this model: it trains without")
        held.backward()
        calls.remove()
        assert trains(offload)
        ready()
    """,
    "a fork in the middle of a transfer does not hang": """
        offload, started, go_on, write = make(), threading.Event(), threading.Event(), DiskSlot.write
        def held_back(slot, tensor):
            started.set()
            assert go_on.wait(60)
            write(slot, tensor)
        DiskSlot.write = held_back
        HostRuntime.given_bytes = 0  # so that copies are held back
        loss = forward(offload)
        assert started.wait(60)
        pid = os.fork()  # the transfer thread holds whatever locks a transfer takes
        if pid == 0:
            DiskSlot.write = write
            assert not offload.stats(synchronize=True).fallbacks, "a copy has begun that the parent held back"
            loss.backward()  # its sources are here
            os._exit(0 if trains(offload, 1) and trains(make(), 2) else 1)
        assert code_of(pid) == 0
        go_on.set()
        assert trains(offload)
        loss.backward()
        ready()
    """,
    "a fork while another thread holds the lock does not hang": """
        offload, inside, go_on, at_hand = make(), threading.Event(), threading.Event(), DiskTier.at_hand
        def held_back(*arguments):
            inside.set()
            assert go_on.wait(60)
            return at_hand(*arguments)
        assert trains(offload)
        DiskTier.at_hand = held_back
        thread = threading.Thread(target=forward, args=(offload,))
        thread.start()
        assert inside.wait(60)
        pid = os.fork()
        if pid == 0:
            DiskTier.at_hand = at_hand
            signal.alarm(60)  # where it would wait for a thread that it does not have
            os._exit(0 if trains(offload, 1) and trains(make(), 2) else 1)
        assert code_of(pid) == 0
        go_on.set()
        thread.join()
        DiskTier.at_hand = at_hand
        assert trains(offload)
        ready()
    """,
    "a child is told that its parent's bytes are not its own": """
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
        ready()
    """,
    "a data loader whose workers train too": """
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
        ready()
    """,
}

#: Programs for processes, and the signal by which each ends once it is ready, or ``None``: by itself.
LIVES = {
    **{
        f"killed by {name}": (IN_FLIGHT + "threading.Event().wait()", name) for name in ("SIGKILL", "SIGTERM", "SIGINT")
    },
    **{name: (program, None) for name, program in (QUIET | FORKS).items()},
}


class Ended(NamedTuple):
    """How a process has ended: what was wrong with it, if anything was, and what it wrote to ``stderr``."""

    error: str | None
    complaints: str


@functools.cache
def ends() -> dict[str, Ended]:
    """How the process of each of ``LIVES`` has ended; they are forked one by one off a single process."""
    programs = [
        (name, textwrap.dedent(program), kill and int(signal.Signals[kill])) for name, (program, kill) in LIVES.items()
    ]
    with tempfile.TemporaryDirectory() as directory, tempfile.TemporaryDirectory() as reports:
        printed = printed_by("-c", PRELUDE + f"PROGRAMS = {programs!r}\n" + NURSERY, directory, reports)
    return {name: Ended(error, complaints) for name, error, complaints in map(json.loads, printed.splitlines())}


@pytest.mark.xdist_group("processes")
@pytest.mark.parametrize("name", LIVES)
def test_h28_a_process_ends_well_and_leaves_no_file(name: str) -> None:
    ended = ends()[name]
    assert ended.error is None, f"{ended.error}\n{ended.complaints}"
    assert name not in QUIET or ended.complaints == ""
