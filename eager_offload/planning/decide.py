"""Which decision is given out: the solver's, once the library has rehearsed it.

Where modules may be computed again, numbers decide first; then the step is traced with its checkpoints, and rehearsed.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property
from operator import attrgetter
from typing import NamedTuple

from eager_offload.planning.predict import Course, Moves, Problem
from eager_offload.planning.program import kind_of
from eager_offload.planning.recompute import Candidate
from eager_offload.planning.solve import Solution, Solver

#: So many times a decision is made anew that does not keep to its budget in rehearsal.
_REVISIONS = 4
#: How often one is made anew whose step, traced with its checkpoints, takes more bytes than numbers said.
_TRACES = 3
#: So many times a decision of a lower peak is looked for than the least by arithmetic has in rehearsal.
_LOWER = 4
#: A step of so many times another one's peak, by arithmetic, is none of a lower one in rehearsal.
_FAR = 1.1


class Outcome(NamedTuple):
    """A decision for a step, and what comes of it."""

    problem: Problem
    moves: Moves
    course: Course
    """In rehearsal, or where there was none by arithmetic."""
    again: tuple[str, ...] = ()
    """The modules that have a checkpoint in ``problem``."""
    whole: Problem | None = None
    """The step without any, where there may be some; of its calls those that may be computed again."""

    @property
    def step_seconds(self) -> float:
        return self.course.step_seconds

    @property
    def peak_bytes(self) -> int:
        return self.course.peak_bytes


_time_and_peak = attrgetter("step_seconds", "peak_bytes")
_peak_and_time = attrgetter("peak_bytes", "step_seconds")


class RehearsedSolver:
    """A solver whose decisions are rehearsed before they are given out, and revised where they do not hold.

    With ``recompute`` modules may be computed again. A step in which some are has to be traced before it is
    rehearsed: see ``TracedSolver``.
    """

    def __init__(self, problem: Problem, launch_seconds: float, *, recompute: bool = False) -> None:
        self.problem, self._launch_seconds = problem, launch_seconds
        self._solver = Solver(problem, recompute=recompute)
        self._known: dict[Moves, Outcome] = {}

    def within(self, budget: int) -> Outcome:
        """The fastest that is known whose peak is at most ``budget``; where there is none, that of the least peak."""
        found = self._within(budget)
        if found is None:
            fitting = [one for one in (self.least, *self._known.values()) if one.peak_bytes <= budget]
            found = min(fitting, key=_time_and_peak, default=self.least)
        return found

    def _within(self, budget: int) -> Outcome | None:
        """What comes of the solver's decision, made anew until it keeps to ``budget``."""
        aim = budget
        for _ in range(1 + _REVISIONS):
            decision = self._solver.within(aim)
            found = self._outcome(decision)
            if (over := found.peak_bytes - budget) <= 0:
                return found
            aim = min(decision.prediction.peak_bytes, aim) - over
        return None

    def free(self) -> Outcome:
        """That which moves most of those in which compute never waits, by arithmetic."""
        return self._outcome(self._solver.free())

    def all(self) -> Outcome:
        return self._outcome(self._solver.all())

    @cached_property
    def least(self) -> Outcome:
        """That of the least peak that is known."""
        found = [self._outcome(self._solver.least), self.all()]
        best = min(found, key=_peak_and_time)
        # Where the host is ahead of the device, to move may take more than it frees.
        nothing = self.problem.predict((False,) * len(self.problem.program.storages))
        if nothing.peak_bytes <= best.peak_bytes * _FAR:
            best = min(best, self.nothing, key=_peak_and_time)
        # A peak may be lower in rehearsal than by arithmetic.
        for _ in range(_LOWER):
            lower = self._within(best.peak_bytes - 1)
            if lower is None:
                break
            best = lower
        return best

    @property
    def nothing(self) -> Outcome:
        return self.of((False,) * len(self.problem.program.storages))

    def _outcome(self, decision: Solution) -> Outcome:
        if decision.again:
            return Outcome(self.problem, decision.moves, self._solver.course(decision))
        return self.of(decision.moves[: len(self.problem.program.storages)])

    def of(self, moves: Moves) -> Outcome:
        """What comes of moving those, and what moves in any case, where nothing is computed again."""
        moves = self.problem.with_forced(moves)
        if moves not in self._known:
            from eager_offload.planning.rehearse import rehearse  # it brings in the simulation

            rehearsed = rehearse(self.problem, moves, self._launch_seconds)
            self._known[moves] = Outcome(self.problem, moves, rehearsed or self.problem.course(moves))
        return self._known[moves]


# -- with modules that are computed again -----------------------------------------------------------------------------


