"""Derives the step with recomputed blocks from the trace of the step without checkpoints, and prices their results.

[Note: recomputed blocks]
A checkpoint saves a block's inputs, and a selective policy the results of chosen operators. When backward first unpacks
a value of the block, all other operators up to the block's last save run again, in order. Relative to the trace without
checkpoints:

    forward    has the same operators; of the block's values, only inputs and kept results stay alive
    backward   also has the block's operators, except those with kept results, before the block's first unpack
    values     are made again when their operator runs again, and live to their last use in backward if autograd saves
               them, otherwise until the operator at which forward drops them runs again, or the recompute ends
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, TypeAlias

from eager_offload.eager.checkpointing import has_effects
from eager_offload.planning.program import Op, Program, ProgramSave, ProgramUnpack, Storage, Weight, live_bytes
from eager_offload.stats import KeepReason
from eager_offload.torch_private.calls import schema_of


class Value(NamedTuple):
    """A storage of a traced step, movable or not."""

    nbytes: int
    module: int
    made: int
    freed: int
    """The operator at which forward drops it; equal to ``end`` for a value that autograd keeps alive."""
    end: int
    storage: int
    """Index among the movable storages; -1 if it cannot move."""


class Dispatch(NamedTuple):
    """A call of a forward operator, as seen by a dispatch mode."""

    kind: str
    op: int
    """Index among the operators that take time; -1 for an operator without cost (e.g. a view)."""
    first: int
    last: int
    """It has made the storages of ``values[first:last]``."""
    may_stay: bool


class Kept(NamedTuple):
    """Results that a recomputed block keeps, of operators of one kind."""

    kind: str
    numbers: tuple[int, ...]
    calls: int

    @property
    def name(self) -> str:
        return "attention" if self.kind == _ATTENTION else self.kind.removeprefix("aten.").partition(".")[0]


class Input(NamedTuple):
    value: int
    nbytes: int
    requires_grad: bool
    moved_bytes: int
    reason: KeepReason | None
    """Why it stays if a checkpoint saves it; ``None`` if it may move."""


class Call(NamedTuple):
    """The call of a module that may be recomputed: half-open ranges of operators, saves and dispatches."""

    module: int
    begin: int
    end: int
    first_save: int
    last_save: int
    first_dispatch: int
    last_dispatch: int
    node: int
    """The last node that saved a tensor before the call, if autograd has made no other node since; otherwise -1.
    Autograd attributes the saves of a checkpoint to that node."""
    inputs: tuple[Input, ...]


@dataclass(frozen=True)
class Recording:
    """A traced step, with the values and calls needed to derive steps with recompute."""

    program: Program
    min_bytes: int
    values: tuple[Value, ...]
    saved_values: tuple[int, ...]
    """The value of each save; -1 if it has none."""
    calls: Mapping[str, Call]
    dispatches: tuple[Dispatch, ...]

    def stop(self, call: Call) -> int:
        """Returns the operator before which torch ends the recompute of ``call``."""
        return self.program.saves[call.last_save - 1].op

    def candidates(self, call: Call) -> list[int]:
        stop = self.stop(call)
        return [
            number
            for number in range(call.first_dispatch, call.last_dispatch)
            if (one := self.dispatches[number]).may_stay and 0 <= one.op < stop and one.first < one.last
        ]

    def kept(self, call: Call, dispatches: Collection[int]) -> tuple[Kept, ...]:
        """Returns the results of ``dispatches``, identified by kind and index among the calls of that kind in
        ``call``."""
        calls, numbers = Counter[str](), defaultdict[str, list[int]](list)
        for number in range(call.first_dispatch, call.last_dispatch):
            kind = self.dispatches[number].kind
            if number in dispatches:
                numbers[kind].append(calls[kind])
            calls[kind] += 1
        return tuple(Kept(kind, tuple(each), calls[kind]) for kind, each in numbers.items())


#: The dispatches whose results each recomputed block keeps, by name of the block.
Mixture: TypeAlias = Mapping[str, frozenset[int]]
#: Prices that differ by at most this factor are merged; and the maximum number of levels, including those without
#: recompute and with full recompute.
_ALIKE, _MOST_LEVELS = 1.25, 8
#: In a mixture of two levels: the fractions of the blocks at the level with more recompute, as (part, whole).
_SHARES = ((1, 4), (2, 4), (3, 4))


def levels_of(of: Recording, names: Sequence[str], seconds: Sequence[float]) -> list[Mixture]:
    """Returns the results that the blocks keep at each level, from no recompute to full recompute.

    1. The price of a result is its operator's time divided by its size, in seconds per byte.
    2. Similar prices are merged, so that few levels remain.
    3. Each price is a level: cheaper results are recomputed, the others are kept.
    """
    priced = []
    for name in names:
        call = of.calls[name]
        prices = dict[int, float]()
        for number in of.candidates(call):
            one = of.dispatches[number]
            nbytes = sum(value.nbytes for value in of.values[one.first : one.last])
            if nbytes >= of.min_bytes:
                prices[number] = seconds[one.op] / nbytes
        priced.append(prices)
    steps = list[float]()
    for price in sorted({price for prices in priced for price in prices.values()}):
        if not steps or price > _ALIKE * steps[-1]:
            steps.append(price)
    while len(steps) > _MOST_LEVELS - 2:  # merge the two closest prices
        place = min(range(1, len(steps)), key=lambda at: steps[at] / steps[at - 1])
        del steps[place]
    rows: list[Mixture] = [{}]
    for step in steps:
        kept = (frozenset(number for number, price in prices.items() if price >= step) for prices in priced)
        rows.append(dict(zip(names, kept, strict=True)))
    return [*rows, dict.fromkeys(names, frozenset())]


def mixtures(names: Sequence[str], levels: Sequence[Mixture]) -> list[Mixture]:
    """Returns the mixtures of the blocks: all at one level, or at two that alternate evenly."""
    found = [*levels]
    for at, more in enumerate(levels):
        for less in levels[:at]:
            for part, whole in _SHARES:
                rows = [
                    more if (number + 1) * part // whole > number * part // whole else less
                    for number in range(len(names))
                ]
                mixture = {name: row[name] for name, row in zip(names, rows, strict=True) if name in row}
                if mixture not in found:
                    found.append(mixture)
    return found


@dataclass
class _Run:
    call: Call
    #: Kept results: the index of the dispatch, the dispatch, and a value that it made.
    kept: list[tuple[int, Dispatch, int]]
    again: list[int]
    #: The operator before which the recompute begins, in the step without checkpoints and in the derived step.
    unpacked_at: int
    start: int
    #: By operator of the block, the number of operators that run again before it.
    before: dict[int, int] = field(default_factory=dict)
    #: The operator of the derived step at which the block's values and saved arguments are freed.
    gone: int = -1

    @property
    def end(self) -> int:
        return self.start + len(self.again)

    def at(self, op: int) -> int:
        """Returns the operator of the derived step that recomputes the result of forward's ``op``."""
        return self.start + self.before.get(op, len(self.again))


