"""Which decision is given out: the solver's, once the library has rehearsed it."""

from __future__ import annotations

from functools import cached_property
from operator import attrgetter
from typing import NamedTuple

from eager_offload.plan.draft import draft
from eager_offload.plan.predict import Course, Moves, Problem
from eager_offload.plan.solve import Decision, Solver

#: So many times a decision is made anew that does not keep to its budget in rehearsal.
_REVISIONS = 4
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
    rehearsed: see ``revise.py``.
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
        """Everything moves that may."""
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
        """Nothing moves."""
        return self.of((False,) * len(self.problem.program.storages))

    def _outcome(self, decision: Decision) -> Outcome:
        """What comes of a decision."""
        if decision.again:
            return Outcome(self.problem, decision.moves, self._solver.course(decision))
        return self.of(decision.moves[: len(self.problem.program.storages)])

    def of(self, moves: Moves) -> Outcome:
        """What comes of moving those, and what moves in any case, where nothing is computed again."""
        moves = self.problem.with_forced(moves)
        if moves not in self._known:
            from eager_offload.plan.rehearse import rehearse  # it brings in the simulation

            plan = draft(self.problem, moves)
            rehearsed = None if plan is None else rehearse(self.problem, plan, self._launch_seconds)
            self._known[moves] = Outcome(self.problem, moves, rehearsed or self.problem.course(moves))
        return self._known[moves]
