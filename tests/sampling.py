"""What a run leaves out of the tests, and where it begins to search: both follow from one number, the run's seed.

A *sampled* test (``@pytest.mark.sampled(3)``) has more cases than a run has time for: one case in three is run, and
the seed says with which the counting begins. So each run takes others, and none is left out for ever. With ``shift=1``
it begins one case later: tests of the same cases with different shifts share them out. With ``quick=True`` that is so
in the quick suite alone (``-m "not long"``, without ``TESTS_QUICK=0``): other runs take all cases. Tests with the same
``of="inductor"`` are counted as if they were one test of many cases. A *search* draws fresh programs for some seconds,
after a fixed set that is the same in every run.

The seed is new in each run, and stands in its first lines and, where something failed, in its last ones.

    TESTS_SEED=1234 make test-full     the choice of another run
    TESTS_WHOLE=1 make test-full       every case of every sampled test

A run that names a single test (``pytest tests/test_one.py::test_this``) takes all of its cases.
"""

from __future__ import annotations

import os
import random
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import pytest
from hypothesis import HealthCheck, given, seed, settings
from hypothesis.strategies import SearchStrategy

T = TypeVar("T")

_SEED, _WHOLE, _QUICK = "TESTS_SEED", "TESTS_WHOLE", "TESTS_QUICK"


def draw_seed() -> None:
    """Chooses the run's seed, for this process and those that it starts, unless there is one."""
    os.environ.setdefault(_SEED, str(random.SystemRandom().randrange(100_000)))


def run_seed() -> int:
    """The number that everything drawn in this run follows from."""
    draw_seed()
    return int(os.environ[_SEED])


def announce() -> str:
    """A line that says how to have the same again."""
    return f"sampled cases and searches follow from {_SEED}={run_seed()}{' (all cases)' if _whole() else ''}"


def leave_out(items: list[pytest.Item], named: Sequence[str], marks: str = "") -> list[pytest.Item]:
    """Takes out of ``items`` those cases of sampled tests that are not this run's, and returns them.

    Args:
        items: what was collected; it is changed.
        named: what the command line asks for.
        marks: the marks that it asks for.
    """
    if _whole() or any("::" in name for name in named):
        return []
    quick = "not long" in marks and os.environ.get(_QUICK, "1") != "0"
    cases: defaultdict[tuple[str, int, int], list[pytest.Item]] = defaultdict(list)
    for item in items:
        marker = item.get_closest_marker("sampled")
        if marker is not None and (quick or not marker.kwargs.get("quick", False)):
            of = marker.kwargs.get("of", item.nodeid.partition("[")[0])
            cases[of, marker.args[0], marker.kwargs.get("shift", 0)].append(item)
    out: set[pytest.Item] = set()
    for (_, stride, shift), every in cases.items():
        out |= set(every) - set(one_in(stride, every, shift))
    items[:] = [item for item in items if item not in out]
    return [*out]


def one_in(stride: int, values: Sequence[T], shift: int = 0) -> Sequence[T]:
    """One in ``stride`` of ``values``; the run's seed says with which they begin."""
    return values if _whole() else values[(run_seed() + shift) % stride :: stride]


def spread(most: int, values: Sequence[T]) -> Sequence[T]:
    """At most so many of ``values``, the same distance apart; the run's seed says with which they begin."""
    return one_in(-(-len(values) // most), values) if len(values) > most else values


def search(check: Callable[..., None], *drawn: SearchStrategy[Any], fixed: int, seconds: float = 0.0) -> None:
    """Calls ``check`` with what is drawn: ``fixed`` times with the same in every run, then with fresh ones.

    Args:
        check: raises where something is wrong.
        drawn: its arguments.
        fixed: how many of them are the same in every run.
        seconds: for how long fresh ones are begun after that.
    """
    options: dict[str, Any] = {"deadline": None, "database": None, "suppress_health_check": list(HealthCheck)}
    settings(max_examples=fixed, derandomize=True, **options)(given(*drawn)(check))()
    chance, begun = random.Random(run_seed()), time.monotonic()
    while time.monotonic() - begun < seconds:
        number = chance.randrange(1 << 32)
        print(f"fresh ones of seed {number}, which follows from the run's")
        seed(number)(settings(max_examples=max(fixed // 10, 3), **options)(given(*drawn)(check)))()


def _whole() -> bool:
    return os.environ.get(_WHOLE, "0") not in ("", "0")