class TracedSolver:
    """A solver that may have modules computed again; what it gives out was traced and rehearsed with its
    checkpoints.

    ``traced`` has the step in which those modules are computed again; in ``whole`` nothing is.
    """

    def __init__(self, whole: Problem, traced: Callable[[Sequence[str]], Problem], launch_seconds: float) -> None:
        self._trace, self._launch_seconds = traced, launch_seconds
        self._whole, self._solver = whole, Solver(whole, recompute=True)
        #: By the modules that are computed again.
        self._solvers: dict[tuple[str, ...], RehearsedSolver] = {(): RehearsedSolver(whole, launch_seconds)}

    def within(self, budget: int) -> Outcome:
        """The fastest that is known whose peak is at most ``budget``; where there is none, that of the least peak."""
        if budget < self.least.peak_bytes:
            return self.least
        found = [self.least, self._within((), budget)]
        aim, too_few = budget, -1
        for _ in range(_TRACES):
            decision, names = self._decide(aim)
            found.append(self._within(names, budget))
            over = found[-1].peak_bytes - budget
            if over <= 0 or decision.prediction.peak_bytes > budget:
                break
            aim, too_few = aim - over, max(too_few, len(decision.again))
        best = _fastest(found, budget)
        if too_few >= 0:
            best = self._with_fewest(budget, too_few, best)
        # By numbers a step in which much moves may take less than in rehearsal, and so seem to be the better one.
        most = self._solver.agains[-1]
        at_least = self._whole.compute_seconds + sum(one.seconds for one in most)
        if len(most) > len(best.again) and at_least < best.step_seconds:
            names = self._names(most)
            if self._is_traced(names):
                best = _fastest([best, self._within(names, budget)], budget)
        return best

    def _with_fewest(self, budget: int, too_few: int, best: Outcome) -> Outcome:
        """Looks for fewer calls to compute again than ``best`` has, where numbers said that ``too_few`` would do."""
        counts = [len(again) for again in self._solver.agains]
        low, high = bisect_right(counts, too_few) - 1, bisect_left(counts, len(best.again) or counts[-1])
        for _ in range(_TRACES):
            middle = (low + high) // 2
            names = self._names(self._solver.agains[middle])
            if middle <= low or not self._is_traced(names):
                break
            found = self._within(names, budget)
            if found.peak_bytes <= budget:
                best, high = _fastest([best, found], budget), middle
            else:
                low = middle
        return best

    @cached_property
    def least(self) -> Outcome:
        """That of the least peak that is known."""
        _, names = self._decide(0)
        most = self._names(self._solver.agains[-1])
        tried = dict.fromkeys([(), names, most] if self._is_traced(most) else [(), names])
        found = [self._solvers[one].least._replace(again=one, whole=self._whole) for one in tried]
        return min(found, key=_peak_and_time)

    def _within(self, names: tuple[str, ...], budget: int) -> Outcome:
        return self._solvers[names].within(budget)._replace(again=names, whole=self._whole)

    def _decide(self, budget: int) -> tuple[Solution, tuple[str, ...]]:
        """The best decision for ``budget`` by numbers, and its modules, which can run again."""
        while True:
            decision = self._solver.within(budget)
            names = self._names(decision.again)
            if self._is_traced(names):
                return decision, names
            self._whole = _without(self._whole, self._failing(decision.again))
            self._solver = Solver(self._whole, recompute=True)

    def _is_traced(self, names: tuple[str, ...]) -> bool:
        """Whether those modules can be computed again; then the step in which they are is known."""
        if names not in self._solvers:
            try:
                problem = self._trace(names)
            except Exception:  # whatever a module raises that does another thing the second time
                return False
            self._solvers[names] = RehearsedSolver(problem, self._launch_seconds)
        return True

    def _names(self, chosen: Sequence[Candidate]) -> tuple[str, ...]:
        return tuple(self._whole.program.modules[one.call.module] for one in chosen)

    def _failing(self, chosen: Sequence[Candidate]) -> set[str]:
        """The kinds of modules that cannot be computed again, or all where each of them can by itself."""
        kinds = {one.kind: one for one in chosen}
        failing = set()
        for kind, one in kinds.items():
            try:
                self._trace(self._names([one]))
            except Exception:
                failing.add(kind)
        return failing or set(kinds)


def _fastest(found: Sequence[Outcome], budget: int) -> Outcome:
    """The fastest of those whose peak is at most ``budget``."""
    return min((one for one in found if one.peak_bytes <= budget), key=lambda one: one.step_seconds)


def _without(problem: Problem, kinds: set[str]) -> Problem:
    program = problem.program
    calls = tuple(one for one in program.calls if kind_of(program.modules[one.module]) not in kinds)
    return replace(problem, program=replace(program, calls=calls))
