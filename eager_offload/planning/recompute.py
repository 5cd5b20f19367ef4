"""A step in which some calls of modules are computed again, out of one in which none is: arithmetic on a ``Program``;
and in which order calls are to be taken.

[Note: computing again]
A checkpoint lets go of what its module saves and holds the arguments. The first question for any of it, in backward,
runs the module once more until its last save, and what that saves lives until backward drops it. So

- a storage that is made and saved inside lives twice, shortly in forward and then from there on, and may not move;
- one that is saved outside as well may move as before, beside a second copy of it in backward;
- an argument is saved when the call begins and asked for when it is run again.

Where numbers alone do not say how long something lives, they say too long: a plan's own step is traced with its
checkpoints (planner.py), and this tells which ones to put there.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import accumulate
from operator import itemgetter
from typing import NamedTuple

from eager_offload.planning.predict import Problem
from eager_offload.planning.program import Op, Program, RecomputableCall, Storage, kind_of


class Shape(NamedTuple):
    """A step with checkpoints."""

    problem: Problem
    numbers: tuple[int, ...]
    """Of its storages, those in the step without checkpoints; beyond them are those of ``Program.arguments``."""


class Candidate(NamedTuple):
    """A call that may be computed again."""

    call: RecomputableCall
    kind: str
    stop: int
    """The operator before which it stops when it runs again: all of its saves are there."""
    asked: int
    """The operator before which it runs again."""
    seconds: float
    """That this takes."""
    freed_bytes: int
    """That are not there between forward and backward."""
    attends: bool
    """Whether an attention is in it."""
    multiplies: bool
    """Whether it has a product, a convolution or an attention."""


class _Kind:
    """The calls of modules in one place, one in each block."""

    def __init__(self, calls: list[Candidate]) -> None:
        self.calls = calls
        self.seconds = sum(one.seconds for one in calls)
        self.freed_bytes = sum(one.freed_bytes for one in calls)
        self.attends = any(one.attends for one in calls)
        self.multiplies = any(one.multiplies for one in calls)

    def is_within(self, other: _Kind) -> bool:
        """Whether its calls run inside of the other's, of which the first is asked."""
        outer, inner = other.calls[0].call, self.calls
        return any(outer.begin <= one.call.begin and one.call.end <= outer.end for one in inner)


def chain(candidates: Sequence[Candidate]) -> list[Candidate]:
    """Candidates in the order in which they are taken. One that is around others takes their place.

    No attention comes before the last norm or activation, or what else multiplies nothing.
    """
    calls: dict[str, list[Candidate]] = {}
    for one in candidates:
        calls.setdefault(one.kind, []).append(one)
    left, taken = [*map(_Kind, calls.values())], list[_Kind]()
    order: list[Candidate] = []
    while left := [kind for kind in left if kind not in taken and not any(kind.is_within(one) for one in taken)]:
        waits = any(not kind.multiplies for kind in left)
        allowed = [kind for kind in left if not (waits and kind.attends)]
        best = min(allowed, key=lambda kind: _price(kind, taken))
        taken = [*(one for one in taken if not one.is_within(best)), best]
        order += _evenly(best.calls)
    return order


def _price(kind: _Kind, taken: Iterable[_Kind]) -> float:
    """Seconds for each byte that it frees beyond those that are taken already."""
    inside = [one for one in taken if one.is_within(kind)]
    freed = kind.freed_bytes - sum(one.freed_bytes for one in inside)
    seconds = kind.seconds - sum(one.seconds for one in inside)
    return max(seconds, 0.0) / freed if freed > 0 else float("inf")


def _evenly(calls: Sequence[Candidate]) -> Iterable[Candidate]:
    """All of them, so that the first ones, however many they are, lie evenly: by the digits of places, reversed."""
    digits = max(len(calls) - 1, 1).bit_length()
    places = (int(f"{place:0{digits}b}"[::-1], 2) for place in range(1 << digits))
    return [calls[place] for place in places if place < len(calls)]


