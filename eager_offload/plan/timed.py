"""A step whose operators take what was measured of it in training, in place of what was believed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

from eager_offload.computed_plan import Timing
from eager_offload.plan.predict import Moves, Problem

#: Of the time that operators take, what is no difference.
_SMALL = 0.05
#: An operator takes at most so many times what was believed, or that part of it: more is no operator's doing.
_MOST = 20.0


class _Part(NamedTuple):
    """Some operators, one after the other."""

    begin: int
    end: int
    believed: float
    measured: float


def is_off(problem: Problem, moves: Moves, step_seconds: float, timing: Timing) -> bool:
    """Whether a step has taken another time than ``step_seconds``: its operators, or what compute has waited."""
    parts = [*_parts(problem, moves, timing)]
    believed, compute = sum(one.believed for one in parts), problem.begins_packing(moves)[-1]
    waited = timing.waited_seconds - max(step_seconds - compute, 0.0)
    off = abs(sum(one.measured for one in parts) - believed)
    return max(off, abs(waited)) > _SMALL * believed


def timed(problem: Problem, moves: Moves, timing: Timing) -> Problem:
    """``problem`` with the times of ``timing``: operators that were measured together keep their shares."""
    seconds, factor, end = list(problem.op_seconds), 1.0, 0
    for one in _parts(problem, moves, timing):
        factor, end = min(max(one.measured / one.believed, 1 / _MOST), _MOST), one.end
        seconds[one.begin : end] = (factor * each for each in seconds[one.begin : end])
    seconds[end:] = (factor * each for each in seconds[end:])  # after the last ask: as before it
    return replace(problem, op_seconds=tuple(seconds), out=timing.out or problem.out, back=timing.back or problem.back)


def _parts(problem: Problem, moves: Moves, timing: Timing) -> Iterator[_Part]:
    program, begins = problem.program, problem.begins_packing(moves)
    asked: dict[int, int] = {}
    for ask in program.asks:
        asked.setdefault(ask.save, ask.op)
    begin, measured = 0, 0.0
    for one in timing.stretches:
        measured += one.seconds
        end = asked.get(one.save, 0) if one.is_ask else program.saves[one.save].op
        believed = begins[end] - begins[begin] if end > begin else 0.0
        if believed > 0:
            yield _Part(begin, end, believed, measured)
            begin, measured = end, 0.0
