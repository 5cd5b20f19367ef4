"""``Plan``: what is known of a step before it runs, and the figure of it."""

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
from eager_offload.planning.simulate import PolicySearch, StepSimulator
from eager_offload.stats import Relief

#: A part of a step that compute may wait without being worth a word, and to how many bits a budget for that is found.
_LITTLE, _BITS = 0.05, 6
#: A front is searched for so many budgets, where one part in so many of it is empty.
_SEARCHES, _GAPS = 4, 8
#: Samples of a curve at most: more than a screen has pixels.
_SAMPLES = 4096
#: Of what plans are compared with.
_SYMBOLS = ("square", "diamond", "triangle-up", "triangle-down")


class Plan(PlanFigures, PlanSettings):
    """What a step of a model is to move on a device, and what comes of it; :func:`eager_offload.plan` makes one.

    ``print`` shows it: whether it fits, its peak, its time, and what is moved of each kind of module. The model was not
    run: its step was traced, and the schedule of the library was replayed with it, which these peaks and times are of.
    ``Offload(plan=plan)`` takes its settings for training. Sizes are bytes, times seconds.
    """

    def apply(self, model: nn.Module, verify: Verify = "auto") -> AbstractContextManager[Checks]:
        """Puts ``torch.utils.checkpoint`` around the modules that are computed again, and takes it off afterwards.

            with plan.apply(model):
                train(model)

        A module that does another thing the second time would have wrong gradients. So in its first two steps of a kind
        (of shapes and types, in training or not) fingerprints of what it saves are compared, which waits for the device
        once a module. Another value is an ``OffloadError`` out of ``backward()``, before a gradient is computed of it.
        The ``with`` counts: ``calls`` that were compared, and ``inexact`` values: other bits, nearly the same sums.

        The checkpoints are not reentrant and keep the state of random numbers; they stand inside of the regions of
        ``skip`` and ``only``. Parameters, hooks and ``state_dict`` of the model stay as they are, and its copies have
        no checkpoints. Several may be in force, in any thread. Where nothing is to be computed again it does nothing.

        Args:
            model: the one that was planned, or one like it, wrapped or not.
            verify: ``True`` compares in each step, and has each bit the same; ``False`` compares in none.

        Raises:
            ConfigError: a module is not there, or ``verify`` is another thing.
        """
        return checkpointed(model, dict(zip(self.again, self.kept, strict=True)), verify)

    @cached_property
    def relief(self) -> Relief | None:
        """The least larger budget, in round numbers, with which compute waits for less than a twentieth of the step.

        ``None`` where it waits no longer than that now, where no larger budget changes that, and where modules are
        computed again.
        """

        def waits(seconds: float) -> float:
            return 1 - self.compute_seconds / max(seconds, self.compute_seconds)

        @cache
        def waits_within(budget: int) -> float:
            return waits(self._chooser.within(budget).step_seconds)

        if self.again or not self.compute_seconds or waits(self.step_seconds) <= _LITTLE:
            return None
        high = self._chooser.nothing.peak_bytes
        unit = 1 << max(high.bit_length() - _BITS, 0)
        budgets = range((self.peak_bytes // unit + 1) * unit, high + unit, unit)
        place = bisect_left(budgets, True, key=lambda budget: waits_within(budget) <= _LITTLE)
        return None if place == len(budgets) else Relief(budgets[place], waits_within(budgets[place]))

    def front(self, points: int = 16) -> list[Point]:
        """Returns the best plans for budgets from ``least_budget`` to where nothing has to move, in that order.

        With ``recompute`` they are the best that was found on the way to this plan, and by a search for a few budgets
        more where it left gaps, in about the time of a plan each. A plan that was loaded searches no more.

        Args:
            points: how many, 2 or more.

        Raises:
            ConfigError: there are fewer.
        """
        if type(points) is not int or points < 2:
            raise ConfigError(f"points={points!r} is not accepted: points takes a whole number, 2 or more")
        choosers = dict.fromkeys((self._chooser, self._whole_chooser))
        (low, high), found, best = self._range, list[Point](), self.least
        for step in range(points):
            budget = low + (high - low) * step // (points - 1)
            tried = [Point.least_of(chooser.within(budget)) for chooser in choosers]
            for point in (*tried, *self._searched):
                if point.peak_bytes <= budget and point.step_seconds < best.step_seconds:
                    best = point
            found.append(best._replace(budget=budget))
        return found

    @property
    def _range(self) -> tuple[int, int]:
        return self.least_budget, max(self._whole_chooser.nothing.peak_bytes, self.least_budget)

    @cached_property
    def _whole_chooser(self) -> PolicySearch:
        return self._chooser if self.whole is None else PolicySearch(self.whole, self.whole_windows)

    def search_with(self, points_within: Callable[[int], Iterable[Point]]) -> None:
        """Takes what searches for the best step of another budget, for :meth:`front`."""
        vars(self)["_points_within"] = points_within

    def __getstate__(self) -> dict[str, Any]:
        return {name: one for name, one in vars(self).items() if name != "_points_within"}

    @cached_property
    def _searched(self) -> Sequence[Point]:
        """The best that was found for all budgets, after a search in the largest gaps."""
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
        """Returns decisions that look at no budget, to compare with."""
        chooser = self._chooser
        every_second = tuple(number % 2 == 0 for number in range(len(self.problem.program.storages)))
        chosen = {
            "nothing moves": chooser.nothing.outcome,
            "every second storage moves": chooser.of(every_second),
            "all that may moves": chooser.share(1.0).outcome,
        }
        ways = [FixedWay(name, one.peak_bytes, one.step_seconds) for name, one in chosen.items()]
        if self.checkpointing is not None:
            ways.append(FixedWay("checkpointing", self.checkpointing.peak_bytes, self.checkpointing.step_seconds))
        return ways

    # -- for a reader -------------------------------------------------------------------------------------------------

    def figure(self) -> Any:
        """Returns the plan as a ``plotly.graph_objects.Figure``: what lives when, what other budgets buy, what moves.

        Fixed ways are drawn to compare with. In the curves waits are left out, so that both have the time of compute.

        Raises:
            OffloadError: plotly is not installed: ``pip install 'eager_offload[report]'``.
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
    problem, live_bytes = plan.problem, plan.live_bytes
    unmoved = StepSimulator(problem).run((False,) * len(problem.program.storages)).live_bytes
    every = -(-len(live_bytes) // _SAMPLES) or 1
    parts = [slice(first, first + every) for first in range(0, len(live_bytes), every)]
    curves = [
        Curve("without offload", without, WITHOUT, [max(unmoved[part]) for part in parts]),
        Curve("with this plan", plan.peak_bytes, DEVICE, [max(live_bytes[part]) for part in parts]),
    ]
    if budget <= 1.25 * without:  # else it would leave the curves flat
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
