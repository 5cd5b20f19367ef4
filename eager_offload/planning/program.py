"""A training step as numbers: what it computes, what it saves, and which bytes live meanwhile. No tensors, no devices.

Operators are counted from 0 through forward and backward. "At operator i" is while it runs, "from operator i on"
includes it. Sizes are bytes.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

from eager_offload.planning.machine import Machine
from eager_offload.stats import KeepReason


class Op(NamedTuple):
    """One operator."""

    name: str
    module: int
    """The number of the module that it belongs to; of an operator of backward, the one whose gradient it computes."""
    flops: int
    """Operations of products."""
    nbytes: int
    """Read and written."""
    single: bool
    """Whether the numbers that it multiplies have 32 bits or more."""


class ProgramSave(NamedTuple):
    """One saved tensor, in the order of saving."""

    nbytes: int
    requires_grad: bool
    reason: KeepReason | None
    """Why it stays, whatever is decided; ``None`` for one that may move."""
    storage: int
    """The number of its storage among those that may move; -1 where it is none of them."""
    storage_nbytes: int = 0
    """Bytes of its storage, of whichever kind."""
    op: int = 0
    """The operator that comes next."""
    node: int = 0
    """The number of the autograd node that saves it: what one operator saves has one."""
    is_alive: bool = False
    """Whether the program holds its storage, whole, when backward asks for it, so that to move it frees nothing."""


class ProgramAsk(NamedTuple):
    """One unpack."""

    save: int
    op: int
    """The operator that comes next."""


class Storage(NamedTuple):
    """A storage that may move: backward asks for it, and only autograd holds it by then."""

    nbytes: int
    """That autograd holds."""
    moved_bytes: int
    """That travel."""
    module: int
    """The number of the module that made it."""
    made: int
    """The operator that made it."""
    freed: int
    """From this operator on forward does not hold it any more."""
    saved: int
    """The operator that came next when it was saved first."""
    asked: int
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
    """The operator that made its gradient."""


@dataclass(frozen=True)
class Program:
    """One forward and its backward."""

    modules: tuple[str, ...]
    """Names of modules, by number; the model's own is empty."""
    ops: tuple[Op, ...]
    forward_ops: int
    """How many of them are forward's."""
    saves: tuple[ProgramSave, ...]
    asks: tuple[ProgramAsk, ...]
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
        """How long each operator takes."""
        return [machine.seconds(op.flops, op.nbytes, single=op.single) for op in self.ops]

    @property
    def movable_bytes(self) -> int:
        """Bytes of the storages that may move."""
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


def living(count: int, spans: Sequence[tuple[int, int, int]]) -> list[int]:
    """Bytes that live at each of ``count`` operators, where each of ``spans`` is bytes, from where and until where."""
    change = [0] * (count + 1)
    for nbytes, start, end in spans:
        if end > start:
            change[min(start, count)] += nbytes
            change[min(end, count)] -= nbytes
    return list(accumulate(change[:count]))
