"""A step in rehearsal: the library itself runs it on a simulated device, whose clock is the prediction.

[Note: the rehearsal]
An ``Offload`` with all that is below it runs on the simulated runtime. In the place of autograd stands the program of
the step: it saves what autograd would, in the same order, asks for it in the same order, and lets the clock advance by
what each operator takes. Tensors are stand-ins, smaller by one factor than those that they stand for, so that a step of
any size takes as much memory as a small one; the links are slower by the same factor. So whatever the library does in
training it does here: it waits for room, brings back early, notices late that a copy is over. There is no second
schedule that could disagree with it.

[Note: calls in place of nodes]
Saves and asks are calls of the hooks that autograd would make. A node of ``torch.autograd.Function`` asks for all that
it has saved at once, in the order of saving; torch's own nodes do not.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor

from eager_offload import contexts
from eager_offload._torch import weak_storage, without_torch_function
from eager_offload.codecs import PackedLayout, TensorMeta
from eager_offload.codecs.base import parts_of
from eager_offload.codecs.names import LOSSLESS, CodecRules
from eager_offload.offload import Offload
from eager_offload.planning.numbers import by_itself
from eager_offload.planning.predict import Course, Moves, Problem
from eager_offload.planning.program import Packing
from eager_offload.planning.simulated import RehearsalRuntime
from eager_offload.selection import footprint
from eager_offload.step_table import Fate, Row, StepTable

#: Bytes of all stand-ins together, at most.
_STAGE_BYTES = 32 << 20
#: Room in the tier, which in a rehearsal is not what is asked.
_HOST_BYTES = 1 << 40
#: What stands for all saves that stay in any case: a byte, below ``min_bytes``.
_SMALL_BYTES, _MIN_BYTES = 1, 2


def rehearse(problem: Problem, moves: Moves, launch_seconds: float = 0.0) -> Course | None:
    """Runs a step in which those storages move; ``None`` where stand-ins cannot go through it.

    They cannot where backward runs inside of forward, or asks twice for a save whose handle has gone in between, or
    where tensors are marked.

    Args:
        moves: for each storage, whether it moves.
        launch_seconds: what each call costs the host; 0 where the host is the device, and waits for each operator.
    """
    with by_itself(), without_torch_function():
        program = problem.program
        asked = [ask.save for ask in program.asks if program.saves[ask.save].storage >= 0]
        if not asked or len({*asked}) < len(asked) or any(ask.op < program.forward_ops for ask in program.asks):
            return None
        return _Stage(problem, moves, launch_seconds).play()


class _Made(torch.autograd.Function):
    """What autograd has made: a tensor with a node."""

    @staticmethod
    def forward(ctx: Any, root: Tensor, nbytes: int) -> Tensor:
        return torch.empty(nbytes, dtype=torch.float8_e5m2, device="cpu")


def _tensor_of(root: Tensor, nbytes: int) -> Tensor:
    made: Tensor = _Made.apply(root, nbytes)  # type: ignore[no-untyped-call]  # torch declares no types for it
    return made


@dataclasses.dataclass(frozen=True)
class _StandIn:
    """What stands for a codec: it takes the time of one, and packs nothing."""

    nbytes: int
    packing: Packing
    takes: Callable[[int, int], None]
    name: ClassVar[str] = "stand-in"
    lossless: ClassVar[bool] = True

    def layout(self, meta: TensorMeta) -> PackedLayout:
        return parts_of(("bytes", self.nbytes))

    def pack(self, x: Tensor, out: Tensor) -> None:
        self.takes(self.packing.pack_bytes, self.packing.pack_scratch)

    def unpack(self, packed: Tensor, out: Tensor) -> None:
        self.takes(self.packing.unpack_bytes, self.packing.unpack_scratch)


class _Codecs(CodecRules):
    """The codecs of stand-ins."""

    def __init__(self, made: Callable[[], _StandIn | None]) -> None:
        super().__init__({"*": LOSSLESS})
        self._made = made

    def stand_in(self) -> _StandIn | None:
        return self._made()


class _Stage:
    """One step of stand-ins."""

    def __init__(self, problem: Problem, moves: Moves, launch_seconds: float) -> None:
        program = problem.program
        self._problem, self._program, self._moves = problem, program, moves
        self._factor = max(1.0, program.movable_bytes / _STAGE_BYTES)
        self._runtime = RehearsalRuntime(
            out_bandwidth=problem.out / self._factor,
            in_bandwidth=problem.back / self._factor,
            launch_seconds=launch_seconds,
            host_waits=launch_seconds == 0,
        )
        self._root = torch.zeros(1, requires_grad=True, device="cpu")
        self._small = torch.zeros(_SMALL_BYTES, dtype=torch.uint8, device="cpu")
        self._node = self._saving = -1
        #: What forward holds, what graphs hold, and what backward holds.
        self._tensors: dict[int, Tensor] = {}
        self._handles: dict[int, contexts.Handle] = {}
        self._returned: dict[int, list[Tensor]] = defaultdict(list)
        self._returning = set[int]()
        #: What forward has made.
        self._originals: dict[int, Callable[[], torch.UntypedStorage | None]] = {}
        self._living: list[int] = []
        #: The operator that comes next, and what has lived at most when codecs ran before it.
        self._op = self._packed = 0
        # By operator.
        storages = program.storages
        self._made = _by_op(one.made for one in storages)
        self._freed = _by_op(one.freed for one in storages)
        self._dropped = _by_op(one.dropped for one in storages)
        self._saves = _by_op(one.op for one in program.saves)
        self._asks = _by_op(one.op for one in program.asks)
        #: By storage, the saves of it, and the last ask for it.
        self._saves_of = _by_op(one.storage for one in program.saves)
        self._last_ask = {program.saves[ask.save].storage: at for at, ask in enumerate(program.asks)}

    def play(self) -> Course | None:
        program, runtime = self._program, self._runtime
        self._offload = offload = Offload(
            {
                "tier": "host",
                "min_bytes": _MIN_BYTES,
                "host_budget": _HOST_BYTES,
                "max_inflight_bytes": max(self._nbytes(self._problem.window), 1),
                "prefetch_bytes": self._nbytes(self._problem.ahead),
                "keep_last_bytes": _HOST_BYTES,  # all that does not move
                "device_budget": None,
                "disk_path": None,
                "skip": (),
                "step_plans": "auto",
                "codec": _Codecs(self._stand_in),
                "enabled": True,
            },
            plan=self._table(),
            runtime=runtime,
        )
        begun = runtime.default_stream.tail
        with offload:
            for op in range(program.forward_ops + 1):
                self._forward(op)
        for op in range(program.forward_ops, len(program.ops)):
            self._backward(op)
        seconds = runtime.default_stream.tail - begun
        stats = offload.stats()
        self._tensors, self._handles, self._returned = {}, {}, defaultdict(list)
        runtime.synchronize_all()
        if stats.plan_misses or stats.followed_forwards != 1:
            return None
        return Course(seconds, tuple(self._living), tuple(sorted(self._returning)))

    # -- forward ------------------------------------------------------------------------------------------------------

    def _forward(self, op: int) -> None:
        freed, saves = self._freed.get(op, ()), self._saves.get(op, ())
        for number in freed:
            if self._program.saves[self._saves_of[number][-1]].op < op:
                self._tensors.pop(number, None)
        for number in saves:
            self._save(number)
        for number in freed:
            self._tensors.pop(number, None)
        if op < self._program.forward_ops:
            for number in self._made.get(op, ()):
                self._make(number)
            self._run(op)

    def _make(self, number: int) -> None:
        """What forward makes, and holds until it lets go of it."""
        if number in self._originals:
            return  # a save that came before its operator was written down
        nbytes = self._nbytes(self._program.storages[number].nbytes)
        if self._program.saves[self._saves_of[number][0]].requires_grad:
            tensor = _tensor_of(self._root, nbytes)
        else:
            tensor = torch.empty(nbytes, dtype=torch.uint8, device="cpu")
        self._runtime.living.add(tensor.untyped_storage())
        self._originals[number] = weak_storage(tensor.untyped_storage())
        self._tensors[number] = tensor

    def _save(self, number: int) -> None:
        save = self._program.saves[number]
        if save.node != self._node:
            self._node = save.node
            _tensor_of(self._root, 0)  # its number is larger than that of the one before
        tensor = self._small
        if save.storage >= 0:
            self._make(save.storage)
            tensor, self._saving = self._part_of(self._tensors[save.storage], number), save.storage
        self._handles[number] = self._offload.pack(tensor)  # type: ignore[assignment]  # whatever autograd holds

    # -- backward -----------------------------------------------------------------------------------------------------

    def _backward(self, op: int) -> None:
        for number in self._freed.get(op, ()):
            self._tensors.pop(number, None)
        for number in self._dropped.get(op, ()):
            self._returned.pop(number, None)
            for save in self._saves_of[number]:
                self._handles.pop(save, None)
        for at in self._asks.get(op, ()):
            self._ask(at)
        self._run(op)

    def _ask(self, at: int) -> None:
        save = self._program.saves[self._program.asks[at].save]
        if save.node != self._node:  # what the node before was given went with it, unless something else holds it
            self._node = save.node
            for storage in [one for one in self._returned if self._last_ask[one] >= at]:
                del self._returned[storage]
        handle = self._handles.get(self._program.asks[at].save)
        if handle is None:
            return
        tensor = contexts.unpack(handle)
        if save.storage >= 0:
            self._returned[save.storage].append(tensor)
            if tensor.untyped_storage() is not self._originals[save.storage]():
                self._returning.add(save.storage)
        del tensor

    # -- either -------------------------------------------------------------------------------------------------------

    def _run(self, op: int) -> None:
        """An operator runs, with all that lives meanwhile."""
        self._living.append(max(self._held(self._program.other_bytes[op]), self._packed))
        self._op, self._packed = op + 1, 0
        self._runtime.advance(self._runtime.default_stream, self._problem.op_seconds[op], self._program.ops[op].name)

    def _held(self, other_bytes: int) -> int:
        """Bytes that live now, with so many others."""
        return round(self._runtime.living.nbytes * self._factor + other_bytes)

    def _nbytes(self, nbytes: int) -> int:
        """Bytes of what stands for so many."""
        return nbytes if self._factor == 1 else max(round(nbytes / self._factor), min(nbytes, _MIN_BYTES))

    def _part_of(self, tensor: Tensor, number: int) -> Tensor:
        """What save ``number`` takes of the stand-in of its storage."""
        save = self._program.saves[number]
        storage = self._program.storages[save.storage]
        if storage.is_whole:
            return tensor
        return tensor[: max(self._nbytes(min(save.nbytes, storage.moved_bytes)), _MIN_BYTES)]

    def _table(self) -> StepTable:
        """What the library is to do with the stand-ins."""
        saves, storages = self._program.saves, self._program.storages
        numbers = {number: row for row, number in enumerate(at for at, one in enumerate(saves) if one.storage >= 0)}
        owners: dict[tuple[int, int], int] = {}
        rows: list[Row] = []
        last_saves = {numbers[each[0]]: numbers[each[-1]] for at, each in self._saves_of.items() if at >= 0}
        for number, row in numbers.items():
            save = saves[number]
            nbytes = self._nbytes(storages[save.storage].nbytes)
            part = self._part_of(torch.empty(nbytes, dtype=torch.uint8, device="cpu"), number)
            area = footprint(part, nbytes)
            owner = owners.setdefault((save.storage, area.nbytes), row)
            requires_grad = saves[self._saves_of[save.storage][0]].requires_grad
            moves = self._moves[save.storage] or not storages[save.storage].is_whole
            fate = Fate.SHARE if owner != row else Fate.MOVE if moves else Fate.STAY
            last = last_saves.get(row, -1) if owner == row and storages[save.storage].is_whole else -1
            facts = part.nbytes, area.nbytes, requires_grad, owner, LOSSLESS
            rows.append(Row(*facts, fate, last_save=last if last > row else -1))
        order = [numbers[ask.save] for ask in self._program.asks if ask.save in numbers]
        return StepTable(tuple(rows), tuple(order))

    def _stand_in(self) -> _StandIn | None:
        """What stands for the codec of the storage that is saved now."""
        packing = self._program.storages[self._saving].packing
        return None if packing is None else _StandIn(self._nbytes(packing.nbytes), packing, self._packs)

    def _packs(self, traffic: int, scratch: int) -> None:
        """A codec reads and writes so many bytes, and takes some for a moment."""
        op = min(self._op, len(self._program.ops) - 1)
        self._packed = max(self._packed, self._held(self._program.other_bytes[op] + scratch))
        self._runtime.advance(self._runtime.default_stream, traffic / self._problem.memory, "codec")


def _by_op(ops: Any) -> dict[int, list[int]]:
    """The numbers of things by the operator of each."""
    found: dict[int, list[int]] = defaultdict(list)
    for number, op in enumerate(ops):
        found[op].append(number)
    return dict(found)
