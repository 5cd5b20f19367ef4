"""Records of a traced step without tensors: operators, saves, unpacks and live bytes (``Program``), and the step on a
device behind a link with given windows (``Problem``).

Operators are numbered from 0 through forward and backward. "At operator i" means while it runs; a range of operators
includes its first and excludes its last. Sizes are bytes.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from operator import add
from typing import NamedTuple, TypeAlias

from eager_offload.core.budget import Timeline
from eager_offload.planning.machine import Machine
from eager_offload.stats import KeepReason
from eager_offload.tiers.memory import PAGE, round_up


class Op(NamedTuple):
    name: str
    module: int
    """Index of its module; for an operator of backward, of the module whose gradient it computes."""
    flops: int
    nbytes: int
    single: bool
    """Whether the operands of its products have 32 bits or more."""
    policies: int = 0
    """Calls of a selective checkpointing policy since the operator before it, including its own."""


class ProgramSave(NamedTuple):
    nbytes: int
    requires_grad: bool
    reason: KeepReason | None
    """Why it is always kept; ``None`` if it may move."""
    storage: int
    """Index of its storage among the movable ones; -1 if it cannot move."""
    op: int = 0
    """The next operator."""
    node: int = 0
    """Index of the autograd node that saves it; all saves of one operator share it."""


class ProgramUnpack(NamedTuple):
    save: int
    op: int


class Storage(NamedTuple):
    """A movable storage: backward unpacks it, and only autograd holds it by then."""

    nbytes: int
    """Bytes that autograd holds."""
    moved_bytes: int
    module: int
    made: int
    freed: int
    """The operator at which forward drops it."""
    saved: int
    unpacked_at: int
    dropped: int
    """The operator at which backward drops it."""
    is_forced: bool = False
    """Whether the user has marked it to always move."""


class Weight(NamedTuple):
    """A parameter, which lives for the whole step, and its gradient."""

    name: str
    nbytes: int
    gradient_bytes: int
    """0 if it gets no gradient (e.g. it is frozen)."""
    gradient_made: int


@dataclass(frozen=True)
class Program:
    modules: tuple[str, ...]
    """Names of the modules; the model's own is empty."""
    ops: tuple[Op, ...]
    forward_ops: int
    saves: tuple[ProgramSave, ...]
    unpacks: tuple[ProgramUnpack, ...]
    storages: tuple[Storage, ...]
    other_bytes: tuple[int, ...]
    """Live bytes at each operator, without ``storages``: parameters, inputs, gradients, temporaries and kept saves."""
    repeatable: tuple[int, ...] = ()
    """Modules that may be recomputed in backward: each is called once, saves tensors, writes to no older tensor, and
    has no save that the user has marked to move or to stay."""
    guessed: tuple[str, ...] = ()
    """Called functions whose saves depend on the device, and were recorded as on a CPU."""
    weights: tuple[Weight, ...] = ()
    """The parameters; ``other_bytes`` includes them and their gradients."""

    def seconds(self, machine: Machine) -> list[float]:
        return [machine.seconds(op.flops, op.nbytes, single=op.single, policies=op.policies) for op in self.ops]

    @property
    def movable_bytes(self) -> int:
        return sum(storage.nbytes for storage in self.storages)


def kind_of(module: str) -> str:
    """Returns the name of a module with ``*`` for numbers, which it shares with its counterparts in other blocks."""
    return re.sub(r"(?<![^.])\d+(?![^.])", "*", module) or "(the model itself)"


def modules_around(name: str) -> Iterator[str]:
    """Yields ``name`` and the names of its enclosing modules, up to the model's own, ""."""
    yield name
    while name:
        name = name.rpartition(".")[0]
        yield name


def live_bytes(count: int, spans: Sequence[tuple[int, int, int]]) -> list[int]:
    """Returns the live bytes at each of ``count`` operators; ``spans`` are (bytes, first operator, end)."""
    change = [0] * (count + 1)
    for nbytes, start, end in spans:
        if end > start:
            change[min(start, count)] += nbytes
            change[min(end, count)] -= nbytes
    return list(accumulate(change[:count]))


