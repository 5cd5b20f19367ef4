"""A training step as numbers: what it computes, what it saves, and which bytes live meanwhile; no tensors.

``Problem`` is a step, the device that it runs on, and how much may be on its way.

Operators are counted from 0 through forward and backward. "At operator i" is while it runs, "from operator i on"
includes it. Sizes are bytes.
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
    """The number of the module that it belongs to; of an operator of backward, the one whose gradient it computes."""
    flops: int
    nbytes: int
    single: bool
    """Whether the numbers that it multiplies have 32 bits or more."""
    policies: int = 0
    """How many operators a policy of selective checkpointing is asked of from the one before it on, itself included."""


class ProgramSave(NamedTuple):
    """One saved tensor, in the order of saving."""

    nbytes: int
    requires_grad: bool
    reason: KeepReason | None
    """Why it stays, whatever is decided; ``None`` for one that may move."""
    storage: int
    """The number of its storage among those that may move; -1 where it is none of them."""
    storage_nbytes: int = 0
    op: int = 0
    """The operator that comes next."""
    node: int = 0
    """The number of the autograd node that saves it: what one operator saves has one."""
    is_alive: bool = False
    """Whether the program holds its storage, whole, when backward asks for it, so that to move it frees nothing."""


class ProgramUnpack(NamedTuple):
    save: int
    op: int


class Storage(NamedTuple):
    """A storage that may move: backward asks for it, and only autograd holds it by then."""

    nbytes: int
    """That autograd holds."""
    moved_bytes: int
    module: int
    made: int
    freed: int
    """From this operator on forward does not hold it any more."""
    saved: int
    """The operator that came next when it was saved first."""
    unpacked_at: int
    """The operator that came next when it was asked for first."""
    dropped: int
    """From this operator on backward does not hold it any more."""
    is_forced: bool = False
    """Whether it moves, whatever is decided: the user has said so."""


class Weight(NamedTuple):
    """A parameter of the model, which is there all the time, and the gradient that it has when the step is over."""

    name: str
    nbytes: int
    gradient_bytes: int
    """0 where it has none, as of a frozen one."""
    gradient_made: int


@dataclass(frozen=True)
class Program:
    """One forward and its backward."""

    modules: tuple[str, ...]
    """Names of modules, by number; the model's own is empty."""
    ops: tuple[Op, ...]
    forward_ops: int
    saves: tuple[ProgramSave, ...]
    unpacks: tuple[ProgramUnpack, ...]
    storages: tuple[Storage, ...]
    """By the first save."""
    other_bytes: tuple[int, ...]
    """At each operator, all bytes but those of ``storages``: parameters, inputs, gradients, what is computed, and what
    is saved and stays in any case."""
    repeatable: tuple[int, ...] = ()
    """The modules that may be computed again in backward: each is called once, saves something, writes to nothing that
    was there before, and the user has not said of what it saves whether that is to move."""
    guessed: tuple[str, ...] = ()
    """Functions that were called whose saves depend on the device: those of a CPU were written down."""
    weights: tuple[Weight, ...] = ()
    """Parameters of the model; they and their gradients are parts of ``other_bytes``."""

    def seconds(self, machine: Machine) -> list[float]:
        return [machine.seconds(op.flops, op.nbytes, single=op.single, policies=op.policies) for op in self.ops]

    @property
    def movable_bytes(self) -> int:
        return sum(storage.nbytes for storage in self.storages)


def kind_of(module: str) -> str:
    """The name of a module with ``*`` for numbers in it: that of all modules in its place, one in each block."""
    return re.sub(r"(?<![^.])\d+(?![^.])", "*", module) or "(the model itself)"


def modules_around(name: str) -> Iterator[str]:
    """Yields ``name`` and those of the modules that it is in, the innermost first and the model's own, "", last."""
    yield name
    while name:
        name = name.rpartition(".")[0]
        yield name


def live_bytes(count: int, spans: Sequence[tuple[int, int, int]]) -> list[int]:
    """Bytes that live at each of ``count`` operators, where each of ``spans`` is bytes, from where and until where."""
    change = [0] * (count + 1)
    for nbytes, start, end in spans:
        if end > start:
            change[min(start, count)] += nbytes
            change[min(end, count)] -= nbytes
    return list(accumulate(change[:count]))


#: For each storage that may move, whether it does.
Moves: TypeAlias = tuple[bool, ...]


def floor_seconds(forward: float, backward: float, nbytes: float, out: float, back: float) -> float:
    """Each half of a step takes as long as its compute or as its transfers, whichever is longer."""
    return max(forward, nbytes / out) + max(backward, nbytes / back)


@dataclass(frozen=True)
class Problem:
    """A step on a device behind a link."""

    program: Program
    op_seconds: Sequence[float]
    out: float
    back: float
    window: int
    """Bytes on their way out: ``max_inflight_bytes``."""
    ahead: int
    """Bytes brought back early: ``prefetch_bytes``."""
    launch_seconds: float = 0.0
    """What each call costs the host; 0 where the host is the device, and waits for each operator."""
    room: int | None = None
    """Bytes that may rest in the tier at one time; ``None``: any number."""
    ordered: bool = False
    """Whether the order of transfers and waits is that of a compiled graph."""

    @cached_property
    def begins(self) -> list[float]:
        """When each operator begins where compute never waits, and at last when the step ends."""
        return list(accumulate(self.op_seconds, initial=0.0))

    @cached_property
    def timeline(self) -> Timeline:
        """The step as the rule by pace sees it."""
        program, storages, begins = self.program, self.program.storages, self.begins
        final, unpacks = [begins[one.saved] for one in storages], self.by_unpack
        if not self.ordered:  # a graph has what it computes at once; autograd, when a later node brings another one in
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

    @property
    def stored_bytes(self) -> list[int]:
        """Bytes of the storages that may move, at each operator, where none of them does."""
        storages = self.program.storages
        return live_bytes(len(self.op_seconds), [(one.nbytes, one.made, one.dropped) for one in storages])

    @cached_property
    def unmoved_peak(self) -> int:
        """Bytes that live at one time at most where nothing moves."""
        return max(map(add, self.program.other_bytes, self.stored_bytes), default=0)

    @property
    def compute_seconds(self) -> float:
        return self.begins[-1]

    @property
    def forward_seconds(self) -> float:
        """Of its forward."""
        return self.begins[self.program.forward_ops]

    @cached_property
    def by_unpack(self) -> list[int]:
        storages = self.program.storages
        return sorted(range(len(storages)), key=lambda number: storages[number].unpacked_at)

    def within_room(self, moves: Moves) -> Moves:
        """Returns ``moves`` with those that move in any case, without the newest others that the tier has no room
        for."""
        found = [moves[number] or one.is_forced for number, one in enumerate(self.program.storages)]
        over = 0 if self.room is None else self.tier_bytes(tuple(found)) - self.room
        for number in reversed(range(len(found))):
            if over > 0 and found[number] and not self.program.storages[number].is_forced:
                found[number] = False
                over -= self._pages[number]
        return tuple(found)

    def tier_bytes(self, moves: Moves) -> int:
        """Bytes that rest in the tier where those move, in whole pages: between forward and backward all of them."""
        return sum(nbytes for number, nbytes in enumerate(self._pages) if moves[number])

    @cached_property
    def _pages(self) -> list[int]:
        return [round_up(storage.moved_bytes, PAGE) for storage in self.program.storages]
