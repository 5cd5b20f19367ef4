"""What moves: by rules of one number, of which the least is taken that fits, in the best of a few windows.

[Note: the rules]
    even share    so many of the bytes, spread evenly over forward (``budget.even_share``), as steps of eager code have
                  it that train with a budget
    leaky bucket  in a compiled graph too: what a link hides that is faster than it is by some pace. In backward what
                  can be back in time, and of that, in forward, what finds room in the window

Each leads from nothing to everything, and ``replay.py`` says what comes of it; so the number is bisected. The windows
matter more than the rules do: a link is busy for as long as a window holds work for it, and a window takes memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache, cached_property, partial
from typing import NamedTuple, TypeAlias

from eager_offload.budget import even_share
from eager_offload.planning.problem import Moves, Problem
from eager_offload.planning.replay import Late, Outcome, Replay

#: Bytes of the windows that a plan chooses among, beside the automatic one.
WINDOWS = tuple(mebibytes << 20 for mebibytes in (272, 528, 1040, 2064))
#: How often the number of a rule is halved.
_HALVINGS = 8
#: The numbers that are tried for the least peak.
_EIGHTHS = tuple(eighth / 8 for eighth in range(9))
#: So many steps learn from each other what is late, until that is the same.
_STEPS = 3
#: Of a step without waits: a wait that counts as none.
_HIDDEN = 0.005

#: Says for a number from 0 to 1 what moves, and what comes of it.
Rule: TypeAlias = Callable[[float], Outcome]


class Chosen(NamedTuple):
    """A decision, the step with the windows that it was made for, and what comes of it."""

    problem: Problem
    outcome: Outcome
    number: float
    """That of the rule; of an even share, the part of the bytes that moves."""

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
        #: What comes of each rule, by its number and with the windows.
        self._rules: list[tuple[Rule, Problem]] = []
        for one in problems:
            self._rules.append((cache(partial(_even_share, Replay(one))), one))
            if problem.ordered:
                self._rules.append((cache(partial(_leaky_bucket, Replay(one))), one))

    def within(self, budget: int) -> Chosen:
        """Returns the fastest decision whose peak is at most ``budget``, of those alike the one that moves least.

        Where there is none, that of the least peak.
        """
        found = [one for rule in self._rules for one in self._tried(rule, lambda one: one.peak_bytes > budget)]
        fitting = [one for one in (self.least, *found) if one.peak_bytes <= budget]
        return min(fitting, key=lambda one: (one.step_seconds, one.outcome.moved_bytes), default=self.least)

    def hidden(self, limit: float = 0.0) -> Chosen:
        """Returns the decision that moves most of those in which a step is longer by at most that part of it."""
        most = (1 + max(limit, _HIDDEN)) * self.nothing.step_seconds
        found = [one for rule in self._rules for one in self._tried(rule, lambda one: one.step_seconds <= most)]
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
        found = [self._at(x, rule) for rule in self._rules for x in _EIGHTHS]
        return min(found, key=lambda one: (one.peak_bytes, one.step_seconds))

    def share(self, fraction: float) -> Chosen:
        """Returns what comes of moving that part of the bytes, spread evenly, in the first windows."""
        return self._at(fraction, self._rules[0])

    def of(self, moves: Moves) -> Outcome:
        """Returns what comes of moving those, in the first windows."""
        return Replay(self._rules[0][1]).run(moves)

    def _at(self, number: float, by: tuple[Rule, Problem]) -> Chosen:
        """Returns what a rule comes to with that number."""
        rule, problem = by
        return Chosen(problem, rule(number), number)

    def _tried(self, by: tuple[Rule, Problem], is_more: Callable[[Chosen], bool]) -> Iterator[Chosen]:
        """Yields what comes of the numbers that a bisection tries; ``is_more``: whether a larger one is looked for."""
        low, high = self._at(0.0, by), self._at(1.0, by)
        yield low
        yield high
        if not is_more(low) or is_more(high):
            return
        begin, end = 0.0, 1.0
        for _ in range(_HALVINGS):
            middle = (begin + end) / 2
            yield (found := self._at(middle, by))
            begin, end = (middle, end) if is_more(found) else (begin, middle)


def _even_share(replay: Replay, fraction: float) -> Outcome:
    """Returns what comes of an even share, once steps have learnt what is late. See [Note: the rules]."""
    nbytes = [one.moved_bytes for one in replay.problem.program.storages]
    late: Late = (False,) * len(nbytes)
    for _ in range(_STEPS):
        moves = even_share(nbytes, late, fraction)
        before, (outcome, late) = late, replay.learn(tuple(moves))
        if late == before:
            break
    return outcome


def _leaky_bucket(replay: Replay, x: float) -> Outcome:
    """Returns what comes of moving what a link hides that is faster by ``x / (1 - x)``. See [Note: the rules]."""
    problem = replay.problem
    storages, begins = problem.program.storages, problem.begins
    if x == 1.0:
        return replay.run((True,) * len(storages))
    pace = x / (1 - x) or math.ulp(0.0)
    free, in_time = problem.forward_seconds, set[int]()
    for number in problem.by_ask:
        arrives = free + storages[number].moved_bytes / (problem.back * pace)
        if arrives <= begins[storages[number].asked]:
            free = arrives
            in_time.add(number)
    moves, level, now = [False] * len(storages), 0.0, 0.0
    for number, one in enumerate(storages):
        level, now = max(level - (begins[one.saved] - now) * problem.out * pace, 0.0), begins[one.saved]
        if number in in_time and (level + one.moved_bytes <= problem.window or not level):
            moves[number] = True
            level += one.moved_bytes
    return replay.run(tuple(moves))