#: Whether each movable storage moves.
Moves: TypeAlias = tuple[bool, ...]


def floor_seconds(forward: float, backward: float, nbytes: float, out: float, back: float) -> float:
    """Returns a lower bound on step time for any transfer order: in each half, the longer of compute and transfers."""
    return max(forward, nbytes / out) + max(backward, nbytes / back)


@dataclass(frozen=True)
class Problem:
    """A step on a device behind a link."""

    program: Program
    op_seconds: Sequence[float]
    out: float
    back: float
    window: int
    """``max_inflight_bytes``."""
    ahead: int
    """``prefetch_bytes``."""
    launch_seconds: float = 0.0
    """Host time per call; 0 if the host is the device, and waits for each operator."""
    room: int | None = None
    """Bytes that the tier may store at one time; ``None``: unlimited."""
    ordered: bool = False
    """Whether transfers and waits have the fixed order of a compiled graph."""

    @cached_property
    def begins(self) -> list[float]:
        """The start times of the operators without stalls, then the end of the step, in seconds."""
        return list(accumulate(self.op_seconds, initial=0.0))

    @cached_property
    def timeline(self) -> Timeline:
        """The step as ``budget.share`` takes it."""
        program, storages, begins = self.program, self.program.storages, self.begins
        final, unpacks = [begins[one.saved] for one in storages], self.by_unpack
        if not self.ordered:  # a graph's value is final at once, an eager value when a later node saves a storage
            saves = [save for save in program.saves if save.storage >= 0]
            brought = dict[int, ProgramSave]()
            for save in saves:
                brought.setdefault(save.storage, save)
            first = list(brought.values())
            for save in saves:
                later = bisect_right(first, save.node, key=lambda one: one.node)
                final[save.storage] = begins[first[later].op] if later < len(first) else self.forward_seconds
            order = dict.fromkeys(program.saves[one.save].storage for one in program.unpacks)
            unpacks = [storage for storage in order if storage >= 0]
        return Timeline(
            [one.moved_bytes for one in storages],
            final,
            [begins[one.unpacked_at] for one in storages],
            unpacks,
            self.forward_seconds,
            self.compute_seconds,
            self.out,
            self.back,
            self.window,
            self.ahead,
        )

    @cached_property
    def unmoved_peak(self) -> int:
        stored = live_bytes(
            len(self.op_seconds), [(one.nbytes, one.made, one.dropped) for one in self.program.storages]
        )
        return max(map(add, self.program.other_bytes, stored), default=0)

    @property
    def compute_seconds(self) -> float:
        return self.begins[-1]

    @property
    def forward_seconds(self) -> float:
        return self.begins[self.program.forward_ops]

    @cached_property
    def by_unpack(self) -> list[int]:
        storages = self.program.storages
        return sorted(range(len(storages)), key=lambda number: storages[number].unpacked_at)

    def within_room(self, moves: Moves) -> Moves:
        """Returns ``moves`` plus the forced storages, without the last others that exceed the room of the tier."""
        found = [moves[number] or one.is_forced for number, one in enumerate(self.program.storages)]
        over = 0 if self.room is None else self.tier_bytes(tuple(found)) - self.room
        for number in reversed(range(len(found))):
            if over > 0 and found[number] and not self.program.storages[number].is_forced:
                found[number] = False
                over -= self._pages[number]
        return tuple(found)

    def tier_bytes(self, moves: Moves) -> int:
        """Returns the most bytes that the tier stores for ``moves``, in whole pages: all, between the two passes."""
        return sum(nbytes for number, nbytes in enumerate(self._pages) if moves[number])

    @cached_property
    def _pages(self) -> list[int]:
        return [round_up(storage.moved_bytes, PAGE) for storage in self.program.storages]
