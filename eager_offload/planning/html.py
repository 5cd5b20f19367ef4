"""The page of a plan: what lives when, what other budgets buy, and what moves of each kind of module."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from eager_offload.config import size_text
from eager_offload.observe.report.page import fill, sized
from eager_offload.planning.figures import PlanFigures

#: Samples of a curve at most: more than a screen has pixels.
_SAMPLES = 4096
#: Steps between the numbers of an axis, at most.
_TICKS = 6


class _Tick(NamedTuple):
    """A number at an axis, and where it stands, in percent."""

    place: float
    text: str


def _axis(
    numbers: Sequence[float], text: Callable[[float], str], base: float
) -> tuple[Callable[[float], float], list[_Tick]]:
    """An axis from below the least to above the most of ``numbers``: where a number stands, and its ticks."""
    least, most = min(numbers), max(numbers)
    margin = (most - least or most or 1.0) / 10
    low, high = max(least - margin, 0.0), most + margin
    step = _step((high - low) / _TICKS, base)

    def place(number: float) -> float:
        return round(100 * (number - low) / (high - low), 2)

    shown = (number * step for number in range(math.ceil(low / step), math.floor(high / step) + 1))
    return place, [_Tick(place(number), text(number)) for number in shown]


def _step(least: float, base: float) -> float:
    """The first of 1, 2, 5, 10 times a power of ``base`` (1, 2, 4, ... where that is 2) that is no less than that."""
    power = base ** math.floor(math.log(least, base))
    return next(factor * power for factor in ((1, 2, 4) if base == 2 else (1, 2, 5, 10)) if factor * power >= least)


def page(plan: PlanFigures, points: Sequence[Any], ways: Sequence[Any]) -> str:
    """One HTML page that needs nothing else: no network, no other file.

    Args:
        points: the best plans for other budgets, see ``Plan.front``.
        ways: what to compare them with, see ``Plan.fixed_ways``.
    """
    # Of budgets that buy the same, the least.
    found = {(one.peak_bytes, one.step_seconds): one for one in reversed(points)}
    front = list(reversed(found.values()))
    peaks = [one.peak_bytes for one in (*front, *ways, plan)]
    seconds = [one.step_seconds for one in (*front, *ways, plan)]
    across, ticks_across = _axis(peaks, lambda nbytes: size_text(round(nbytes)), 2)
    without = plan.compute_seconds or 1.0
    up, ticks_up = _axis([one / without for one in seconds], lambda times: f"{times:.4g} x", 10)

    def place(one: Any) -> tuple[float, float]:
        return across(one.peak_bytes), up(one.step_seconds / without)

    return fill(
        "plan.html",
        plan=plan,
        front=front,
        ways=ways,
        rows=plan.rows(),
        line=" ".join(f"{x},{100 - y:.2f}" for x, y in sorted({place(point) for point in front})),
        marks=[place(one) for one in ways],
        chosen=place(plan),
        across=ticks_across,
        up=ticks_up,
        data=_data(plan),
    )


def _data(plan: PlanFigures) -> dict[str, Any]:
    """What lives at each operator, with what was decided and where nothing moves; times are microseconds."""
    problem, living = plan.problem, plan.course.living
    without = problem.course((False,) * len(problem.program.storages)).living
    begins = [round(seconds * 1e6, 1) for seconds in problem.begins]
    every = -(-len(living) // _SAMPLES) or 1
    memory = [
        [begins[first], max(living[first : first + every]), 0, 0, max(without[first : first + every])]
        for first in range(0, len(living), every)
    ]
    return {"end": begins[-1], "tracks": [], "memory": memory, "texts": [], **sized(memory, plan.device_budget)}
