"""Plans with modules that are computed again: decided by numbers, then traced with their checkpoints and rehearsed."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property

from eager_offload.plan.decide import Outcome, RehearsedSolver
from eager_offload.plan.predict import Problem
from eager_offload.plan.program import kind_of
from eager_offload.plan.recompute import Candidate
from eager_offload.plan.solve import Decision, Solver

#: How often a decision is made anew, because its step takes more bytes than numbers said.
_REVISIONS = 3


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
        for _ in range(_REVISIONS):
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
        for _ in range(_REVISIONS):
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
        return min(found, key=lambda one: (one.peak_bytes, one.step_seconds))

    def _within(self, names: tuple[str, ...], budget: int) -> Outcome:
        return self._solvers[names].within(budget)._replace(again=names, whole=self._whole)

    def _decide(self, budget: int) -> tuple[Decision, tuple[str, ...]]:
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
