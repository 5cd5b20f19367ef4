"""``Plan``: the result of ``plan()``, with budgets, checkpoints and a figure."""

from __future__ import annotations

import itertools
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from functools import cache, cached_property
from typing import Any

from torch import nn

from eager_offload.config import size_text
from eager_offload.errors import ConfigError
from eager_offload.observe.advice import change_text
from eager_offload.observe.figure import BUDGET, DEVICE, GAP, MUTED, PLOT, WITHOUT, Curve, Stack, needs_plotly
from eager_offload.observe.report import Tile, time_text
from eager_offload.planning.apply import Checks, Verify, checkpointed
from eager_offload.planning.figures import (
    FixedWay,
    PlanFigures,
    Point,
    about_text,
    seconds_text,
    sentences,
)
from eager_offload.planning.settings import PlanSettings
from eager_offload.planning.simulate import Candidate, Outcome, PolicySearch, StepSimulator
from eager_offload.stats import Relief

#: The stall, as a fraction of the step, that ``relief`` accepts; and the bits of precision of its budget.
_LITTLE, _BITS = 0.05, 6
#: Most searches to fill gaps of a front, and the smallest gap that is filled: 1/8 of its range.
_SEARCHES, _GAPS = 4, 8
#: Most samples of a curve: more than a screen has pixels.
_SAMPLES = 4096
#: Symbols of the fixed ways.
_SYMBOLS = ("square", "diamond", "triangle-up", "triangle-down")


