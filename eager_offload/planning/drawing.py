"""The figure of a plan: what lives when, what other budgets buy, and what moves of each kind of module."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from eager_offload.config import size_text
from eager_offload.observe.advice import change_text
from eager_offload.observe.figure import BUDGET, DEVICE, GAP, MUTED, PLOT, WITHOUT, Curve, Stack
from eager_offload.observe.report import Tile, time_text
from eager_offload.planning.figures import FixedWay, PlanFigures, about_text, sentences
from eager_offload.planning.files import Point
from eager_offload.planning.replay import Replay

#: Samples of a curve at most: more than a screen has pixels.
_SAMPLES = 4096
#: Of what plans are compared with.
_SYMBOLS = ("square", "diamond", "triangle-up")


def drawn(plan: PlanFigures, front: Sequence[Point], ways: Sequence[FixedWay]) -> Any:
    """Returns the figure of ``plan``.

    Args:
        front: the best plans for other budgets.
        ways: decisions that look at no budget, the first of which moves nothing.
    """
    stack = Stack(f"{plan.model} on {plan.machine.name}", f"{plan.machine} · predicted: nothing was run")
    without, compute, budget = ways[0].peak_bytes, plan.compute_seconds, plan.device_budget
    fits = "of" if plan.fits else "it does not fit:"
    times = f"{plan.step_seconds / (compute or 1):.3f} times {time_text(compute)}, a step without transfers"
    again = f"; {size_text(plan.recomputed_bytes)} are computed again" if plan.recomputed_bytes else ""
    change = change_text(without, plan.peak_bytes)
    stack.tiles(
        [
            Tile("Peak on the device", size_text(plan.peak_bytes), f"{fits} {size_text(budget)} that may be taken"),
            Tile("Without offload", size_text(without), f"{change} with this plan"),
            Tile("Step", about_text(plan.machine) + time_text(plan.step_seconds), times),
            Tile("Moves", size_text(plan.moved_bytes), f"and {size_text(plan.kept_bytes)} that could, stay{again}"),
            Tile("Least budget", size_text(plan.least_budget), "that a plan fits"),
        ]
    )
    stack.table(["What the plan says"], [[line] for line in sentences(plan)], [1.0])
    _draw_memory(stack, plan, without)
    _draw_outcomes(stack, plan, front, ways)
    titles, widths = ["Module", "storages", "stay", "move", *(["again"] if plan.again else [])], [4.0, 1, 1, 1, 1]
    rows = [
        [row.kind, f"{row.storages:,}", *map(size_text, (row.kept_bytes, row.moved_bytes, row.recomputed_bytes))]
        for row in plan.rows()
    ]
    stack.table(titles, [row[: len(titles)] for row in rows], widths[: len(titles)])
    return stack.figure()


def _draw_memory(stack: Stack, plan: PlanFigures, most: int) -> None:
    """What lives at each operator, with what was decided and where nothing moves."""
    problem, living = plan.problem, plan.living
    without = Replay(problem).run((False,) * len(problem.program.storages)).living
    every = -(-len(living) // _SAMPLES) or 1
    parts = [slice(first, first + every) for first in range(0, len(living), every)]
    times = [1e3 * problem.begins[part.start] for part in parts]
    curves = [
        Curve("without offload", most, WITHOUT, [max(without[part]) for part in parts]),
        Curve("with this plan", plan.peak_bytes, DEVICE, [max(living[part]) for part in parts]),
    ]
    if plan.device_budget <= 1.25 * most:  # else it would leave the curves flat
        curves.append(Curve("budget", plan.device_budget, BUDGET, [plan.device_budget] * len(parts)))
    stack.memory(times, curves, "bytes that live, without waits")


def _draw_outcomes(stack: Stack, plan: PlanFigures, front: Sequence[Point], ways: Sequence[FixedWay]) -> None:
    """Draws the time of a step, in times one without transfers, over the budget: of the best plans, this one and fixed
    ways."""
    compute = plan.compute_seconds or 1.0
    x, y = stack.axis(PLOT, 2 * GAP)
    drawn = [("best plans", [*front], "lines+markers", DEVICE, "circle")]
    for one, symbol in zip(ways, itertools.cycle(_SYMBOLS), strict=False):
        drawn.append((one.name, [Point(one.peak_bytes, *one[1:])], "markers", MUTED, symbol))
    this = Point(plan.peak_bytes, plan.peak_bytes, plan.step_seconds)
    drawn.append(("this plan", [this], "markers", BUDGET, "star"))
    for name, points, mode, colour, symbol in drawn:
        stack.drawing.add_scatter(
            xaxis=x,
            yaxis=y,
            mode=mode,
            name=name,
            legend="legend2",
            line={"shape": "hv"},  # a budget between two buys what the smaller one does
            x=[one.budget for one in points],
            y=[one.step_seconds / compute for one in points],
            marker={"color": colour, "symbol": symbol, "size": 14 if symbol == "star" else 8},
            customdata=[f"{size_text(one.peak_bytes)}, {time_text(one.step_seconds)}" for one in points],
            hovertemplate=f"{name}: %{{customdata}}<extra></extra>",
        )
    reached = [one.budget for _, points, *_ in drawn for one in points]
    stack.bytes_at(x, max(reached), int(0.9 * min(reached)))
    stack.legends["legend2"] = y
    stack.layout(y, title={"text": "times a step without transfers", "font": {"size": 11}})
    stack.layout(x, title={"text": "budget of the device", "standoff": 4}, anchor=y)
