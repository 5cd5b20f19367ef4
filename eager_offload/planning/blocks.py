"""Lifetimes of the storages of a traced step, their saves, and the module calls that may be recomputed.

[Note: lifetimes]
The trace's pack hook keeps no movable tensor, and its unpack hook makes a new one. So a storage dies in the trace when
forward drops it, as if it had been offloaded, and its copy in backward dies when it would be dropped there. Weak
references notice both. Their callbacks only append to a queue, which is processed at the next operator.
"""

from __future__ import annotations

import weakref
from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from eager_offload.compile.decide import OperatorCall
from eager_offload.core.selection import footprint, logical_bytes, reason_to_stay
from eager_offload.marks import Mark
from eager_offload.planning.levels import Call, Input, Value
from eager_offload.planning.numbers import state_of_others
from eager_offload.planning.program import Storage, live_bytes
from eager_offload.torch_private.calls import schema_of, without_dispatch_modes
from eager_offload.torch_private.memory import is_fake, storage_key, storage_of, tensors_in, tree_iter


@dataclass(eq=False, slots=True)
class Block:
    nbytes: int
    made: int
    module: int
    number: int
    #: The operator at which forward has dropped it; ``None`` while it lives.
    freed: int | None = None
    #: The operators after its first save and its first unpack, and at which the last graph has dropped it.
    saved: int | None = None
    unpacked_at: int | None = None
    dropped: int | None = None
    #: Whether its size is a guess, because only a kernel knows it.
    is_guess: bool = False
    #: Whether its first appearance was a save: neither an input nor the result of an operator.
    is_outside: bool = False
    mark: Mark | None = None
    #: Bytes to move by saved view; the key ``None`` is the whole storage.
    moved: dict[object, int] = field(default_factory=dict)
    weak_saved: weakref.ref[SavedBlock] | None = None


@dataclass(eq=False, slots=True)
class Use:
    """Whether any of the handles of a ``SavedBlock`` was unpacked: graphs may be dropped while forward goes on."""

    is_unpacked: bool = False


class SavedBlock:
    """The object that graphs hold in place of a movable block; it lives as long as any of the block's handles."""

    def __init__(self, block: Block, tensor: Tensor) -> None:
        self.block, self.use = block, Use()
        self._place = tensor.device
        self._known: torch.UntypedStorage | None = None
        if not is_fake(type(tensor)):
            with without_dispatch_modes():
                self._known = tensor.untyped_storage().clone()  # type: ignore[no-untyped-call]  # no types
        self._copies: dict[torch.dtype, Tensor] = {}

    def copy(self, dtype: torch.dtype) -> Tensor:
        found = self._copies.get(dtype)
        if found is None:
            length, place = self.block.nbytes // dtype.itemsize, self._place
            if self._known is None:
                found = torch.empty(length, dtype=dtype, device=place)
            else:
                with without_dispatch_modes():
                    found = torch.empty(0, dtype=dtype, device=place).set_(self._known, 0, (length,), (1,))
            self._copies[dtype] = found
        return found


