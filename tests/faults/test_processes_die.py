"""H28: processes that are killed or forked at any operation of a step."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.processes import printed_by

PRELUDE = """
import os, random, signal, sys, threading, traceback
from pathlib import Path
import torch
import eager_offload as eo
from tests.faults.disks import Faults, Faulty, expected, make_offload, on_faulty_disk, step, step_is_exact
from tests.hazards.backends import assert_settled
from tests.proof.bits import same_bits

directory, argument = Path(sys.argv[1]), int(sys.argv[2])
torch.set_num_threads(1)

def code_of(pid):
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

def operations_of(steps):
    # How many operations a process meets in so many steps, opening and closing included.
    Faulty.faults = faults = Faults("any", 1 << 30, print)
    offload = make_offload(directory)
    for seed in range(1, steps + 1):
        step_is_exact(offload, seed)
    offload.close()
    Faulty.faults = None
    return faults.seen
"""

#: Children that kill themselves at an operation that the run's seed chooses, in the thread that is at it; no operation
#: has its second turn before all have had their first.
KILLS = """
def live():
    # Never returns: the process is killed at an operation of one of its steps, before it or in the middle of others.
    signal.alarm(120)
    for _ in range(1000):
        offload = make_offload(directory)
        for seed in (1, 2):
            step(offload, seed)
        offload.close()
    os._exit(99)

def die():
    os.kill(os.getpid(), signal.SIGKILL)
    threading.Event().wait()

with on_faulty_disk():
    operations = operations_of(2)
    order, killed = random.Random(0).sample(range(1, operations + 1), operations), set()
    for number in range(argument):
        first = order[number % operations]
        pid = os.fork()
        if pid == 0:
            Faulty.faults = Faults("any", first, die)
            live()
        assert code_of(pid) == -signal.SIGKILL, number
        assert os.listdir(directory) == [], "a file is left"
        killed.add(first)
    offload = make_offload(directory)
    step_is_exact(offload, 3)
    assert_settled(offload)
    offload.close()
assert os.listdir(directory) == []
print(f"{argument} killed at {len(killed)} of {operations} operations")
"""

#: A fork at each operation in turn, from the very thread that is at it, while the others are in the middle of a step.
FORKS = """
def child(seed):
    signal.alarm(120)
    Faulty.faults = None
    try:
        with torch.enable_grad():  # autograd saves tensors with gradients off
            own = make_offload(directory)
            step_is_exact(own, seed)
            step_is_exact(inherited, seed)
            own.close()
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)

def fork():
    pid = os.fork()
    if pid == 0:
        child(3)
    codes.append(code_of(pid))

codes = []
with on_faulty_disk():
    operations = operations_of(1)
    for first in range(1, operations + 1):
        inherited = make_offload(directory)
        Faulty.faults = faults = Faults("any", first, fork)
        assert same_bits(step(inherited, 1), expected(1))
        Faulty.faults = None
        assert_settled(inherited)
        step_is_exact(inherited, 2)
        inherited.close()
assert codes == [0] * len(codes), codes
assert os.listdir(directory) == []
print(f"{len(codes)} forked at {operations} operations")
"""


@pytest.mark.parametrize("kills", [pytest.param(20, marks=pytest.mark.short), pytest.param(60, marks=pytest.mark.long)])
def test_h28_a_process_that_is_killed_or_forked_at_any_operation_leaves_nothing_and_all_exact(
    kills: int, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    killed, forked = printed_by("-c", PRELUDE + KILLS + FORKS, tmp_path, str(kills)).splitlines()
    assert list(tmp_path.iterdir()) == []
    assert killed.startswith(f"{kills} killed at ")
    assert int(forked.split(" forked at ")[0]) > 5
    record_property("faults", kills)
