"""What a step becomes where parts of it are computed again: worked out from the one trace, without tracing anew.

[Note: a block that is computed again]
``torch.utils.checkpoint`` saves what a block is given, and torch's selective policy the results of operators that it is
told to. In backward, where the first value of the block is asked for, every other operator runs once more, needed or
not, in the order of forward, up to the last value that the block saves. So of the trace of a step without checkpoints

    forward    keeps its operators; of the block's values only inputs and results that are kept stay
    backward   has the operators of the block before the first one that asks, without those whose results are kept
    a value    lives again from the operator that makes it: to its last use in backward if autograd saves it, else as
               long as in forward, but no longer than the recomputation
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
    """A storage of a traced step, whether it may move or not."""

    nbytes: int
    module: int
    made: int
    freed: int
    """From this operator on forward does not hold it any more; for one that autograd keeps, nobody."""
    end: int
    """From this operator on nobody does."""
    storage: int
    """Its number among those that may move; -1 for none."""


class Dispatch(NamedTuple):
    """An operator of forward, as a dispatch mode meets it."""

    kind: str
    op: int
    """Its number among the operators that take time; -1 for a view and the like."""
    first: int
    last: int
    """The storages that it has made are those values, without the last one."""
    may_stay: bool
    """Whether its results can be kept in place of running it again."""


class Kept(NamedTuple):
    """Results that a block keeps where it is computed again, of operators of one kind."""

    kind: str
    numbers: tuple[int, ...]
    """Of the calls of such operators in the block, the first one is 0."""
    calls: int
    """Of such operators in the whole block."""

    @property
    def name(self) -> str:
        """For a reader."""
        return "attention" if self.kind == _ATTENTION else self.kind.removeprefix("aten.").partition(".")[0]


class Input(NamedTuple):
    """A tensor among the arguments of a block."""

    value: int
    nbytes: int
    requires_grad: bool
    moved_bytes: int
    reason: KeepReason | None
    """Why it would stay where a checkpoint saves it; ``None`` for one that may move."""


class Call(NamedTuple):
    """The call of a module that may be computed again. Saves, operators and dispatches are numbers from, and until."""

    module: int
    begin: int
    end: int
    first_save: int
    last_save: int
    first_dispatch: int
    last_dispatch: int
    node: int
    """The number of the node that has saved something last, if autograd has made no other one since; else -1. To
    autograd what a checkpoint saves is of that node."""
    inputs: tuple[Input, ...]


@dataclass(frozen=True)
class Recording:
    """All that is known of a traced step."""

    program: Program
    min_bytes: int
    values: tuple[Value, ...]
    saved_values: tuple[int, ...]
    """For each save its value; -1 for none."""
    calls: Mapping[str, Call]
    """Of the modules that may be computed again, by name."""
    dispatches: tuple[Dispatch, ...]

    def stop(self, call: Call) -> int:
        """Returns the operator before which torch stops to compute ``call`` again."""
        return self.program.saves[call.last_save - 1].op

    def candidates(self, call: Call) -> list[int]:
        """Returns the dispatches of ``call`` whose results may be kept in place of running them again."""
        stop = self.stop(call)
        return [
            number
            for number in range(call.first_dispatch, call.last_dispatch)
            if (one := self.dispatches[number]).may_stay and 0 <= one.op < stop and one.first < one.last
        ]

    def kept(self, call: Call, dispatches: Collection[int]) -> tuple[Kept, ...]:
        """Returns what names the results of those dispatches of ``call`` when it is called."""
        calls, numbers = Counter[str](), defaultdict[str, list[int]](list)
        for number in range(call.first_dispatch, call.last_dispatch):
            kind = self.dispatches[number].kind
            if number in dispatches:
                numbers[kind].append(calls[kind])
            calls[kind] += 1
        return tuple(Kept(kind, tuple(each), calls[kind]) for kind, each in numbers.items())


# -- levels -----------------------------------------------------------------------------------------------------------

#: By name of a block that is computed again, the dispatches whose results it keeps.
Mixture: TypeAlias = Mapping[str, frozenset[int]]
#: Prices that differ by less than this factor are one; and levels at most, with nothing and the whole block.
_ALIKE, _MOST_LEVELS = 1.25, 8
#: In so many of so many blocks the first one of two levels is taken.
_SHARES = ((1, 4), (2, 4), (3, 4))


def levels_of(of: Recording, names: Sequence[str], seconds: Sequence[float]) -> list[Mixture]:
    """Returns what these blocks keep at each level, from nothing computed again to the whole blocks.

    The price of a result is the seconds of its operator for a byte of it. A level is one price: what is cheaper is
    computed again, the rest is kept. Prices that are alike are one, so that few levels remain.
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
    while len(steps) > _MOST_LEVELS - 2:  # the two that are most alike become one
        place = min(range(1, len(steps)), key=lambda at: steps[at] / steps[at - 1])
        del steps[place]
    rows: list[Mixture] = [{}]
    for step in steps:
        kept = (frozenset(number for number, price in prices.items() if price >= step) for prices in priced)
        rows.append(dict(zip(names, kept, strict=True)))
    return [*rows, dict.fromkeys(names, frozenset())]