class Blocks:
    """All storages of a trace; used by the tracing thread only."""

    def __init__(self) -> None:
        self._by_key: dict[int, tuple[Block, weakref.ref[torch.UntypedStorage]]] = {}
        #: All blocks in the order of creation, and the saved ones in the order of their first saves.
        self.all: list[Block] = []
        self.saved: list[Block] = []
        #: Deaths: the dead reference, its block, and the key of a storage; ``None`` for handles and reloaded copies.
        self._deaths: deque[tuple[object, Block, int | None]] = deque()
        self._weak: dict[int, weakref.ref[Any]] = {}

    def note_deaths(self, op: int) -> None:
        """Records ``op`` as the end of everything that has died since the last call."""
        while self._deaths:
            weak, block, key = self._deaths.popleft()
            self._weak.pop(id(weak), None)
            if key is None:
                block.dropped = op
                continue
            block.freed = op
            if (found := self._by_key.get(key)) is not None and found[0] is block:
                del self._by_key[key]

    def are_alive(self) -> bool:
        return any(weak() is not None for block, weak in [*self._by_key.values()] if not block.is_outside)

    def has(self, tensor: Tensor) -> bool:
        return (block := self.of(tensor)) is not None and not block.is_outside

    def of(self, tensor: Tensor) -> Block | None:
        storage = storage_of(tensor)  # without its size, which tensors of other traces may not have
        if storage is None:
            return None
        found = self._by_key.get(storage_key(storage))
        return found[0] if found is not None and found[1]() is storage else None

    def add(self, tensor: Tensor, op: int, module: int) -> Block | None:
        """Returns the block of ``tensor``, made by ``op`` if it is new; ``None`` for a tensor without bytes."""
        storage = _storage_of(tensor)
        if storage is None:
            return None
        known = self.of(tensor)
        if known is not None:
            return known
        block = Block(storage.nbytes(), op, module, len(self.all))
        key, deaths = storage_key(storage), self._deaths
        self._by_key[key] = block, weakref.ref(storage, lambda weak: deaths.append((weak, block, key)))
        self.all.append(block)
        return block

    def lacks(self, tensor: Tensor) -> bool:
        return _storage_of(tensor) is not None and not self.has(tensor)

    def save(self, block: Block, tensor: Tensor, op: int) -> SavedBlock:
        saved = None if block.weak_saved is None else block.weak_saved()
        if saved is None:
            saved = SavedBlock(block, tensor)
            block.weak_saved = self._watch(saved, block)
            if block.saved is None:
                self.saved.append(block)
            if block.unpacked_at is None:  # earlier saves were dropped
                block.saved = op
        area = footprint(tensor, block.nbytes)
        view = None if area.whole else (tensor.storage_offset(), tensor.size(), tensor.stride(), tensor.dtype)
        block.moved[view] = area.moved
        return saved

    def unpack(self, saved: SavedBlock, dtype: torch.dtype, op: int) -> Tensor:
        """Records an unpack, and returns the reloaded storage as a one-dimensional tensor."""
        block = saved.block
        saved.use.is_unpacked = True
        if block.unpacked_at is None:
            block.unpacked_at = op
        copy = saved.copy(dtype)
        storage = copy.untyped_storage()
        self._by_key[storage_key(storage)] = block, self._watch(storage, block)  # views of the copy are of `block`
        return copy

    def _watch(self, owner: Any, block: Block) -> weakref.ref[Any]:
        deaths = self._deaths
        weak = weakref.ref(owner, lambda weak: deaths.append((weak, block, None)))
        self._weak[id(weak)] = weak
        return weak

    def result(self, ops: int) -> tuple[dict[Block, int], tuple[Storage, ...], tuple[Value, ...], tuple[int, ...]]:
        """Returns the index of each movable block, the movable storages, all storages, and the bytes of the others that
        live at each of ``ops`` operators, once the step is over."""
        storages, values, numbers = list[Storage](), list[Value](), dict[Block, int]()
        for one in self.saved:
            # Movable: backward unpacks it, and only autograd holds it by then.
            saved, unpacked, freed = one.saved, one.unpacked_at, one.freed
            if one.mark is Mark.KEEP or saved is None or unpacked is None or freed is None or freed > unpacked:
                continue
            numbers[one] = len(storages)
            moved = one.nbytes if None in one.moved else min(sum(one.moved.values()), one.nbytes)
            dropped, is_forced = max(ops if one.dropped is None else one.dropped, unpacked + 1), one.mark is Mark.PREFER
            span = one.made, freed, saved, unpacked, dropped
            storages.append(Storage(one.nbytes, moved, one.module, *span, is_forced))
        for one in self.all:
            freed = ops if one.freed is None else one.freed
            dropped = 0 if one.saved is None else ops if one.dropped is None else one.dropped
            values.append(Value(one.nbytes, one.module, one.made, freed, max(freed, dropped), numbers.get(one, -1)))
        spans = [(one.nbytes, one.made, one.end) for one in values if one.storage < 0]
        return numbers, tuple(storages), tuple(values), tuple(live_bytes(ops, spans))


