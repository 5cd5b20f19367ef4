"""Random programs give the same with and without offload, bit for bit, and leave nothing behind."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from hypothesis import note
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from tests.hazards.backends import Backend, DiskBackend, SimulatedBackend, changes_a_source
from tests.proof.bits import same_results
from tests.proof.programs import MODIFIED, Call, Change, Machine, Program, programs
from tests.sampling import search
from tests.simulation.checker import Violation
from tests.threads import on_threads

# On one thread: the number of an operator's threads decides the last bits of some sums, as those of attention.
pytestmark = [
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.timeout(1800),
]


# -- what is drawn ----------------------------------------------------------------------------------------------------


def configs(tiers: list[str]) -> st.SearchStrategy[dict[str, Any]]:
    return st.fixed_dictionaries(
        {
            "tier": st.sampled_from(tiers),
            "min_bytes": st.sampled_from([0, 0, 64, 1024]),
            "keep_last_bytes": st.sampled_from([0, 0, 300, 5000, 1 << 20]),
            "max_inflight_bytes": st.sampled_from([1, 600, 20_000, 1 << 20]),
            "prefetch_bytes": st.sampled_from([0, 600, 20_000, 1 << 20]),
            "verify": st.booleans(),
            "host_budget": st.sampled_from(["auto", "auto", 8192, 2048]),
            "disk_budget": st.sampled_from(["auto", "auto", 65536, 2048]),
        }
    )


RATES = st.fixed_dictionaries(
    {
        "compute_rate": st.sampled_from([1e9, 1e7, 1e12]),
        "out_bandwidth": st.sampled_from([2.5e8, 1e6, 1e12]),
        "in_bandwidth": st.sampled_from([2.5e8, 1e6, 1e12]),
        "at_once": st.booleans(),
    }
)


# -- what is expected -------------------------------------------------------------------------------------------------


class Simulated(SimulatedBackend):
    """Simulated; programs may change in place what is being copied: then its unpack raises."""

    def assert_ordered(self) -> None:
        self.checker.violations = [found for found in self.checker.violations if not changed_in_place(found)]
        self.checker.assert_clean()


def changed_in_place(found: Violation) -> bool:
    operator = found.later.what.removeprefix("aten.").partition(".")[0]
    return changes_a_source(found) and operator.endswith("_")


class Passing(TorchDispatchMode):
    """Does nothing. Some of torch's formulas depend on whether a dispatch mode is active, as it is under a checker."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def check(program: Program, backend: Backend, fields: dict[str, Any], seen: Counter[str], threads: int = 1) -> None:
    """The program gives the same under ``backend``, and nothing of it is left; counts what was done with its saves."""
    plain = Machine()
    with Passing() if isinstance(backend, SimulatedBackend) else backend.watching():
        plain.run(program)
    note(repr(program))
    with backend:
        offload, other = backend.offload(**fields), backend.offload(prefetch_bytes=4000)
        machines = [Machine(offload, other) for _ in range(threads)]
        if threads == 1:
            machines[0].run(program)
        else:
            on_threads(threads, lambda number: backend.in_thread(partial(machines[number].run, program)))
        for machine in machines:
            assert same_results(machine.trace, plain.trace), f"{machine.trace} in place of {plain.trace}"
        if not autograd_leaks(program):
            backend.assert_nothing_is_held()
        for stats in [offload.stats() for offload in backend.offloads]:
            seen.update(stats.kept_bytes)
            ways = ("offloaded", "shared", "reloaded", "forwarded", "released")
            seen.update({name: getattr(stats, f"{name}_bytes") for name in ways} | {"bytes in": stats.bytes_in})
        seen.update({"programs": threads, "modified": plain.trace.count(MODIFIED)})


def autograd_leaks(program: Program) -> bool:
    """Whether there may be a cycle that nothing ever frees, as autograd alone makes it.

    Without hooks it saves an operator's input itself, and so does what stays under an ``Offload`` if that input is a
    leaf. Add the result to it in place, and each holds the other.
    """
    steps = [step for block in program.blocks for step in block.instructions]
    has_leaves = any(leaf.kind == "buffer" for leaf in program.leaves) or "detach" in [
        step.name for step in steps if isinstance(step, Call)
    ]
    return any(isinstance(step, Change) for step in steps) and (
        has_leaves or any(block.where == "bare" for block in program.blocks)
    )


def explore(
    make: Callable[..., Backend],
    tiers: list[str],
    rates: st.SearchStrategy[dict[str, Any]],
    fixed: int,
    fits: Callable[[Program], bool] = lambda program: True,
) -> None:
    """Checks random programs on what ``make`` makes of ``rates``, but those of which ``fits`` says no."""
    seen = Counter[str]()

    def every_program(program: Program, fields: dict[str, Any], rates: dict[str, Any], threads: int) -> None:
        if fits(program):
            check(program, make(**rates), fields, seen, threads)

    threads = st.sampled_from([1, 1, 1, 2])
    search(every_program, programs(), configs(tiers), rates, threads, fixed=fixed)
    print(seen)
    # Keeping everything would pass any test of equality: all ways that a saved tensor can take were taken. The rare
    # ones take more programs than a short run has.
    many = seen["programs"] >= 200
    for way in COMMON_WAYS + RARE_WAYS if many else COMMON_WAYS:
        assert seen[way] > 0, f"no program led to: {way}"


COMMON_WAYS = (
    *("offloaded", "shared", "reloaded", "forwarded", "released", "bytes in", "modified", "parameter", "newest"),
)
RARE_WAYS = ("small", "marked", "region", "budget")


# -- the tests --------------------------------------------------------------------------------------------------------


#: Half a minute on a quiet machine.
FEW_OR_MANY = pytest.mark.parametrize(
    "fixed", [pytest.param(60, marks=pytest.mark.short), pytest.param(200, marks=pytest.mark.long)]
)


@FEW_OR_MANY
def test_random_programs_are_exact_on_the_cpu_device(fixed: int) -> None:
    explore(DiskBackend, ["disk", "disk", "host"], st.just({}), fixed)


@FEW_OR_MANY
def test_random_programs_are_exact_and_in_order_on_simulated_streams(fixed: int) -> None:
    explore(Simulated, ["host", "host", "disk"], RATES, fixed)
