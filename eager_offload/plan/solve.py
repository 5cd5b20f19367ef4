"""Which storages are to move: the least movement that fits a budget, or only what the link hides.

[Note: the search]
What a decision costs is told exactly, by ``predict``, and in a millisecond or so; so the question is which ones to ask of.
A step waits where storages leave or come back faster than the link carries them. A decision that lets the link carry what
it can, all of the time, moves most without waiting: walking through forward, a storage moves if those before it leave room
in the window, and through backward, if it can be back in time (``_paced``). If the link were faster by some factor, more
would move: by that one number decisions go from what the link hides to everything. Of those that fit the budget the best
ones are made better: what fits beside is kept, the newest first, which backward asks for before it could have been away,
and then storages are exchanged, singly and in pairs, from there and from decisions a few storages beside it. Ties go to the decision that moves less.
"""

from __future__ import annotations

import math
import random
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from functools import cached_property
from itertools import combinations
from typing import NamedTuple

from eager_offload.plan.predict import Moves, Prediction, Problem

__all__ = ["Decision", "Solver"]

#: By how much faster than it is the link is taken to be.
_PACES = (0.5, 0.7, 0.8, 0.9, 0.95, 1.0, 1.05, 1.1, 1.2, 1.35, 1.5, 1.75, 2.0, 2.5, 3.0, 4.0, 6.0, 10.0, 20.0)
#: The same for the way back, where 0 is as for the way out; and how closely a pace is searched for.
_BACK = (0.0, 1.0, 20.0)
_BISECTIONS = 14
#: Single storages that are tried in vain before no more are kept.
_TRIES = 16
#: Predictions that one search may ask for, times the storages there are, and the least for a search among many.
_WORK, _LEAST_WORK = 60_000, 120
#: With how many of the decisions that are best to begin with a search begins.
_STARTS = 6
#: How often a search goes on from beside the best that it has found.
_KICKS = 200
#: Of a step's time, what is no difference.
_EQUAL = 1e-9


class Decision(NamedTuple):
    """Which storages move, and what comes of it."""

    moves: Moves
    prediction: Prediction


class _Cost(NamedTuple):
    """What makes one decision better than another: less of the first, then of the next."""

    over_bytes: int
    seconds: float
    moved_bytes: int