class Plan(PlanFigures, PlanSettings):
    """The saved tensors of a step to offload, and the predicted step; :func:`eager_offload.plan` makes one.

    ``print`` shows whether it fits, its peak and time, and the bytes to offload by kind of module. Peaks and times are
    of a simulation of the library's scheduler on the traced step; the model was not run. ``Offload(plan=plan)`` takes
    its settings for training. Sizes are bytes, times seconds.
    """

    def apply(self, model: nn.Module, verify: Verify = "auto") -> AbstractContextManager[Checks]:
        """Puts ``torch.utils.checkpoint`` around the recomputed modules within a ``with``.

            with plan.apply(model):
                train(model)

        A module whose recompute differs from its forward would get wrong gradients. So fingerprints of its saves are
        compared in its first two steps for each combination of shapes, dtypes and training mode; this waits for the
        device once per module. A difference raises an ``OffloadError`` from ``backward()``, before it reaches a
        gradient. The ``with`` returns counts: compared ``calls``, and ``inexact`` values, whose bits differ while their
        sums nearly agree.

        The checkpoints are non-reentrant, preserve RNG state, and are inside the regions of ``skip`` and ``only``. The
        model's parameters, hooks and ``state_dict`` stay unchanged; copies of it have no checkpoints. Several contexts
        may be open, on any thread.

        Args:
            model: the planned model or one of the same structure, wrapped (e.g. by DDP) or not.
            verify: ``True`` compares in each step, and requires equal bits; ``False`` never compares.

        Raises:
            ConfigError: the model lacks a module of the plan, or ``verify`` is not accepted.
        """
        return checkpointed(model, dict(zip(self.again, self.kept, strict=True)), verify)

    @cached_property
    def relief(self) -> Relief | None:
        """The smallest larger budget, in round numbers, with which compute stalls for at most 1/20 of the step.

        ``None`` if the stall is already that short, if no budget reaches it, or if modules are recomputed.
        """

        def waits(seconds: float) -> float:
            return 1 - self.compute_seconds / max(seconds, self.compute_seconds)

        @cache
        def waits_within(budget: int) -> float:
            return waits(self._candidates.within(budget).step_seconds)

        if self.again or not self.compute_seconds or waits(self.step_seconds) <= _LITTLE:
            return None
        high = self._candidates.nothing.peak_bytes
        unit = 1 << max(high.bit_length() - _BITS, 0)
        budgets = range((self.peak_bytes // unit + 1) * unit, high + unit, unit)
        place = bisect_left(budgets, True, key=lambda budget: waits_within(budget) <= _LITTLE)
        return None if place == len(budgets) else Relief(budgets[place], waits_within(budgets[place]))

    def front(self, points: int = 16) -> list[Point]:
        """Returns the fastest steps for budgets from ``least_budget`` up to the peak without offload, ascending.

        With ``recompute`` they are the best steps that the search for this plan found, plus searches for up to four
        more budgets in large gaps, each in about the time of a plan. A loaded plan does not search.

        Args:
            points: the number of budgets, 2 or more.

        Raises:
            ConfigError: ``points`` is not such a number.
        """
        if type(points) is not int or points < 2:
            raise ConfigError(f"points={points!r} is not accepted: points takes a whole number, 2 or more")
        searches = dict.fromkeys((self._candidates, self._whole_candidates))
        (low, high), found, best = self._range, list[Point](), self.least
        for step in range(points):
            budget = low + (high - low) * step // (points - 1)
            tried = [Point.least_of(candidates.within(budget)) for candidates in searches]
            for point in (*tried, *self._searched):
                if point.peak_bytes <= budget and point.step_seconds < best.step_seconds:
                    best = point
            found.append(best._replace(budget=budget))
        return found

    @property
    def _range(self) -> tuple[int, int]:
        return self.least_budget, max(self._whole_candidates.nothing.peak_bytes, self.least_budget)

    @cached_property
    def _whole_candidates(self) -> PolicySearch:
        return self._candidates if self.whole is None else PolicySearch(self.whole, self.whole_windows)

    def search_with(self, points_within: Callable[[int], Iterable[Point]]) -> None:
        """Sets the function by which :meth:`front` searches for the best steps of another budget."""
        vars(self)["_points_within"] = points_within

    def __getstate__(self) -> dict[str, Any]:
        return {name: one for name, one in vars(self).items() if name != "_points_within"}

    @cached_property
    def _searched(self) -> Sequence[Point]:
        """The best steps for all budgets, after searches in the largest gaps."""
        points, (low, high), tried = self.points, self._range, set[int]()
        while (search := vars(self).get("_points_within")) is not None and len(tried) < _SEARCHES:
            peaks = sorted({low, high, *tried, *(one.peak_bytes for one in points if low < one.peak_bytes < high)})
            begin, end = max(itertools.pairwise(peaks), key=lambda gap: gap[1] - gap[0], default=(low, high))
            if (end - begin) * _GAPS <= high - low:
                break
            tried.add(middle := (begin + end) // 2)
            points = tuple(search(middle))
        return points

    def fixed_ways(self) -> list[FixedWay]:
        """Returns steps of decisions that ignore the budget, for comparison."""
        candidates = self._candidates
        every_second = tuple(number % 2 == 0 for number in range(len(self.problem.program.storages)))
        chosen: dict[str, Candidate | Outcome | Point] = {
            "nothing moves": candidates.nothing,
            "every second storage moves": candidates.of(every_second),
            "all that may moves": candidates.share(1.0),
        }
        if self.checkpointing is not None:
            chosen["checkpointing"] = self.checkpointing
        return [FixedWay(name, one.peak_bytes, one.step_seconds) for name, one in chosen.items()]

    def figure(self) -> Any:
        """Returns a ``plotly.graph_objects.Figure``: live bytes over time, step time by budget, bytes by module.

        It includes ``fixed_ways`` for comparison. The curves of live bytes leave out stalls, to share one time axis.

        Raises:
            OffloadError: plotly is not installed: ``pip install '.[report]'`` in a checkout.
        """
        needs_plotly()
        return _drawn(self, self.front(), self.fixed_ways())

    def __repr__(self) -> str:
        return (
            f"<Plan of {self.model} on {self.machine.name}: {'fits' if self.fits else 'does not fit'}, "
            f"{size_text(self.peak_bytes)}, {about_text(self.machine)}{seconds_text(self.step_seconds)}>"
        )


def _drawn(plan: PlanFigures, front: Sequence[Point], ways: Sequence[FixedWay]) -> Any:
    stack = Stack(f"{plan.model} on {plan.machine.name}", f"{plan.machine} · predicted: nothing was run")
    without, compute, budget = ways[0].peak_bytes, plan.compute_seconds, plan.device_budget
    fits = "of" if plan.fits else "it does not fit:"
    times = f"{plan.step_seconds / (compute or 1):.3f} times {time_text(compute)}, a step without transfers"
    again = f"; {size_text(plan.recomputed_bytes)} are recomputed" if plan.recomputed_bytes else ""
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
    stack.table(["The plan"], [[line] for line in sentences(plan)], [1.0])
    problem, live_bytes = plan.problem, plan.live_bytes
    unmoved = StepSimulator(problem).run((False,) * len(problem.program.storages)).live_bytes
    every = -(-len(live_bytes) // _SAMPLES) or 1
    parts = [slice(first, first + every) for first in range(0, len(live_bytes), every)]
    curves = [
        Curve("without offload", without, WITHOUT, [max(unmoved[part]) for part in parts]),
        Curve("with this plan", plan.peak_bytes, DEVICE, [max(live_bytes[part]) for part in parts]),
    ]
    if budget <= 1.25 * without:  # a larger budget would flatten the curves
        curves.append(Curve("budget", budget, BUDGET, [budget] * len(parts)))
    stack.memory([1e3 * problem.begins[part.start] for part in parts], curves, "bytes that live, without waits")
    _draw_outcomes(stack, plan, front, ways)
    titles, widths = ["Module", "storages", "stay", "move", *(["again"] if plan.again else [])], [4.0, 1, 1, 1, 1]
    rows = [
        [row.kind, f"{row.storages:,}", *map(size_text, (row.kept_bytes, row.moved_bytes, row.recomputed_bytes))]
        for row in plan.rows()
    ]
    stack.table(titles, [row[: len(titles)] for row in rows], widths[: len(titles)])
    return stack.figure()


def _draw_outcomes(stack: Stack, plan: PlanFigures, front: Sequence[Point], ways: Sequence[FixedWay]) -> None:
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
            line={"shape": "hv"},  # a budget between two points gets the step of the smaller one
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
