"""Which storages are to move: the least movement that fits a budget, or only what the link hides.

[Note: the search]
What a decision costs ``predict`` tells in a millisecond or so; the question is of which ones to ask. Compute waits
where storages leave or come back faster than the link carries them. A decision that has the link carry what it can,
all of the time, moves most without a wait: walking through backward, a storage may move if it can be back in time,
and through forward it does if those before it leave room in the window (``_paced``). Were the link faster by some
factor, the pace, more would move: by that one number decisions go from what the link hides to everything. What else
is larger by the pace (the windows, the way back) makes several families of decisions (``_WAYS``), and in each the
least pace that fits a budget is found by bisection. The best of those are made better: what fits beside is kept, the
newest first, which backward asks for before it could have been away; and storages are exchanged, singly and in pairs,
from there and from decisions a few storages beside it. Of two that take as long the one that moves less is better.
"""

from __future__ import annotations

import itertools
import math
import random
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from functools import cached_property
from typing import NamedTuple

from eager_offload.plan.predict import Moves, Prediction, Problem

__all__ = ["Decision", "Solver"]

#: By how much faster than it is the link is taken to be.
_PACES = (0.5, 0.7, 0.8, 0.9, 0.95, 1.0, 1.05, 1.1, 1.2, 1.35, 1.5, 1.75, 2.0, 2.5, 3.0, 4.0, 6.0, 10.0, 20.0)
#: How closely a pace is searched for.
_BISECTIONS = 12
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


class _Way(NamedTuple):
    """What a pace makes larger by which power of itself; see [Note: the search]."""

    window: float
    """The bytes on their way out."""
    back: float
    """The rate of the way back; infinite where nothing there is too late."""
    ahead: float
    """The bytes brought back early."""


_WAYS = tuple(_Way(*one) for one in itertools.product((0.0, 1.0), (0.0, 1.0), (0.0, 1.0, 8.0)))
_WAYS += _Way(0.0, math.inf, 0.0), _Way(1.0, math.inf, 0.0)


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
        """The fastest decision whose peak is at most ``budget``, and of those alike the one that moves least.

        Where none is known, the one of the least peak.
        """

        def cost(decision: Decision) -> _Cost:
            found = decision.prediction
            # Times that differ by less than that are the same time.
            seconds = round(found.step_seconds / (self.problem.compute_seconds * _EQUAL or 1.0))
            return _Cost(max(found.peak_bytes - budget, 0), seconds, found.moved_bytes)

        if budget < self.least.prediction.peak_bytes:
            return self.least
        fitting = [one for one in self._candidates if one.prediction.peak_bytes <= budget]
        fitting += [one for way in _WAYS if (one := self._slowest(budget, way)) is not None]
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
        for pace in _PACES:
            for way in _WAYS:
                moves = self._paced(pace, way)
                found[moves] = self._decision(moves)
        return list(found.values())

    def _slowest(self, budget: int, way: _Way) -> Decision | None:
        """What a link of about the least pace has moving that makes it fit ``budget``; ``None`` where none does."""
        low, high = _PACES[0], _PACES[-1]
        found: Decision | None = None
        for _ in range(_BISECTIONS):
            pace = math.sqrt(low * high)
            decision = self._decision(self._paced(pace, way))
            if decision.prediction.peak_bytes <= budget:
                found, high = decision, pace
            else:
                low = pace
        return found

    def _paced(self, pace: float, way: _Way) -> Moves:
        """What moves where the link is faster by ``pace`` and compute never waits."""
        problem, storages = self.problem, self.problem.program.storages
        moves, in_time = [False] * self._count, self._in_time(pace, way)
        rate, window = problem.out * pace, problem.window * pace**way.window
        free, leaving, leaving_bytes = 0.0, deque[tuple[float, int]](), 0
        for number in problem.by_save:
            now, nbytes = problem.begins[storages[number].saved], storages[number].moved_bytes
            while leaving and leaving[0][0] <= now:
                leaving_bytes -= leaving.popleft()[1]
            if in_time[number] and (leaving_bytes + nbytes <= window or not leaving):
                moves[number] = True
                free = max(free, now) + nbytes / rate
                leaving.append((free, nbytes))
                leaving_bytes += nbytes
        return tuple(moves)

    def _in_time(self, pace: float, way: _Way) -> list[bool]:
        """What comes back in time, if all of it moves and has left."""
        problem, storages = self.problem, self.problem.program.storages
        found = [way.back == math.inf] * self._count
        if all(found):
            return found
        rate, ahead = problem.back * pace**way.back, problem.ahead * pace**way.ahead
        free = room_since = problem.forward_seconds
        coming, coming_bytes = deque[tuple[float, int]](), 0
        for number in problem.by_ask:
            wanted, nbytes = problem.begins[storages[number].asked], storages[number].moved_bytes
            while coming and coming_bytes + nbytes > ahead:
                since, gone = coming.popleft()
                room_since, coming_bytes = max(room_since, since), coming_bytes - gone
            arrives = max(free, room_since) + nbytes / rate
            if arrives <= wanted:
                found[number] = True
                free = arrives
                coming.append((wanted, nbytes))
                coming_bytes += nbytes
        return found

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
        """Exchanges single storages and pairs as long as that makes it better.

        Args:
            end: how many predictions may have been asked for.
        """
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
        yield from itertools.combinations(order, 2)


def _flipped(moves: Moves, numbers: Iterable[int]) -> Moves:
    changed = list(moves)
    for number in numbers:
        changed[number] = not changed[number]
    return tuple(changed)
