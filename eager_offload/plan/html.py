"""The page of a plan: what lives when, what other budgets buy, and what moves of each kind of module; see ``html``."""

from __future__ import annotations

from itertools import accumulate
from typing import TYPE_CHECKING, Any, NamedTuple

from eager_offload.observe.report.page import render_page
from eager_offload.plan.predict import Moves, Prediction

if TYPE_CHECKING:
    from eager_offload.plan.plan import Plan

__all__ = ["Way", "html", "ways"]

#: Points of the front that is drawn.
_POINTS = 16
#: Samples of a curve at most: more than a screen has pixels.
_SAMPLES = 4096


class Way(NamedTuple):
    """What comes of a decision that looks at no budget, to compare with."""

    name: str
    peak_bytes: int
    step_seconds: float


def ways(plan: Plan) -> list[Way]:
    """Nothing moves, every second storage does, and all do."""
    count = len(plan.moves)
    decisions: dict[str, Moves] = {
        "nothing moves": (False,) * count,
        "every second one moves": tuple(number % 2 == 0 for number in range(count)),
        "all move": (True,) * count,
    }
    found = {name: plan.problem.predict(moves) for name, moves in decisions.items()}
    return [Way(name, one.peak_bytes, one.step_seconds) for name, one in found.items()]


def html(plan: Plan) -> str:
    """One HTML page that needs nothing else: no network, no other file."""
    front = plan.front(_POINTS)
    compared = ways(plan)
    return render_page(
        "plan.html",
        plan=plan,
        front=front,
        ways=compared,
        rows=plan.rows(),
        data=_data(plan, compared),
        scatter={
            "front": [[point.peak_bytes, point.step_seconds] for point in front],
            "chosen": [plan.peak_bytes, plan.step_seconds],
            "ways": [[one.name, one.peak_bytes, one.step_seconds] for one in compared],
            "compute": plan.compute_seconds,
        },
    )


def _data(plan: Plan, compared: list[Way]) -> dict[str, Any]:
    """What lives at each operator, with what was decided and where nothing moves; times are microseconds."""
    problem, nothing = plan.problem, (False,) * len(plan.moves)
    decided, without = problem.living(plan.moves), problem.living(nothing)
    stretch = plan.step_seconds / (plan.compute_seconds or 1.0)
    begins = [round(seconds * 1e6, 1) for seconds in problem.begins]
    every = max(len(decided) // _SAMPLES, 1)
    memory = [
        [begins[first], max(decided[first : first + every]), 0, 0, max(without[first : first + every])]
        for first in range(0, len(decided), every)
    ]
    return {"end": begins[-1], "tracks": [], "memory": memory, "texts": [], "budget": plan.device_budget}