class Recomputing:
    """The calls of a step that may be computed again, and the step with any of them."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self._program = program = problem.program
        #: By save: when it is asked for first.
        self.first_ask: dict[int, int] = {}
        for ask in program.asks:
            self.first_ask.setdefault(ask.save, ask.op)
        self.saves_of: defaultdict[int, list[int]] = defaultdict(list)
        for number, save in enumerate(program.saves):
            if save.storage >= 0:
                self.saves_of[save.storage].append(number)

    @cached_property
    def candidates(self) -> list[Candidate]:
        """Those that free bytes, in the order in which they begin."""
        found = (self._candidate(call) for call in self._program.calls)
        return [one for one in found if one is not None and one.freed_bytes > 0]

    def _candidate(self, call: RecomputableCall) -> Candidate | None:
        program = self._program
        inside = range(call.first_save, call.last_save)
        asks = [self.first_ask[save] for save in inside if save in self.first_ask]
        stop = min(max(program.saves[save].op for save in inside), call.end)
        if not asks or stop <= call.begin:
            return None
        storages = {program.saves[save].storage for save in inside} - {-1}
        freed = sum(program.storages[number].nbytes for number in storages if self._goes(number, [call]))
        held = sum(
            program.arguments[one - len(program.storages)].nbytes for one in call.inputs if one >= len(program.storages)
        )
        ops = program.ops[call.begin : call.end]
        return Candidate(
            call,
            kind_of(program.modules[call.module]),
            stop,
            min(asks),
            sum(self.problem.op_seconds[call.begin : stop]),
            freed - held,
            any("attention" in op.name for op in ops),
            any(op.flops for op in ops),
        )

    def gone(self, names: Sequence[str]) -> frozenset[int]:
        """The storages that are not saved any more where those modules are computed again."""
        modules = self._program.modules
        calls = [one.call for one in self.candidates if modules[one.call.module] in names]
        return frozenset(number for number in self.saves_of if self._goes(number, calls)) if calls else frozenset()

    def _goes(self, storage: int, calls: Sequence[RecomputableCall]) -> bool:
        """Whether a storage is made in one of ``calls`` and saved in them alone."""
        made = self._program.storages[storage].made
        return any(call.begin <= made < call.end for call in calls) and all(
            any(call.first_save <= save < call.last_save for call in calls) for save in self.saves_of[storage]
        )

    def shape(self, chosen: Iterable[Candidate]) -> Shape:
        """The step in which ``chosen`` are computed again, none of which is inside of another."""
        again = sorted(chosen, key=lambda one: (one.asked, -one.call.begin))
        if not again:
            return Shape(self.problem, tuple(range(len(self._program.storages))))
        return _Reshaped(self, again).shape()


class _Reshaped:
    """One step that becomes another. Numbers of operators are those of the first where nothing else is said."""

    def __init__(self, of: Recomputing, again: list[Candidate]) -> None:
        self.problem, self.program, self.again = of.problem, of.problem.program, again
        self._saves_of, self._first_ask = of.saves_of, of.first_ask
        self._asked = [one.asked for one in again]
        #: How many operators were put in before each of them.
        self._before = list(accumulate((one.stop - one.call.begin for one in again), initial=0))
        calls = [one.call for one in again]
        self._ops_in = sorted((call.begin, call.end, place) for place, call in enumerate(calls))
        self._saves_in = sorted((call.first_save, call.last_save, place) for place, call in enumerate(calls))
        count = len(self.program.ops) + self._before[-1]
        self._change = [0] * (count + 1)

    def _begun(self, place: int) -> int:
        """The operator, then, with which that call runs again."""
        return self.again[place].asked + self._before[place]

    def _then(self, op: int) -> int:
        """What ``op`` is then."""
        return op + self._before[bisect_right(self._asked, op)] if op >= self.program.forward_ops else op

    def _until(self, op: int) -> int:
        """The same where ``op`` is the first at which something is not there."""
        return op + self._before[bisect_left(self._asked, op)] if op >= self.program.forward_ops else op

    def _lives(self, nbytes: int, begin: int, end: int) -> None:
        if end > begin:
            self._change[begin] += nbytes
            self._change[min(end, len(self._change) - 1)] -= nbytes

    def shape(self) -> Shape:
        numbers, storages = [], []
        inputs: dict[int, list[int]] = {}
        for place, one in enumerate(self.again):
            for number in one.call.inputs:
                inputs.setdefault(number, []).append(place)
        for number in range(len(self.program.storages) + len(self.program.arguments)):
            found = self._storage(number, inputs.get(number, []))
            if found is not None:
                numbers.append(number)
                storages.append(found)
        order = sorted(range(len(numbers)), key=lambda place: storages[place].saved)
        seconds, ops, other = self._ops()
        program = Program(
            self.program.modules,
            tuple(ops),
            self.program.forward_ops,
            (),
            (),
            tuple(storages[place] for place in order),
            tuple(nbytes + more for nbytes, more in zip(other, accumulate(self._change), strict=False)),
        )
        return Shape(
            replace(self.problem, program=program, op_seconds=seconds), tuple(numbers[place] for place in order)
        )

    def _storage(self, number: int, inputs: list[int]) -> Storage | None:
        """What becomes of a storage that is given to the calls ``inputs``; ``None`` where it may not move any more."""
        program = self.program
        if number >= len(program.storages):
            storage = program.arguments[number - len(program.storages)]
            if not inputs:
                return None
            self._lives(-storage.nbytes, storage.made, storage.freed)
        else:
            storage = program.storages[number]
        places = {save: _place_in(self._saves_in, save) for save in self._saves_of[number]}
        outside = [save for save, place in places.items() if place is None]
        home = _place_in(self._ops_in, storage.made)
        end = self._until(storage.dropped)
        # What an outer graph saves of it: when first, and when it is asked for.
        saved = [program.saves[save].op for save in outside]
        asked = [self._then(self._first_ask[save]) for save in outside if save in self._first_ask]
        ends = [self._until(storage.dropped)] if outside else []
        for place in inputs:
            call = self.again[place]
            saved.append(call.call.begin)
            asked.append(self._begun(place))
            ends.append(self._begun(place) + call.stop - call.call.begin)
        if home is not None and any(place == home for place in places.values()):
            # Once more when its call runs again.
            call = self.again[home]
            self._lives(storage.nbytes, self._begun(home) + storage.made - call.call.begin, end)
        elif any(place is not None for place in places.values()):
            ends.append(end)
        freed = self._until(storage.freed)
        if not saved or not asked:
            kept = home is None and bool(places)  # some object has it that the call was given
            self._lives(storage.nbytes, storage.made, end if kept else freed)
            return None
        first = min(asked)
        return storage._replace(saved=min(saved), asked=first, freed=min(freed, first), dropped=max(*ends, first + 1))

    def _ops(self) -> tuple[list[float], list[Op], list[int]]:
        """Operators, their seconds, and the other bytes, without those that have changed."""
        program, times = self.program, self.problem.op_seconds
        seconds, ops, other = list[float](), list[Op](), list[int]()
        at = 0
        for one in self.again:
            seconds += times[at : one.asked]
            ops += program.ops[at : one.asked]
            other += program.other_bytes[at : one.asked]
            at, begin = one.asked, one.call.begin
            seconds += times[begin : one.stop]
            ops += program.ops[begin : one.stop]
            around = program.other_bytes[max(at - 1, 0) : at + 1]
            other += [min(around, default=0) + one.call.scratch_bytes] * (one.stop - begin)
        return [*seconds, *times[at:]], [*ops, *program.ops[at:]], [*other, *program.other_bytes[at:]]


def _place_in(ranges: list[tuple[int, int, int]], number: int) -> int | None:
    """Which call ``number`` belongs to, by the ranges of calls, none of which is inside of another."""
    found = bisect_right(ranges, number, key=itemgetter(0)) - 1
    return ranges[found][2] if found >= 0 and number < ranges[found][1] else None
