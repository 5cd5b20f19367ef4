"""Which storages are to move, and which modules to be computed again: the least that fits a budget.

[Note: the search]
What a decision costs ``predict`` tells in a millisecond or so; the question is of which ones to ask. Compute waits
where storages leave or come back faster than the link carries them. A decision that has the link carry what it can,
all of the time, moves most without a wait: walking through backward, a storage may move if it can be back in time,
and through forward it does if those before it leave room in the window (``_paced``). Were the link faster by some
factor, the pace, more would move: by that one number decisions go from what the link hides to everything. What else
is larger by the pace (the windows, the way back) makes several families of decisions (``_WAYS``), and in each the
least pace that fits a budget is found by bisection. Where there are few storages all decisions are asked for; else
the best of those are made better: what fits beside is kept, the
newest first, which backward asks for before it could have been away; and storages are exchanged, singly and in pairs,
from there and from decisions a few storages beside it. Of two that take as long the one that moves less is better.

Where modules may be computed again, they are in one order (``chain``): those first that take the fewest seconds for
each byte, the calls of one kind evenly over the model, and attention only after all that multiplies nothing. So one
more number, how many of them, leads from none to all. Few numbers are tried roughly, then those about the best; from
there the search goes on as above, with modules among what is exchanged.
"""

from __future__ import annotations

import itertools
import math
import random
from collections import deque
from collections.abc import Callable, Iterable
from functools import cached_property
from typing import NamedTuple

from eager_offload.planning.predict import Course, Moves, Prediction, Problem
from eager_offload.planning.recompute import Candidate, Recomputing, Shape, chain

#: Single storages that are tried in vain before no more are kept.
_TRIES = 16
#: Predictions that one search may ask for, times the cube of the flags that there are; and how many it may at least.
_WORK, _LEAST_WORK = 4_000_000, 120
#: With how many of the decisions that are best to begin with a search begins.
_STARTS = 6
#: How often a search goes on from beside the best that it has found.
_KICKS = 200
#: Of a step's time, what is no difference.
EQUAL = 1e-9
#: By how much faster than it is the link is taken to be.
_PACES = (0.5, 0.7, 0.8, 0.9, 0.95, 1.0, 1.05, 1.1, 1.2, 1.35, 1.5, 1.75, 2.0, 2.5, 3.0, 4.0, 6.0, 10.0, 20.0)
#: How closely a pace is searched for.
_BISECTIONS = 12
#: How many modules are computed again: numbers that are tried at first, and how many of the best are gone on with.
_SAMPLES, _BEST_AGAIN = 8, 2
#: Operators in all steps with checkpoints that are remembered.
_REMEMBERED = 2_000_000


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
#: How numbers of modules are compared: by these families, and that closely.
_ROUGH_WAYS = (_Way(0.0, 0.0, 0.0), _Way(1.0, 1.0, 1.0))
_ROUGH_BISECTIONS = 7


class Solution(NamedTuple):
    """Which storages move, which modules are computed again, and what comes of it."""

    moves: Moves
    """Beyond the storages of the step come the ``Program.arguments``, where modules may be computed again."""
    prediction: Prediction
    again: tuple[Candidate, ...] = ()


class _Cost(NamedTuple):
    """What makes one decision better than another: less of the first, then of the next."""

    over_bytes: int
    seconds: float
    moved_bytes: int


