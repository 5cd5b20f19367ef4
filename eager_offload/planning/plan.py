"""``Plan``: what is known of a step before it runs."""

from __future__ import annotations

import os
from bisect import bisect_left
from contextlib import AbstractContextManager
from functools import cache, cached_property
from typing import Any

from torch import nn

from eager_offload.config import size_text
from eager_offload.errors import ConfigError
from eager_offload.planning.apply import Checks, Verify, checkpointed
from eager_offload.planning.choose import Chooser
from eager_offload.planning.figures import FixedWay, PlanFigures, about_text, seconds_text
from eager_offload.planning.files import Point, read, write
from eager_offload.planning.settings import PlanSettings
from eager_offload.stats import Relief

#: A part of a step that compute may wait without being worth a word, and to how many bits a budget for that is found.
_LITTLE, _BITS = 0.05, 6


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

        The checkpoints are not reentrant and keep the state of random numbers. Parameters, hooks and ``state_dict`` of
        the model stay as they are, and its copies have no checkpoints. May be entered in several threads, and more
        than once. Where nothing is to be computed again it does nothing.

        Args:
            model: the one that was planned, or one like it, wrapped or not.
            verify: ``True`` compares in each step, and has each bit the same; ``False`` compares in none.

        Raises:
            ConfigError: a module is not there, or ``verify`` is another thing.
        """
        return checkpointed(model, self.again, verify)

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

        Where this plan has something computed again, they are those in which the same is, or nothing.

        Args:
            points: how many, 2 or more.

        Raises:
            ConfigError: there are fewer.
        """
        if type(points) is not int or points < 2:
            raise ConfigError(f"points={points!r} is not accepted: points takes a whole number, 2 or more")
        choosers = [self._chooser, *([] if self.whole is None else [Chooser(self.whole, self.whole_windows)])]
        low, high = self.least_budget, max(choosers[-1].nothing.peak_bytes, self.least_budget)
        found, best = list[Point](), self.least
        for step in range(points):
            budget = low + (high - low) * step // (points - 1)
            for chosen in (chooser.within(budget) for chooser in choosers):
                if chosen.peak_bytes <= budget and chosen.step_seconds < best.step_seconds:
                    best = Point.least_of(chosen)
            found.append(best._replace(budget=budget))
        return found

    def fixed_ways(self) -> list[FixedWay]:
        """Returns decisions that look at no budget, to compare with."""
        chooser = self._chooser
        every_second = tuple(number % 2 == 0 for number in range(len(self.problem.program.storages)))
        chosen = {
            "nothing moves": chooser.nothing.outcome,
            "every second storage moves": chooser.of(every_second),
            "all that may moves": chooser.everything.outcome,
        }
        return [FixedWay(name, one.peak_bytes, one.step_seconds) for name, one in chosen.items()]

    # -- for a reader -------------------------------------------------------------------------------------------------

    def figure(self) -> Any:
        """The plan as a ``plotly.graph_objects.Figure``: what lives when, what other budgets buy, what moves.

        A notebook shows it, and its ``write_html`` writes a page. Fixed ways are drawn to compare with: nothing moves,
        every second storage does, all that may does. In the curves waits are left out, so that both have the time of
        compute.

        Raises:
            OffloadError: plotly is not installed: ``pip install 'eager_offload[report]'``.
        """
        from eager_offload.observe.figure import needs_plotly  # plotly is not needed for a plan
        from eager_offload.planning.drawing import drawn

        needs_plotly()
        return drawn(self, self.front(), self.fixed_ways())

    def __repr__(self) -> str:
        return (
            f"<Plan of {self.model} on {self.machine.name}: {'fits' if self.fits else 'does not fit'}, "
            f"{size_text(self.peak_bytes)}, {about_text(self.machine)}{seconds_text(self.step_seconds)}>"
        )

    # -- files --------------------------------------------------------------------------------------------------------

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the plan to ``path``, as JSON; a file that is there is replaced."""
        write(self, path)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Plan:
        """Returns the plan that ``save`` wrote to ``path``.

        Raises:
            ConfigError: the file holds no such plan, or one of another version, or it was changed.
            FileNotFoundError: there is no file.
        """
        return read(cls, path)