@dataclass
class _New:
    """A movable storage of the derived step, under construction; operators of forward keep their numbers."""

    value: Value
    freed: int
    moved_bytes: int
    is_forced: bool = False
    saved: int = -1
    unpacked_at: int = -1
    dropped: int = 0

    def save(self, op: int) -> None:
        self.saved = op if self.saved < 0 else min(op, self.saved)

    def unpack(self, op: int, dropped: int) -> None:
        self.unpacked_at = op if self.unpacked_at < 0 else min(op, self.unpacked_at)
        self.dropped = max(self.dropped, dropped)


def with_recompute(of: Recording, kept: Mixture) -> Program:
    """Returns the step in which the modules of ``kept`` are recomputed: see [Note: recomputed blocks].

    Args:
        of: the step without checkpoints.
        kept: the dispatches (of :meth:`Recording.candidates`) whose results each module keeps, by name.
    """
    runs = _runs(of, kept)
    return _Rewriter(of, runs).program() if runs else of.program


def _runs(of: Recording, kept: Mixture) -> list[_Run]:
    """Returns the recomputes in the order of backward; a block that backward does not unpack from has none."""
    program, of_save = of.program, dict[int, str]()
    for name in kept:
        of_save.update(dict.fromkeys(range(of.calls[name].first_save, of.calls[name].last_save), name))
    found, added = dict[str, _Run](), 0
    for unpack in program.unpacks:
        name = of_save.get(unpack.save, "")
        if not name or name in found:
            continue
        call, dispatches = of.calls[name], [(number, of.dispatches[number]) for number in sorted(kept[name])]
        left_out = {one.op for _, one in dispatches}
        results = [(number, one, value) for number, one in dispatches for value in range(one.first, one.last)]
        again = [op for op in range(call.begin, of.stop(call)) if op not in left_out]
        run = found[name] = _Run(call, results, again, unpack.op, unpack.op + added)
        ran = 0
        for op in range(call.begin, of.stop(call)):
            run.before[op] = ran
            ran += op not in left_out
        added += len(again)
    return [*found.values()]