class Solver:
    """Searches among the decisions for one problem. What it has asked of once it knows for every budget."""

    def __init__(self, problem: Problem, *, recompute: bool = False) -> None:
        self.problem = problem
        self._recomputing = Recomputing(problem)
        self._calls = self._recomputing.candidates if recompute else []
        #: Arguments of calls are storages too where such a call is computed again.
        self._count = len(problem.program.storages) + (len(problem.program.arguments) if self._calls else 0)
        #: By flags: for each storage whether it moves, then for each call whether it is computed again.
        self._known: dict[Moves, Solution] = {}
        self._shapes: dict[Moves, Shape] = {}
        self._asked = 0

    # -- what a user asks for -----------------------------------------------------------------------------------------

    def within(self, budget: int) -> Solution:
        """The fastest decision whose peak is at most ``budget``, and of those alike the one that moves least.

        Where none is known, the one of the least peak.
        """

        def cost(decision: Solution) -> _Cost:
            found = decision.prediction
            # Times that differ by less than that are the same time.
            seconds = round(found.step_seconds / (self.problem.compute_seconds * EQUAL or 1.0))
            return _Cost(max(found.peak_bytes - budget, 0), seconds, found.moved_bytes)

        if budget < self.least.prediction.peak_bytes:
            return self.least
        fitting = [one for one in self._candidates if one.prediction.peak_bytes <= budget]
        for again in self._agains(budget, cost):
            fitting += self._of_least_paces(again, budget, _WAYS)
        starts = {self._filled(start, cost) for start in [*sorted(fitting, key=cost)[:_STARTS], self.least]}
        return self._best_of(starts, cost)

    def free(self, slowdown: float = 0.0) -> Solution:
        """The decision that moves most of those in which compute never waits, but for what moves whatever is decided.

        Args:
            slowdown: which part of a step's compute it may wait.
        """
        nothing = self._decision((False,) * (self._count + len(self._calls))).prediction.step_seconds
        most = max(nothing, self.problem.compute_seconds * (1 + slowdown)) * (1 + EQUAL)

        def cost(decision: Solution) -> _Cost:
            found = decision.prediction
            waits = found.step_seconds > most
            return _Cost(int(waits), 0.0, -found.moved_bytes)

        return self._best_of(sorted(self._candidates, key=cost)[:_STARTS], cost)

    def all(self) -> Solution:
        return self._all(self._none)

    @cached_property
    def agains(self) -> list[tuple[Candidate, ...]]:
        """What may be computed again, from nothing to as much as may be."""
        return [tuple(itertools.compress(self._calls, flags)) for flags in self._chain]

    @cached_property
    def least(self) -> Solution:
        """The decision of the least peak that is known: nearly always that in which everything moves."""

        def cost(decision: Solution) -> _Cost:
            found = decision.prediction
            return _Cost(found.peak_bytes, found.step_seconds, found.moved_bytes)

        found = [*self._candidates, *(self._all(again) for again in self._agains(0, cost))]
        return self._best_of(sorted(found, key=cost)[:_STARTS], cost)

    def course(self, decision: Solution) -> Course:
        """What comes of ``decision``, operator by operator."""
        shape = self._shape(tuple(one in decision.again for one in self._calls))
        return shape.problem.course(tuple(decision.moves[number] for number in shape.numbers))

    # -- decisions ----------------------------------------------------------------------------------------------------

    @property
    def _none(self) -> Moves:
        return (False,) * len(self._calls)

    def _decision(self, flags: Moves) -> Solution:
        found = self._known.get(flags)
        if found is None:
            again = self._outermost(flags[self._count :])
            shape = self._shape(again)
            moves = shape.problem.within_room(tuple(flags[number] for number in shape.numbers))
            plain = [False] * self._count
            for number, one in zip(shape.numbers, moves, strict=True):
                plain[number] = one
            known = self._known.get((*plain, *again))
            if known is None:
                self._asked += 1
                calls = tuple(itertools.compress(self._calls, again))
                known = Solution(tuple(plain), shape.problem.predict(moves), calls)
                self._known[(*plain, *again)] = known
            found = self._known[flags] = known
        return found

    def _outermost(self, again: Moves) -> Moves:
        """Without the calls inside of others that are computed again."""
        if not any(again):
            return again
        found, end = [False] * len(again), -1
        for place, (one, candidate) in enumerate(zip(again, self._calls, strict=True)):
            if one and candidate.call.begin >= end:
                found[place], end = True, candidate.call.end
        return tuple(found)

    def _shape(self, again: Moves) -> Shape:
        found = self._shapes.get(again)
        if found is None:
            found = self._recomputing.shape(itertools.compress(self._calls, again))
            if len(self._shapes) * len(self.problem.op_seconds) > _REMEMBERED:
                self._shapes.clear()
            self._shapes[again] = found
        return found

    def _spread(self, again: Moves, moves: Moves) -> Solution:
        """The decision of which the step with those calls has ``moves``."""
        flags = [False] * self._count
        for number, one in zip(self._shape(again).numbers, moves, strict=True):
            flags[number] = one
        return self._decision((*flags, *again))

    def _all(self, again: Moves) -> Solution:
        return self._decision((*(True,) * self._count, *again))

    @cached_property
    def _newest(self) -> list[int]:
        """The storages, and arguments, of which the newest come first."""
        count = len(self.problem.program.storages)
        return [*reversed(self.problem.by_save), *reversed(range(count, self._count))]

    # -- where to begin -----------------------------------------------------------------------------------------------

    @cached_property
    def _candidates(self) -> list[Solution]:
        """Decisions to begin with: nothing, everything, and those of a link of every pace."""
        count = len(self.problem.program.storages)
        paced = (_paced(self.problem, pace, way) for pace, way in itertools.product(_PACES, _WAYS))
        found = [(False,) * count, (True,) * count, *paced]
        return [self._spread(self._none, moves) for moves in dict.fromkeys(found)]

    def _of_least_paces(self, again: Moves, budget: int, ways: Iterable[_Way], **named: int) -> list[Solution]:
        problem = self._shape(again).problem
        found = (_least_pace(problem, budget, way, **named) for way in ways)
        return [self._spread(again, moves) for moves in found if moves is not None]

    @cached_property
    def _chain(self) -> list[Moves]:
        """What is computed again where it is one call more each time."""
        places = {one: place for place, one in enumerate(self._calls)}
        flags, found = list(self._none), [self._none]
        for candidate in chain(self._calls):
            flags[places[candidate]] = True
            again = self._outermost(tuple(flags))
            if again != found[-1]:
                found.append(again)
        return found

    def _agains(self, budget: int, cost: Callable[[Solution], _Cost]) -> list[Moves]:
        """What to compute again, the best numbers of calls by a rough look, and nothing."""
        known: dict[int, _Cost] = {}

        def rough(number: int) -> _Cost:
            if number not in known:
                again = self._chain[number]
                found = [self._all(again), self._decision((*(False,) * self._count, *again))]
                found += self._of_least_paces(again, budget, _ROUGH_WAYS, bisections=_ROUGH_BISECTIONS)
                known[number] = min(map(cost, found))
            return known[number]

        last = len(self._chain) - 1
        gap = max(last // _SAMPLES, 1)
        for number in {*range(0, last + 1, gap), last}:
            rough(number)
        while gap > 1:
            gap = (gap + 1) // 2
            best = min(known, key=rough)
            for number in (best - gap, best + gap):
                if 0 <= number <= last:
                    rough(number)
        best_of_all = sorted(known, key=rough)[:_BEST_AGAIN]
        return [self._chain[number] for number in dict.fromkeys([*best_of_all, 0])]

    # -- the search ---------------------------------------------------------------------------------------------------

    def _filled(self, start: Solution, cost: Callable[[Solution], _Cost]) -> Solution:
        """Keeps more of what ``start`` moves, the newest first, as long as that makes it better."""
        best = start
        order = [number for number in self._newest if start.moves[number]]
        # As many of them at once as can be: halves of what is left, then single ones.
        size, at, vain = len(order), 0, 0
        while at < len(order) and vain < _TRIES:
            changed = self._flipped(best, order[at : at + size])
            if cost(changed) <= cost(best):
                best, at = changed, at + size
            elif size > 1:
                size = (size + 1) // 2
            else:
                at, vain = at + 1, vain + 1
        return best

    def _best_of(self, starts: Iterable[Solution], cost: Callable[[Solution], _Cost]) -> Solution:
        """What comes of the best of ``starts`` within the work that a search may take; of few decisions the best."""
        count = self._count + len(self._calls)
        work = max(_WORK // max(count, 1) ** 3, _LEAST_WORK)
        if 2**count <= work:
            every = itertools.product((False, True), repeat=count)
            return min((self._decision(flags[::-1]) for flags in every), key=cost)  # of equal ones, the oldest move
        end = self._asked + work
        best = min([self._refined(start, cost, end) for start in sorted(starts, key=cost)], key=cost)
        chance = random.Random(count)  # the same for the same problem
        for _ in range(_KICKS if count > 2 else 0):
            if self._asked >= end:
                break
            kicked = self._flipped(best, chance.sample(range(count), chance.randint(2, min(count, 8))))
            best = min(best, self._refined(kicked, cost, end), key=cost)
        return best

    def _refined(self, start: Solution, cost: Callable[[Solution], _Cost], end: int) -> Solution:
        """Exchanges single flags and pairs as long as that makes it better and fewer than ``end`` predictions were
        made."""
        best, improved = start, True
        order = [*self._newest, *range(self._count, self._count + len(self._calls))]
        while improved and self._asked < end:
            improved = False
            for changes in itertools.chain(((number,) for number in order), itertools.combinations(order, 2)):
                changed = self._flipped(best, changes)
                if cost(changed) < cost(best):
                    best, improved = changed, True
                    break
                if self._asked >= end:
                    break
        return best

    def _flipped(self, decision: Solution, numbers: Iterable[int]) -> Solution:
        flags = [*decision.moves, *(one in decision.again for one in self._calls)]
        for number in numbers:
            flags[number] = not flags[number]
        return self._decision(tuple(flags))


# -- what moves where the link carries what it can, all of the time --------------------------------------------------


def _least_pace(problem: Problem, budget: int, way: _Way, bisections: int = _BISECTIONS) -> Moves | None:
    """What a link of about the least pace has moving that makes it fit ``budget``; ``None`` where none does."""
    low, high = _PACES[0], _PACES[-1]
    found: Moves | None = None
    for _ in range(bisections):
        pace = math.sqrt(low * high)
        moves = _paced(problem, pace, way)
        if problem.predict(moves).peak_bytes <= budget:
            found, high = moves, pace
        else:
            low = pace
    return found


def _paced(problem: Problem, pace: float, way: _Way) -> Moves:
    """What moves where the link is faster by ``pace`` and compute never waits."""
    storages = problem.program.storages
    moves, in_time = [False] * len(storages), _in_time(problem, pace, way)
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


def _in_time(problem: Problem, pace: float, way: _Way) -> list[bool]:
    """What comes back in time, if all of it moves and has left."""
    storages = problem.program.storages
    found = [way.back == math.inf] * len(storages)
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
