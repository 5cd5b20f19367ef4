"""What moves: the part of the bytes, by the rule by pace (``budget.share``), and the windows that serve best.

``replay.py`` says what comes of a part, so the part is bisected. The windows matter more than which storages make it
up: a link is busy for as long as a window holds work for it, and a window takes memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache, cached_property, partial
from typing import NamedTuple, TypeAlias

from eager_offload.core.budget import share
from eager_offload.planning.program import Moves, Problem
from eager_offload.planning.replay import Outcome, Replay

#: Bytes of the windows that a plan chooses among, beside the automatic one.
WINDOWS = tuple(mebibytes << 20 for mebibytes in (272, 528, 1040, 2064))
#: How often the part that moves is halved.
_HALVINGS = 8
#: The parts that are tried for the least peak.
_EIGHTHS = tuple(eighth / 8 for eighth in range(9))
#: Of a step without waits: a wait that counts as none.
_HIDDEN = 0.005


class Chosen(NamedTuple):
    """A decision, the step with the windows that it was made for, and what comes of it."""

    problem: Problem
    outcome: Outcome
    fraction: float
    """The part of the bytes that moves."""

    @property
    def peak_bytes(self) -> int:
        """Bytes that live at one time, at most."""
        return self.outcome.peak_bytes

    @property
    def step_seconds(self) -> float:
        """Of forward and backward."""
        return self.outcome.step_seconds


class Chooser:
    """Decides for one step in several windows; what was replayed once is known.

    Args:
        problem: with the windows to take, where there are no others.
        windows: to choose among, for both directions.
    """

    def __init__(self, problem: Problem, windows: Sequence[int] = ()) -> None:
        self.problem, self.windows = problem, tuple(windows)
        problems = [replace(problem, window=window, ahead=window) for window in windows] or [problem]
        #: What comes of moving a part of the bytes, with each of the windows.
        self._parts: list[_Parts] = [(cache(partial(_part, Replay(one))), one) for one in problems]

    def within(self, budget: int) -> Chosen:
        """Returns the fastest decision whose peak is at most ``budget``, of those alike the one that moves least.

        Where there is none, that of the least peak.
        """
        found = [one for parts in self._parts for one in self._tried(parts, lambda one: one.peak_bytes > budget)]
        fitting = [one for one in (self.least, *found) if one.peak_bytes <= budget]
        return min(fitting, key=lambda one: (one.step_seconds, one.outcome.moved_bytes), default=self.least)

    def hidden(self) -> Chosen:
        """Returns the decision that moves most of those that the link hides."""
        most = (1 + _HIDDEN) * self.nothing.step_seconds
        found = [one for parts in self._parts for one in self._tried(parts, lambda one: one.step_seconds <= most)]
        hidden = (one for one in (self.nothing, *found) if one.step_seconds <= most)
        return max(hidden, key=lambda one: (one.outcome.moved_bytes, -one.step_seconds))

    @property
    def nothing(self) -> Chosen:
        """Nothing moves, but for what does in any case."""
        return self.share(0.0)

    @property
    def everything(self) -> Chosen:
        """All moves that may."""
        return self.share(1.0)

    @cached_property
    def least(self) -> Chosen:
        """That of the least peak."""
        found = [self._at(eighth, parts) for parts in self._parts for eighth in _EIGHTHS]
        return min(found, key=lambda one: (one.peak_bytes, one.step_seconds))

    def share(self, fraction: float) -> Chosen:
        """Returns what comes of moving that part of the bytes, in the first windows."""
        return self._at(fraction, self._parts[0])

    def of(self, moves: Moves) -> Outcome:
        """Returns what comes of moving those, in the first windows."""
        return Replay(self._parts[0][1]).run(moves)

    def _at(self, fraction: float, parts: _Parts) -> Chosen:
        outcome_of, problem = parts
        return Chosen(problem, outcome_of(fraction), fraction)

    def _tried(self, parts: _Parts, is_more: Callable[[Chosen], bool]) -> Iterator[Chosen]:
        """Yields what comes of the parts that a bisection tries; ``is_more``: whether a larger one is looked for."""
        low, high = self._at(0.0, parts), self._at(1.0, parts)
        yield low
        yield high
        if not is_more(low) or is_more(high):
            return
        begin, end = 0.0, 1.0
        for _ in range(_HALVINGS):
            middle = (begin + end) / 2
            yield (found := self._at(middle, parts))
            begin, end = (middle, end) if is_more(found) else (begin, middle)


#: Says what comes of moving a part of the bytes, and with which windows.
_Parts: TypeAlias = tuple[Callable[[float], Outcome], Problem]


def _part(replay: Replay, fraction: float) -> Outcome:
    return replay.run(tuple(share(replay.problem.timeline, fraction)))