def _policed(of: Recording, run: _Run) -> dict[int, Op]:
    """Returns the operators of a block that has a selective policy, each with the number of calls of the policy since
    the operator before it."""
    found, waiting = dict[int, Op](), 0
    for dispatch in of.dispatches[run.call.first_dispatch : run.call.last_dispatch]:
        waiting += 1
        if dispatch.op >= 0:
            found[dispatch.op] = of.program.ops[dispatch.op]._replace(policies=waiting)
            waiting = 0
    return found


class _Rewriter:
    def __init__(self, of: Recording, runs: list[_Run]) -> None:
        self.of, self.runs, self.old = of, runs, of.program
        again: dict[int, list[Op]] = defaultdict(list)
        with_policy = dict[int, Op]()
        for run in runs:
            policed = _policed(of, run) if run.kept else dict[int, Op]()
            with_policy.update(policed)
            again[run.unpacked_at] += [policed.get(op, self.old.ops[op]) for op in run.again]
        self.ops: list[Op] = []
        #: By operator, two places in the derived step: the operator's own, at which its values are made; and the start
        #: of the recompute before it, or its own place without one, at which the values that it frees are freed.
        self._from, self._until = list[int](), list[int]()
        for op, one in enumerate((*self.old.ops, None)):
            self._until.append(len(self.ops))
            self.ops += again[op]
            self._from.append(len(self.ops))
            if one is not None:
                self.ops.append(with_policy.get(op, one))
        self.run_of_save = {save: run for run in runs for save in range(run.call.first_save, run.call.last_save)}
        #: By value, the recompute whose block made it.
        self.maker: dict[int, _Run] = {}
        for run in runs:
            for dispatch in of.dispatches[run.call.first_dispatch : run.call.last_dispatch]:
                self.maker.update(dict.fromkeys(range(dispatch.first, dispatch.last), run))
        #: By value, the recomputes that take it as an input, and the dispatch whose kept result it is.
        self.given: dict[int, list[tuple[_Run, Input]]] = defaultdict(list)
        self.kept: dict[int, int] = {}
        for run in runs:
            for given in run.call.inputs:
                self.given[given.value].append((run, given))
            self.kept.update((value, number) for number, _, value in run.kept)
        #: By value, its saves and unpacks in the step without checkpoints.
        self.saves_of: dict[int, list[int]] = defaultdict(list)
        self.unpacks_of: dict[int, list[ProgramUnpack]] = defaultdict(list)
        for save, value in enumerate(of.saved_values):
            self.saves_of[value].append(save)
        for unpack in self.old.unpacks:
            self.unpacks_of[of.saved_values[unpack.save]].append(unpack)
        for unpack in self.old.unpacks:
            if (recompute := self.run_of_save.get(unpack.save)) is not None:
                recompute.gone = max(recompute.gone, recompute.end, self._from[unpack.op] + 1)
        self.spans: list[tuple[int, int, int]] = []
        self.new: dict[int, _New] = {}

    def program(self) -> Program:
        for number, value in enumerate(self.of.values):
            run = self.maker.get(number)
            if run is None:
                self._outside(number, value)
            else:
                self._inside(number, value, run)
        saves, numbers, renamed = self._saves()
        storages = [
            Storage(
                one.value.nbytes,
                one.moved_bytes,
                one.value.module,
                self._from[one.value.made],
                self._until[one.freed],
                one.saved,
                one.unpacked_at,
                max(one.dropped, one.unpacked_at + 1),
                one.is_forced,
            )
            for one in (self.new[value] for value in numbers)
        ]
        weights = tuple(
            Weight(one.name, one.nbytes, one.gradient_bytes, self._from[one.gradient_made]) for one in self.old.weights
        )
        other_bytes = tuple(live_bytes(len(self.ops), self.spans))
        return replace(
            self.old,
            ops=tuple(self.ops),
            saves=tuple(saves),
            unpacks=tuple(self._unpacks(renamed)),
            storages=tuple(storages),
            other_bytes=other_bytes,
            weights=weights,
        )

    def _outside(self, number: int, value: Value) -> None:
        given = self.given[number]
        ends = [self._until[value.end], *(run.gone for run, _ in given)]
        new = self._movable(number, value, [*self.saves_of[number]], given, value.freed)
        if new is None:
            self.spans.append((value.nbytes, self._from[value.made], max(ends)))

    def _inside(self, number: int, value: Value, run: _Run) -> None:
        saves = self.saves_of[number]
        inner = [save for save in saves if self.run_of_save.get(save) is run]
        outer = [save for save in saves if self.run_of_save.get(save) is not run]
        given = [(other, one) for other, one in self.given[number] if other is not run]
        freed = value.freed
        if inner and value.storage < 0:
            freed = min(freed, run.call.end)  # without the checkpoint, autograd kept it until backward
        stop, dispatch = self.of.stop(run.call), self.kept.get(number, -1)
        again_end = self._until[value.end] if inner else run.end if freed >= stop else run.at(freed)
        if dispatch >= 0:
            at = run.at(value.made)
            if value.nbytes < self.of.min_bytes:
                self.spans.append((value.nbytes, value.made, max(again_end, at)))
                return
            new = self._movable(number, value, outer, given, freed, is_kept=True)
            if new is None:
                new = self.new[number] = _New(value, freed, value.nbytes)
            new.save(value.made + 1)
            new.unpack(at, again_end)
            return
        if (outer or given) and self._movable(number, value, outer, given, freed) is None:
            self.spans.append(
                (value.nbytes, value.made, max(self._until[value.end], *(other.gone for other, _ in given), 0))
            )
        elif not (outer or given):
            self.spans.append((value.nbytes, value.made, self._until[freed]))
        if value.made < stop:
            self.spans.append((value.nbytes, run.at(value.made), again_end))

    def _movable(
        self,
        number: int,
        value: Value,
        saves: list[int],
        given: list[tuple[_Run, Input]],
        freed: int,
        *,
        is_kept: bool = False,
    ) -> _New | None:
        """Returns the storage that ``saves`` and the calls of ``given`` save; ``None`` if it cannot move."""
        unpacks = [unpack for unpack in self.unpacks_of[number] if unpack.save in saves]
        if value.storage < 0 and (saves or not given or any(one.reason is not None for _, one in given)):
            return None
        if freed > min([*(run.unpacked_at for run, _ in given), *(unpack.op for unpack in unpacks)], default=-1):
            return None
        old = None if value.storage < 0 else self.old.storages[value.storage]
        new = self.new[number] = _New(value, freed, value.nbytes if is_kept else 0)
        if old is not None:
            new.moved_bytes, new.is_forced = max(old.moved_bytes, new.moved_bytes), old.is_forced
        # If its own block saves it too, the recomputed copy lives to the end, and this one does not.
        is_last = all(self.run_of_save.get(save) is not self.maker.get(number, self) for save in self.saves_of[number])
        for save in saves:
            run = self.run_of_save.get(save)
            new.save(self.old.saves[save].op if run is None else run.call.begin)
        for unpack in unpacks:
            run = self.run_of_save.get(unpack.save)
            dropped = self._until[value.end] if is_last else self._from[unpack.op] + 1
            new.unpack(self._from[unpack.op] if run is None else run.start, dropped)
        for run, one in given:
            new.moved_bytes = max(new.moved_bytes, one.moved_bytes)
            new.save(run.call.begin)
            new.unpack(run.start, run.gone)
        return new

    def _saves(self) -> tuple[list[ProgramSave], dict[int, int], dict[object, int]]:
        """Returns the saves, the index of each storage by value, and the index of each save by its origin."""
        found, numbers, renamed, nodes = list[ProgramSave](), dict[int, int](), dict[object, int](), dict[object, int]()

        def add(key: object, node: object, one: ProgramSave, value: int) -> None:
            storage = -1
            if value in self.new and one.reason is None:
                storage = numbers.setdefault(value, len(numbers))
            renamed[key] = len(found)
            found.append(one._replace(storage=storage, node=nodes.setdefault(node, len(nodes))))

        begins = {run.call.first_save: run for run in self.runs}
        for save, one in enumerate(self.old.saves):
            if (run := begins.get(save)) is not None:
                call = run.call
                for place, given in enumerate(call.inputs):
                    made = ProgramSave(given.nbytes, given.requires_grad, given.reason, -1, call.begin)
                    add((id(run), "input", place), id(run) if call.node < 0 else call.node, made, given.value)
                for number, dispatch, value in run.kept:
                    nbytes = self.of.values[value].nbytes
                    reason = KeepReason.SMALL if nbytes < self.of.min_bytes else None
                    made = ProgramSave(nbytes, False, reason, -1, dispatch.op + 1)
                    add((id(run), "kept", value), (id(run), number), made, value)
            if save not in self.run_of_save:
                add(save, one.node, one, self.of.saved_values[save])
        return found, numbers, renamed

    def _unpacks(self, renamed: Mapping[object, int]) -> Iterable[ProgramUnpack]:
        begun, added = set[int](), 0
        for unpack in self.old.unpacks:
            run = self.run_of_save.get(unpack.save)
            if run is None:
                yield ProgramUnpack(renamed[unpack.save], unpack.op + added)
            elif id(run) not in begun:
                begun.add(id(run))
                for place in range(len(run.call.inputs)):
                    yield ProgramUnpack(renamed[id(run), "input", place], run.start)
                for _, dispatch, value in run.kept:
                    yield ProgramUnpack(renamed[id(run), "kept", value], run.at(dispatch.op))
                added += len(run.again)


def kind_of_call(func: Any) -> str:
    return _ATTENTION if _ATTENTION in str(func) else str(func)


#: A part of the names of all attention kernels, which differ between devices.
_ATTENTION = "scaled_dot_product"


def has_steady_results(func: Any, args: Sequence[Any], named: Mapping[str, Any]) -> bool:
    """Returns whether the results of the call may be kept: ``func`` must not write, draw random numbers or
    communicate."""
    if getattr(func, "namespace", "") not in ("aten", "prims"):
        return False  # unknown operators may draw random numbers
    if not has_effects(func):
        return True
    schema = schema_of(func)
    if _ATTENTION not in str(func) or schema is None or schema.is_mutable:
        return False
    given = {**dict(zip((one.name for one in schema.arguments), args, strict=False)), **named}
    return bool(given.get("dropout_p", 0.0) == 0.0)
