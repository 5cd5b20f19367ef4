"""What a run leaves out of the tests: always the same, so that a red run repeats.

A *sampled* test (``@pytest.mark.sampled(3)``) has more cases than a run has time for: one case in three is run. With
``shift=1`` the counting begins one case later: tests of the same cases with different shifts share them out. With
``quick=True`` that is so in the quick suite alone (``-m "not long"``, without ``TESTS_QUICK=0``): other runs take all
cases. Tests with the same ``of="inductor"`` are counted as if they were one test of many cases. A *search* runs a set
of programs that is the same in every run; where ``TESTS_FRESH`` says for how many seconds, it draws fresh ones after
that, and prints what draws a failing one again. ``make test-full`` says 2, but not on CI.

    TESTS_WHOLE=1 make test-full     every case of every sampled test
    TESTS_FRESH=60 make test-full    each search draws fresh programs for a minute

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

_WHOLE, _QUICK, _FRESH = "TESTS_WHOLE", "TESTS_QUICK", "TESTS_FRESH"


def leave_out(items: list[pytest.Item], named: Sequence[str], marks: str = "") -> list[pytest.Item]:
    """Takes out of ``items`` those cases of sampled tests that are not run, and returns them.

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
    """One in ``stride`` of ``values``."""
    return values if _whole() else values[shift % stride :: stride]


def spread(most: int, values: Sequence[T]) -> Sequence[T]:
    """At most so many of ``values``, the same distance apart."""
    return one_in(-(-len(values) // most), values) if len(values) > most else values


def search(check: Callable[..., None], *drawn: SearchStrategy[Any], fixed: int) -> None:
    """Calls ``check`` with what is drawn: ``fixed`` times with the same in every run, then with fresh ones if asked.

    Args:
        check: raises where something is wrong.
        drawn: its arguments.
        fixed: how many of them are the same in every run.
    """
    options: dict[str, Any] = {"deadline": None, "database": None, "suppress_health_check": list(HealthCheck)}
    settings(max_examples=fixed, derandomize=True, **options)(given(*drawn)(check))()
    chance, begun = random.SystemRandom(), time.monotonic()
    while time.monotonic() - begun < float(os.environ.get(_FRESH, "0")):
        number = chance.randrange(1 << 32)
        print(f"fresh ones of hypothesis.seed({number})")
        some = settings(max_examples=max(fixed // 10, 3), derandomize=False, **options)
        seed(number)(some(given(*drawn)(check)))()


def _whole() -> bool:
    return os.environ.get(_WHOLE, "0") not in ("", "0")
