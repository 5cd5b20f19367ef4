"""From a decision to the step plan that carries it out: the library's own schedule, on numbers. And back: from what a
step that followed it has taken to the times of operators.

[Note: the same schedule]
What becomes of each save, when its copy starts and which unpack brings what back is worked out by what does so in
training: ``ResidentQueue``, ``PrefetchOrder`` and ``StepRecorder``, which hold numbers only. They are given what a
program says instead of what autograd does. A storage that is to stay weighs nothing in the prefetch order: the room of
``prefetch_bytes`` is for what comes back.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

from eager_offload.computed_plan import Timing
from eager_offload.errors import ConfigError
from eager_offload.planning.predict import Moves, Problem
from eager_offload.planning.program import ProgramSave
from eager_offload.schedule import PrefetchOrder, ResidentQueue
from eager_offload.stats import KeepReason
from eager_offload.step_plan import Coded, StepPlan
from eager_offload.step_recorder import StepRecorder

#: Of the time that operators take, what is no difference.
_SMALL = 0.05
#: An operator takes at most so many times what was believed, or that part of it: more is no operator's doing.
_MOST = 20.0
#: Reasons that a step plan can give: the others are looked at in each step.
_FOLLOWED = frozenset({KeepReason.PARAMETER, KeepReason.SMALL})


def draft(problem: Problem, moves: Moves) -> StepPlan | None:
    """What a forward and its backward do where those storages move; ``None`` where no step plan can say it."""
    program = problem.program
    if any(ask.op < program.forward_ops for ask in program.asks):
        return None  # a backward inside of forward
    plan = _Draft(problem, moves).plan()
    if plan is None or plan.asks_again:  # a save that is asked for twice, whose handle has gone in between
        return None
    try:
        plan.check()
    except ConfigError:  # one that asks for what it has not saved
        return None
    return plan


class _Draft:
    """One step on its way. The recorder's name of a followed save is its number, and that of a storage its first."""

    def __init__(self, problem: Problem, moves: Moves) -> None:
        self._program, self._moves = problem.program, moves
        self._recorder, self._queue = StepRecorder(), ResidentQueue(0)
        self._order = PrefetchOrder(problem.ahead)
        #: By storage, its first and its last save.
        self._first: dict[int, int] = {}
        self._last: dict[int, int] = {}
        for number, save in enumerate(self._program.saves):
            if self._is_followed(save):
                self._first.setdefault(save.storage, number)
                self._last[save.storage] = number

    def plan(self) -> StepPlan | None:
        for number, save in enumerate(self._program.saves):
            self._save(number, save)
        self._start_due(None)
        self._ask()
        return self._recorder.plan()

    def _is_followed(self, save: ProgramSave) -> bool:
        """Whether the storage of a save stays or leaves as the decision says."""
        return save.storage >= 0 and self._program.storages[save.storage].is_whole

    def _save(self, number: int, save: ProgramSave) -> None:
        recorder = self._recorder
        if not self._is_followed(save):
            if save.storage >= 0:
                self._start_due(save.node)  # a part leaves by itself, by the rules of an unknown step
            recorder.keep(save.nbytes, save.requires_grad, _reason(save), save.storage_nbytes)
            return
        first, last = self._first[save.storage], self._last[save.storage]
        storage, moves = self._program.storages[save.storage], self._moves[save.storage]
        nbytes = storage.nbytes if number == first else 0
        if number != first:
            if first in self._queue:
                self._queue.postpone(first, save.node)
                self._queue.saved_again(first, number)
        else:
            if moves:
                self._queue.push(
                    first, storage.nbytes, save.node, urgent=True, last_save=last if last > first else None
                )
            self._start_due(save.node)
        recorder.take(number, first, save.nbytes, save.requires_grad, nbytes, nbytes, save.codec)
        self._order.add(number, first, storage.moved_bytes if moves else 0, 0)

    def _start_due(self, node: int | None) -> None:
        while (first := self._queue.due(node)) is not None:
            self._queue.discard(first)
            packing = self._program.storages[self._program.saves[first].storage].packing
            self._recorder.started(first, None if packing is None else Coded(*packing[:3]))

    def _ask(self) -> None:
        """Backward. The handles of a node go when the next one begins."""
        saves, order = self._program.saves, self._order
        asks = [ask.save for ask in self._program.asks if self._is_followed(saves[ask.save])]
        order.arrange(0, asks)
        asked: list[int] = []
        for number in asks:
            save = saves[number]
            if asked and saves[asked[-1]].node != save.node:
                for gone in asked:
                    order.remove(gone)
                asked = []
            first = self._first[save.storage]
            looked = order.unpacked(number)
            bring = [one for one in looked.bring if self._moves[saves[one].storage]]
            kept = None if self._moves[save.storage] else KeepReason.NEWEST
            self._recorder.asked(number, first, bring, looked.drop, order.holds(first), kept)
            if number not in asked:
                asked.append(number)


def _reason(save: ProgramSave) -> KeepReason | None:
    """Why a save stays in each step like this one; ``None`` where that is decided anew in each."""
    if save.is_alive:
        return KeepReason.ALIVE
    # A small part of a storage may be one of what leaves, in another step.
    is_known = save.reason in _FOLLOWED and (save.reason is not KeepReason.SMALL or save.storage_nbytes == save.nbytes)
    return save.reason if is_known else None


# -- and back: what was measured of a step that followed one ----------------------------------------------------------


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
