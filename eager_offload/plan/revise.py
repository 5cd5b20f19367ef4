"""A plan with modules that are computed again: decided by numbers, then traced with its checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import NamedTuple

from eager_offload.errors import PlanError
from eager_offload.plan.decide import Outcome, RehearsedSolver
from eager_offload.plan.predict import Problem
from eager_offload.plan.program import kind_of
from eager_offload.plan.recompute import Candidate
from eager_offload.plan.solve import Solver

__all__ = ["Computed", "computing_again"]

#: How often a decision is made anew, because its step takes more than numbers said or its modules cannot run again.
_REVISIONS = 3


class Computed(NamedTuple):
    """What is decided."""

    problem: Problem
    """The step with its checkpoints."""
    outcome: Outcome
    """Of the decision for it."""
    names: tuple[str, ...]
    """The modules with a checkpoint."""
    whole: Problem
    """The step without any; of its calls those that may be computed again."""


def computing_again(
    whole: Problem, traced: Callable[[Sequence[str]], Problem], budget: int, launch_seconds: float
) -> Computed:
    """The best decision for ``budget``.

    Args:
        whole: the step in which nothing is computed again.
        traced: the step in which those modules are.
        launch_seconds: as for ``rehearse``.
    """
    aim, solver = budget, Solver(whole, recompute=True)
    found: Computed | None = None

    def better(problem: Problem, names: tuple[str, ...]) -> Computed:
        """The best decision for that step, or what was found before."""
        other = Computed(problem, RehearsedSolver(problem, launch_seconds).within(budget), names, whole)
        return other if found is None or _cost(other, budget) < _cost(found, budget) else found

    for _ in range(_REVISIONS):
        decision = solver.within(aim)
        again = _names(whole, decision.again)
        if not again:
            break
        try:
            problem = traced(again)
        except (PlanError, RuntimeError):  # a module that does another thing the second time
            whole = _without(whole, _failing(whole, traced, decision.again))
            solver = Solver(whole, recompute=True)
            continue
        found = better(problem, again)
        over = found.outcome.peak_bytes - budget
        if over <= 0 or decision.prediction.peak_bytes > budget:
            break  # it fits, or nothing does
        aim -= over
    if found is None or found.outcome.peak_bytes > budget:
        found = better(whole, ())
    # By numbers a step in which much moves may take less than it does in rehearsal, and so seem to be the better one.
    most = solver.all_again
    at_least = whole.compute_seconds + sum(one.seconds for one in most)
    if len(most) > len(found.names) and (at_least < found.outcome.step_seconds or found.outcome.peak_bytes > budget):
        with suppress(PlanError, RuntimeError):
            names = _names(whole, most)
            found = better(traced(names), names)
    return found._replace(whole=whole)


def _cost(found: Computed, budget: int) -> tuple[int, float]:
    """What makes one decision better than another: less of the first, then of the next."""
    return max(found.outcome.peak_bytes - budget, 0), found.outcome.step_seconds


def _names(problem: Problem, chosen: Sequence[Candidate]) -> tuple[str, ...]:
    return tuple(problem.program.modules[one.call.module] for one in chosen)


def _failing(whole: Problem, traced: Callable[[Sequence[str]], Problem], chosen: Sequence[Candidate]) -> set[str]:
    """The kinds of modules that cannot be computed again, or all where each of them can by itself."""
    kinds = {one.kind: one for one in chosen}
    failing = set()
    for kind, one in kinds.items():
        try:
            traced(_names(whole, [one]))
        except (PlanError, RuntimeError):
            failing.add(kind)
    return failing or set(kinds)


def _without(problem: Problem, kinds: set[str]) -> Problem:
    program = problem.program
    calls = tuple(one for one in program.calls if kind_of(program.modules[one.module]) not in kinds)
    return replace(problem, program=replace(program, calls=calls))