def _storage_of(tensor: Tensor) -> torch.UntypedStorage | None:
    storage = storage_of(tensor)
    return storage if storage is not None and storage.nbytes() else None


# -- repeatable calls -------------------------------------------------------------------------------------------------

#: Arguments that operators write to, although their schemas do not declare it.
STATISTICS = ("running_mean", "running_var")


class Place(NamedTuple):
    """A place in the trace: the counts of timed operators, saves and dispatches so far, and ``Call.node``."""

    op: int
    save: int
    dispatch: int
    node: int


@dataclass
class _Open:
    module: int
    begin: Place
    numbers: tuple[object, ...]
    inputs: dict[Block, Input]
    end: Place | None = None
    #: Whether random numbers were drawn whose state a checkpoint does not restore.
    has_changed: bool = False


class Calls:
    def __init__(self, blocks: Blocks) -> None:
        self._blocks = blocks
        self._all: list[_Open] = []
        self._open: list[_Open] = []
        self._times: Counter[int] = Counter()
        #: Writes, as operator and block; and the saves that the user has marked to move or to stay.
        self._writes: list[tuple[int, Block]] = []
        self.decided: list[int] = []

    def enter(self, module: int, place: Place, arguments: object, min_bytes: int, *, is_backward: bool) -> None:
        self._times[module] += 1
        if is_backward:
            return
        inputs = dict[Block, Input]()
        for one in tree_iter(arguments):
            if isinstance(one, Tensor) and (block := self._blocks.of(one)) is not None:
                area = footprint(one, block.nbytes)
                reason = reason_to_stay(one, min_bytes)
                known = inputs.get(block)
                moved = area.moved if known is None else min(area.moved + known.moved_bytes, block.nbytes)
                inputs[block] = Input(block.number, logical_bytes(one), one.requires_grad, moved, reason)
        call = _Open(module, place, state_of_others(), inputs)
        self._all.append(call)
        self._open.append(call)

    def leave(self, place: Place) -> None:
        call = self._open[-1]
        if call.numbers != state_of_others():
            self.changed()
        self._open.pop()
        call.end = place

    def changed(self) -> None:
        """Records in the open calls that a checkpoint cannot restore their random numbers."""
        for call in self._open:
            call.has_changed = True

    def write(self, op: int, tensor: Tensor) -> None:
        if (block := self._blocks.of(tensor)) is not None:
            self._writes.append((op, block))

    @property
    def written(self) -> set[Block]:
        return {block for _, block in self._writes}

    def repeatable(self) -> Iterator[Call]:
        """Yields the calls of modules that may be recomputed, in their order, once the step is over.

        A recompute must repeat the forward, and the planner must be free to decide about its saves. The inputs must be
        unchanged, so no operator may write to them after the call begins.
        """
        for call in self._all:
            begin, end = call.begin, call.end
            if call.module == 0 or end is None or self._times[call.module] > 1 or begin.save == end.save:
                continue
            if call.has_changed or any(begin.save <= save < end.save for save in self.decided):
                continue
            if not any(
                op >= begin.op and block.made < begin.op and (op < end.op or block in call.inputs)
                for op, block in self._writes
            ):
                between = (begin.op, end.op, begin.save, end.save, begin.dispatch, end.dispatch)
                yield Call(call.module, *between, begin.node, tuple(call.inputs.values()))


def written_by(call: OperatorCall) -> Iterator[Tensor]:
    for place, name in _written(call.target):
        yield from tensors_in(call.arguments[place] if place < len(call.arguments) else call.named.get(name))


@cache
def _written(target: Any) -> list[tuple[int, str]]:
    return [
        (place, one.name)
        for place, one in enumerate(schema_of(target).arguments)
        if (one.alias_info is not None and one.alias_info.is_write) or one.name in STATISTICS
    ]