def mixtures(names: Sequence[str], levels: Sequence[Mixture]) -> list[Mixture]:
    """Returns what those blocks may keep together: all of one level, or of two that alternate evenly."""
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
    """A block that is computed again."""

    call: Call
    #: What it keeps: the number of each dispatch, the dispatch, and a value that it has made.
    kept: list[tuple[int, Dispatch, int]]
    again: list[int]
    #: The operator of the step without checkpoints before which it begins, and where that is in the step that is made.
    asked: int
    start: int
    #: By operator of the block, how many of those that run again come before it.
    before: dict[int, int] = field(default_factory=dict)
    #: From this operator on nothing of the block is there, and with it what was saved of its arguments.
    gone: int = -1

    @property
    def end(self) -> int:
        return self.start + len(self.again)

    def at(self, op: int) -> int:
        """Returns where what ``op`` of forward makes is made once more."""
        return self.start + self.before.get(op, len(self.again))


@dataclass
class _New:
    """A storage that may move in the step that is made, as far as it is known."""

    value: Value
    freed: int
    moved_bytes: int
    is_forced: bool = False
    saved: int = -1
    asked: int = -1
    dropped: int = 0

    def save(self, op: int) -> None:
        self.saved = op if self.saved < 0 else min(op, self.saved)

    def ask(self, op: int, dropped: int) -> None:
        self.asked = op if self.asked < 0 else min(op, self.asked)
        self.dropped = max(self.dropped, dropped)


def computed_again(of: Recording, kept: Mixture) -> Program:
    """Returns the step in which those modules are computed again.

    Args:
        of: the step without checkpoints.
        kept: by name of a module, which of :meth:`Recording.candidates` it keeps the results of.
    """
    runs = _runs(of, kept)
    return _Maker(of, runs).program() if runs else of.program


def _runs(of: Recording, kept: Mixture) -> list[_Run]:
    """Returns them in the order in which backward comes to them; what it asks nothing of is not run again."""
    program, of_save = of.program, dict[int, str]()
    for name in kept:
        of_save.update(dict.fromkeys(range(of.calls[name].first_save, of.calls[name].last_save), name))
    found, added = dict[str, _Run](), 0
    for ask in program.unpacks:
        name = of_save.get(ask.save, "")
        if not name or name in found:
            continue
        call, dispatches = of.calls[name], [(number, of.dispatches[number]) for number in sorted(kept[name])]
        left_out = {one.op for _, one in dispatches}
        results = [(number, one, value) for number, one in dispatches for value in range(one.first, one.last)]
        again = [op for op in range(call.begin, of.stop(call)) if op not in left_out]
        run = found[name] = _Run(call, results, again, ask.op, ask.op + added)
        ran = 0
        for op in range(call.begin, of.stop(call)):
            run.before[op] = ran
            ran += op not in left_out
        added += len(again)
    return [*found.values()]


def _policed(of: Recording, run: _Run) -> dict[int, Op]:
    """Returns the operators of a block that a policy is asked of, each with the views and the like before it."""
    found, waiting = dict[int, Op](), 0
    for dispatch in of.dispatches[run.call.first_dispatch : run.call.last_dispatch]:
        waiting += 1
        if dispatch.op >= 0:
            found[dispatch.op] = of.program.ops[dispatch.op]._replace(policies=waiting)
            waiting = 0
    return found


