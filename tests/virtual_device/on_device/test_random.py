"""Random programs and training runs on the virtual device are exact, whichever of copies and compute comes late."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import strategies as st

from tests.proof.bits import same_results
from tests.proof.programs import Machine, Program
from tests.proof.test_random_programs import explore
from tests.virtual_device import NAME
from tests.virtual_device.backend import VirtualBackend

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("one_thread")]

PACES = {
    "copies late": {"latency": 2e-4, "bandwidth": 1e8},
    "compute late": {"latency": 0.0, "bandwidth": 0.0, "compute": 5e-5},
}
TIERS = ["host", "host", "disk"]


def fits(program: Program) -> bool:
    """Whether the device runs ``program`` the same way every time."""
    machine, elsewhere = Machine(), Machine()
    # The host hears of what a kernel raises when it next waits, which is not at the same step every time.
    late = [_heard_late(machine.run, program), _heard_late(torch.accelerator.synchronize)]
    if any(late) or any(isinstance(entry, str) and "asynchronously" in entry for entry in machine.trace):
        return False
    # Gradients are summed in the order of sequence numbers, which each thread counts for itself. Where backward records
    # operators, on the device's own thread, it depends on the thread of forward whether theirs come first.
    with ThreadPoolExecutor(1, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        pool.submit(_heard_late, elsewhere.run, program).result()
    torch.accelerator.synchronize()
    return same_results(machine.trace, elsewhere.trace)


def _heard_late(call: Callable[..., object], *arguments: object) -> bool:
    try:
        with torch.device(NAME):
            call(*arguments)
    except RuntimeError as error:
        if "asynchronously" not in str(error):
            raise
        return True
    return False


@pytest.mark.parametrize(
    "programs", [pytest.param(40, marks=pytest.mark.short), pytest.param(100, marks=pytest.mark.long)]
)
def test_random_programs_are_exact(programs: int) -> None:
    explore(VirtualBackend, TIERS, st.sampled_from([*PACES.values()]), programs, fits=fits)