class Solver:
    """Searches among the decisions for one problem. What it has asked of once it knows for every budget."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self._count = len(problem.program.storages)
        self._known: dict[Moves, Prediction] = {}
        self._asked = 0

    # -- what a user asks for -----------------------------------------------------------------------------------------

    def within(self, budget: int) -> Decision:
        """The fastest decision whose peak is at most ``budget``, and of those alike the one that moves least; where none
        is known, the one of the least peak."""

        def cost(decision: Decision) -> _Cost:
            found = decision.prediction
            # Times that differ by less than that are the same time.
            seconds = round(found.step_seconds / (self.problem.compute_seconds * _EQUAL or 1.0))
            return _Cost(max(found.peak_bytes - budget, 0), seconds, found.moved_bytes)

        if budget < self.least.prediction.peak_bytes:
            return self.least
        fitting = [one for one in self._candidates if one.prediction.peak_bytes <= budget]
        fitting += [one for back in _BACK if (one := self._slowest(budget, back)) is not None]
        starts = {self._filled(start, cost) for start in [*sorted(fitting, key=cost)[:_STARTS], self.least]}
        return self._best_of(starts, cost)

    def free(self) -> Decision:
        """The decision that moves most of those in which compute never waits."""

        def cost(decision: Decision) -> _Cost:
            found = decision.prediction
            waits = found.step_seconds > self.problem.compute_seconds * (1 + _EQUAL)
            return _Cost(int(waits), 0.0, -found.moved_bytes)

        return self._best_of(sorted(self._candidates, key=cost)[:_STARTS], cost)

    def all(self) -> Decision:
        """Everything moves that may."""
        return self._decision((True,) * self._count)

    @cached_property
    def least(self) -> Decision:
        """The decision of the least peak that is known: nearly always that in which everything moves."""

        def cost(decision: Decision) -> _Cost:
            found = decision.prediction
            return _Cost(found.peak_bytes, found.step_seconds, found.moved_bytes)

        return self._best_of(sorted(self._candidates, key=cost)[:_STARTS], cost)

    # -- the search ---------------------------------------------------------------------------------------------------

    def _decision(self, moves: Moves) -> Decision:
        found = self._known.get(moves)
        if found is None:
            self._asked += 1
            found = self._known[moves] = self.problem.predict(moves)
        return Decision(moves, found)

    @cached_property
    def _candidates(self) -> list[Decision]:
        """Decisions to begin with: nothing, everything, and those of a link of every pace."""
        nothing = (False,) * self._count
        found = {nothing: self._decision(nothing), (True,) * self._count: self.all()}
        for out in _PACES:
            for back in _BACK:
                moves = self._paced(out, back or out)
                found[moves] = self._decision(moves)
        return list(found.values())

    def _slowest(self, budget: int, back: float) -> Decision | None:
        """What a link of about the least pace has moving that makes it fit ``budget``; ``None`` where none does."""
        low, high = _PACES[0], _PACES[-1]
        found: Decision | None = None
        for _ in range(_BISECTIONS):
            pace = math.sqrt(low * high)
            decision = self._decision(self._paced(pace, back or pace))
            if decision.prediction.peak_bytes <= budget:
                found, high = decision, pace
            else:
                low = pace
        return found

    def _paced(self, out: float, back: float) -> Moves:
        """What moves where the link is faster by these factors and compute never waits for it."""
        problem, storages = self.problem, self.problem.program.storages
        in_time: set[int] = set()
        free = problem.forward_seconds
        for number in problem.by_ask:
            arrives = free + storages[number].moved_bytes / (problem.back * back)
            if arrives <= problem.begins[storages[number].asked]:
                in_time.add(number)
                free = arrives
        moves = [False] * self._count
        free, leaving, leaving_bytes = 0.0, deque[tuple[float, int]](), 0
        for number in problem.by_save:
            now, nbytes = problem.begins[storages[number].saved], storages[number].moved_bytes
            while leaving and leaving[0][0] <= now:
                leaving_bytes -= leaving.popleft()[1]
            if number in in_time and (leaving_bytes + nbytes <= problem.window or not leaving):
                moves[number] = True
                free = max(free, now) + nbytes / (problem.out * out)
                leaving.append((free, nbytes))
                leaving_bytes += nbytes
        return tuple(moves)

    def _filled(self, start: Decision, cost: Callable[[Decision], _Cost]) -> Decision:
        """Keeps more of what ``start`` moves, the newest first, as long as that makes it better."""
        best = start
        order = [number for number in reversed(self.problem.by_save) if start.moves[number]]
        # As many of them at once as can be: halves of what is left, then single ones.
        size, at, vain = len(order), 0, 0
        while at < len(order) and vain < _TRIES:
            changed = self._decision(_flipped(best.moves, order[at : at + size]))
            if cost(changed) <= cost(best):
                best, at = changed, at + size
            elif size > 1:
                size = (size + 1) // 2
            else:
                at, vain = at + 1, vain + 1
        return best

    def _best_of(self, starts: Iterable[Decision], cost: Callable[[Decision], _Cost]) -> Decision:
        """What comes of the best of ``starts`` within the work that a search may take."""
        end = self._asked + max(_WORK // max(self._count, 1) ** 2, _LEAST_WORK)
        best = min([self._refined(start, cost, end) for start in sorted(starts, key=cost)], key=cost)
        chance = random.Random(self._count)  # the same for the same problem
        for _ in range(_KICKS if self._count > 2 else 0):
            if self._asked >= end:
                break
            kicked = _flipped(best.moves, chance.sample(range(self._count), chance.randint(2, min(self._count, 5))))
            best = min(best, self._refined(self._decision(kicked), cost, end), key=cost)
        return best

    def _refined(self, start: Decision, cost: Callable[[Decision], _Cost], end: int) -> Decision:
        """Exchanges single storages and pairs as long as that makes it better, until so many predictions were asked for."""
        best = start
        improved = True
        while improved and self._asked < end:
            improved = False
            for changes in self._exchanges():
                changed = self._decision(_flipped(best.moves, changes))
                if cost(changed) < cost(best):
                    best, improved = changed, True
                    break
                if self._asked >= end:
                    break
        return best

    def _exchanges(self) -> Iterator[tuple[int, ...]]:
        """Single storages to keep or to move instead, then pairs."""
        order = list(reversed(self.problem.by_save))
        yield from ((number,) for number in order)
        yield from combinations(order, 2)


def _flipped(moves: Moves, numbers: Iterable[int]) -> Moves:
    changed = list(moves)
    for number in numbers:
        changed[number] = not changed[number]
    return tuple(changed)
