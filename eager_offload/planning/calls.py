"""Which calls of modules may be computed again: written down while a step is traced."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

from torch import Tensor

from eager_offload.compile.decide import OperatorCall
from eager_offload.planning.blocks import Block, Blocks
from eager_offload.planning.numbers import state_of_others
from eager_offload.torch_private.calls import schema_of
from eager_offload.torch_private.memory import tensors_in, tree_iter

#: They change what these arguments hold, and their schemas do not say so.
STATISTICS = ("running_mean", "running_var")


@dataclass
class _Open:
    """A call of a module in forward."""

    module: int
    begin: int
    first_save: int
    #: Where Python's random numbers were before.
    numbers: tuple[object, ...]
    inputs: list[Block]
    end: int = -1
    last_save: int = -1
    #: Whether random numbers that no checkpoint puts back were drawn.
    has_changed: bool = False


class Calls:
    """The calls of modules in forward."""

    def __init__(self, blocks: Blocks) -> None:
        self._blocks = blocks
        self._all: list[_Open] = []
        self._open: list[_Open] = []
        self._times: Counter[int] = Counter()
        #: What was written to, and by which operator; saves of which the user has said whether they are to move.
        self._writes: list[tuple[int, Block]] = []
        self._decided: list[int] = []

    def enter(self, module: int, op: int, save: int, arguments: object, *, is_backward: bool) -> None:
        """``module`` is called; in backward where the model itself computes it again."""
        self._times[module] += 1
        if is_backward:
            return
        given = (self._blocks.of(one) for one in tree_iter(arguments) if isinstance(one, Tensor))
        inputs = list(dict.fromkeys(block for block in given if block is not None))
        call = _Open(module, op, save, state_of_others(), inputs)
        self._all.append(call)
        self._open.append(call)

    def leave(self, op: int, save: int) -> None:
        """The call that was entered last has returned."""
        call = self._open[-1]
        if call.numbers != state_of_others():
            self.changed()
        self._open.pop()
        call.end, call.last_save = op, save

    def changed(self) -> None:
        """Random numbers that no checkpoint puts back were drawn in the calls that have begun."""
        for call in self._open:
            call.has_changed = True

    def write(self, op: int, tensor: Tensor) -> None:
        """Operator ``op`` writes to ``tensor``."""
        if (block := self._blocks.of(tensor)) is not None:
            self._writes.append((op, block))

    def decided(self, save: int) -> None:
        """A mark or a region of the user's says of that save whether it is to move."""
        self._decided.append(save)

    def repeatable(self) -> tuple[int, ...]:
        """Returns the modules that may be computed again, once all is over, in the order in which they begin."""
        return tuple(call.module for call in self._all if self._may_run_again(call))

    def _may_run_again(self, call: _Open) -> bool:
        """Whether it would do the same once more, and what it saves is the planner's to decide about.

        What it was given has to be there as it was, so no operator may write to that, before backward at least.
        """
        if call.module == 0 or call.end < 0 or self._times[call.module] > 1 or call.first_save == call.last_save:
            return False
        if call.has_changed or any(call.first_save <= save < call.last_save for save in self._decided):
            return False
        given = set(call.inputs)
        return not any(
            op >= call.begin and block.made < call.begin and (op < call.end or block in given)
            for op, block in self._writes
        )


def written_by(call: OperatorCall) -> Iterator[Tensor]:
    """The arguments that an operator writes to."""
    for place, name in _written(call.target):
        yield from tensors_in(call.arguments[place] if place < len(call.arguments) else call.named.get(name))


@cache
def _written(target: Any) -> list[tuple[int, str]]:
    return [
        (place, one.name)
        for place, one in enumerate(schema_of(target).arguments)
        if (one.alias_info is not None and one.alias_info.is_write) or one.name in STATISTICS
    ]