class _Maker:
    def __init__(self, of: Recording, runs: list[_Run]) -> None:
        self.of, self.runs, self.old = of, runs, of.program
        again: dict[int, list[Op]] = defaultdict(list)
        #: Operators of forward whose block has a policy.
        asked = dict[int, Op]()
        for run in runs:
            policed = _policed(of, run) if run.kept else dict[int, Op]()
            asked.update(policed)
            again[run.asked] += [policed.get(op, self.old.ops[op]) for op in run.again]
        self.ops: list[Op] = []
        #: By operator, where it is in the step that is made, and where what runs again before it begins: what dies at
        #: an operator dies before that, and what is made there is made behind it.
        self._from, self._until = list[int](), list[int]()
        for op, one in enumerate((*self.old.ops, None)):
            self._until.append(len(self.ops))
            self.ops += again[op]
            self._from.append(len(self.ops))
            if one is not None:
                self.ops.append(asked.get(op, one))
        self.run_of_save = {save: run for run in runs for save in range(run.call.first_save, run.call.last_save)}
        #: By value, the run whose block has made it; what was there before is none's.
        self.maker: dict[int, _Run] = {}
        for run in runs:
            for dispatch in of.dispatches[run.call.first_dispatch : run.call.last_dispatch]:
                self.maker.update(dict.fromkeys(range(dispatch.first, dispatch.last), run))
        #: By value, the runs that are given it, and the dispatch whose result a run keeps.
        self.given: dict[int, list[tuple[_Run, Input]]] = defaultdict(list)
        self.kept: dict[int, int] = {}
        for run in runs:
            for given in run.call.inputs:
                self.given[given.value].append((run, given))
            self.kept.update((value, number) for number, _, value in run.kept)
        #: By value, saves of it, and asks: where they come in the step without checkpoints.
        self.saves_of: dict[int, list[int]] = defaultdict(list)
        self.asks_of: dict[int, list[ProgramUnpack]] = defaultdict(list)
        for save, value in enumerate(of.saved_values):
            self.saves_of[value].append(save)
        for ask in self.old.unpacks:
            self.asks_of[of.saved_values[ask.save]].append(ask)
        for ask in self.old.unpacks:
            if (asking := self.run_of_save.get(ask.save)) is not None:
                asking.gone = max(asking.gone, asking.end, self._from[ask.op] + 1)
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
                one.asked,
                max(one.dropped, one.asked + 1),
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
            unpacks=tuple(self._asks(renamed)),
            storages=tuple(storages),
            other_bytes=other_bytes,
            weights=weights,
        )

    # -- values -------------------------------------------------------------------------------------------------------

    def _live(self, value: Value, begin: int, end: int) -> None:
        self.spans.append((value.nbytes, begin, end))

    def _outside(self, number: int, value: Value) -> None:
        """What no block that is computed again has made."""
        given = self.given[number]
        ends = [self._until[value.end], *(run.gone for run, _ in given)]
        new = self._movable(number, value, [*self.saves_of[number]], given, value.freed)
        if new is None:
            self._live(value, self._from[value.made], max(ends))

    def _inside(self, number: int, value: Value, run: _Run) -> None:
        saves = self.saves_of[number]
        inner = [save for save in saves if self.run_of_save.get(save) is run]
        outer = [save for save in saves if self.run_of_save.get(save) is not run]
        given = [(other, one) for other, one in self.given[number] if other is not run]
        freed = value.freed
        if inner and value.storage < 0:
            freed = min(freed, run.call.end)  # autograd has kept it until backward
        stop, dispatch = self.of.stop(run.call), self.kept.get(number, -1)
        again_end = self._until[value.end] if inner else run.end if freed >= stop else run.at(freed)
        if dispatch >= 0:
            at = run.at(value.made)
            if value.nbytes < self.of.min_bytes:
                self._live(value, value.made, max(again_end, at))
                return
            new = self._movable(number, value, outer, given, freed, is_kept=True)
            if new is None:
                new = self.new[number] = _New(value, freed, value.nbytes)
            new.save(value.made + 1)
            new.ask(at, again_end)
            return
        if (outer or given) and self._movable(number, value, outer, given, freed) is None:
            self._live(value, value.made, max(self._until[value.end], *(other.gone for other, _ in given), 0))
        elif not (outer or given):
            self._live(value, value.made, self._until[freed])
        if value.made < stop:
            self._live(value, run.at(value.made), again_end)

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
        """Returns a storage that those saves and calls of blocks have; ``None`` where it may not move."""
        unpacks = [ask for ask in self.asks_of[number] if ask.save in saves]
        if value.storage < 0 and (saves or not given or any(one.reason is not None for _, one in given)):
            return None
        if freed > min([*(run.asked for run, _ in given), *(ask.op for ask in unpacks)], default=-1):
            return None
        old = None if value.storage < 0 else self.old.storages[value.storage]
        new = self.new[number] = _New(value, freed, value.nbytes if is_kept else 0)
        if old is not None:
            new.moved_bytes, new.is_forced = max(old.moved_bytes, new.moved_bytes), old.is_forced
        # Of what its own block saves too, the end is that of the block's.
        is_last = all(self.run_of_save.get(save) is not self.maker.get(number, self) for save in self.saves_of[number])
        for save in saves:
            run = self.run_of_save.get(save)
            new.save(self.old.saves[save].op if run is None else run.call.begin)
        for ask in unpacks:
            run = self.run_of_save.get(ask.save)
            dropped = self._until[value.end] if is_last else self._from[ask.op] + 1
            new.ask(self._from[ask.op] if run is None else run.start, dropped)
        for run, one in given:
            new.moved_bytes = max(new.moved_bytes, one.moved_bytes)
            new.save(run.call.begin)
            new.ask(run.start, run.gone)
        return new

    # -- saves and asks -----------------------------------------------------------------------------------------------

    def _saves(self) -> tuple[list[ProgramSave], dict[int, int], dict[object, int]]:
        """Returns them; the numbers of storages by value; and the numbers of saves, by what each stands for."""
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
                    nbytes = self.of.values[given.value].nbytes
                    made = ProgramSave(given.nbytes, given.requires_grad, given.reason, -1, nbytes, call.begin)
                    add((id(run), "input", place), id(run) if call.node < 0 else call.node, made, given.value)
                for number, dispatch, value in run.kept:
                    nbytes = self.of.values[value].nbytes
                    reason = KeepReason.SMALL if nbytes < self.of.min_bytes else None
                    made = ProgramSave(nbytes, False, reason, -1, nbytes, dispatch.op + 1)
                    add((id(run), "kept", value), (id(run), number), made, value)
            if save not in self.run_of_save:
                add(save, one.node, one, self.of.saved_values[save])
        return found, numbers, renamed

    def _asks(self, renamed: Mapping[object, int]) -> Iterable[ProgramUnpack]:
        """Yields them in order."""
        begun, added = set[int](), 0
        for ask in self.old.unpacks:
            run = self.run_of_save.get(ask.save)
            if run is None:
                yield ProgramUnpack(renamed[ask.save], ask.op + added)
            elif id(run) not in begun:
                begun.add(id(run))
                for place in range(len(run.call.inputs)):
                    yield ProgramUnpack(renamed[id(run), "input", place], run.start)
                for _, dispatch, value in run.kept:
                    yield ProgramUnpack(renamed[id(run), "kept", value], run.at(dispatch.op))
                added += len(run.again)


# -- operators --------------------------------------------------------------------------------------------------------


def kind_of_call(func: Any) -> str:
    """Returns the name by which calls of ``func`` are counted: one for all kernels that attend."""
    return _ATTENTION if _ATTENTION in str(func) else str(func)


#: A part of the names of kernels that attend, of which a device has its own.
_ATTENTION = "scaled_dot_product"


def has_steady_results(func: Any, args: Sequence[Any], named: Mapping[str, Any]) -> bool:
    """Returns whether a call of ``func`` does nothing but make new results, which may be kept in place of running it
    again: it writes nothing, draws no random number, and does not communicate."""
    if getattr(func, "namespace", "") not in ("aten", "prims"):
        return False  # nothing says whether it draws
    if not has_effects(func):
        return True
    schema = schema_of(func)
    if _ATTENTION not in str(func) or schema is None or schema.is_mutable:
        return False
    given = {**dict(zip((one.name for one in schema.arguments), args, strict=False)), **named}
    return bool(given.get("dropout_p", 0.0) == 0.0)  # then an attention draws none
