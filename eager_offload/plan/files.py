"""The file of a plan: what is written, and what is read again once its numbers fit together."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from eager_offload.config import OffloadConfig
from eager_offload.errors import ConfigError
from eager_offload.machine import Machine
from eager_offload.plan.draft import Rehearsal
from eager_offload.plan.predict import Moves, Problem
from eager_offload.plan.program import Ask, ModuleCall, Op, Packing, Program, Save, Storage
from eager_offload.stats import KeepReason

__all__ = ["POLICIES", "Least", "PlanFields", "reading", "room_of", "write"]

#: What a plan aims at.
POLICIES = ("least", "free", "max")
#: Numbers in files are below it.
_MOST = 1 << 62
#: The form of the file.
_FORMAT = 1
#: Of a budget of the tier, one part in so many is left for what its slabs round.
_ROUNDED = 8


class Least(NamedTuple):
    """What the plan of the least peak comes to."""

    peak_bytes: int
    step_seconds: float


@dataclass(frozen=True)
class PlanFields:
    """What a plan is made of, and its file holds."""

    model: str
    """The name of the model's class."""
    machine: Machine
    """The device."""
    device_budget: int
    """Bytes of the device that the step may take."""
    policy: str
    """``"least"``, ``"free"`` or ``"max"``."""
    problem: Problem
    """The step as numbers."""
    moves: Moves
    """For each storage that may move, whether it does."""
    config: OffloadConfig
    """The settings of the ``Offload`` that follows it."""
    rehearsal: Rehearsal | None
    """What came of it in rehearsal; ``None`` where no step plan can say what this model does. Then peak and time are
    worked out from the order of transfers alone."""

    again: tuple[str, ...] = ()
    """The names of the modules that are computed again in backward: see ``Plan.apply``."""
    whole: Problem | None = None
    """The step in which nothing is computed again, where something may be."""
    traced_least: Least | None = None
    """What the least peak is where something may be computed again, which takes the model to say."""
    steps: int = 0
    """By how many real steps the times of operators are; 0: estimated."""


_Plan = TypeVar("_Plan", bound=PlanFields)


def write(plan: PlanFields, path: str | os.PathLike[str]) -> None:
    """Writes them to ``path``, as JSON."""
    problem = plan.problem
    content = {
        "format": _FORMAT,
        "model": plan.model,
        "machine": asdict(plan.machine),
        "device_budget": plan.device_budget,
        "policy": plan.policy,
        "max_inflight_bytes": problem.window,
        "prefetch_bytes": problem.ahead,
        "moves": [int(one) for one in plan.moves],
        "config": plan.config.to_text(),
        "rehearsal": plan.rehearsal,
        "program": asdict(problem.program),
        "steps": plan.steps,
        "op_seconds": list(problem.op_seconds) if plan.steps else None,
        "again": list(plan.again),
        "whole": None if plan.whole is None else asdict(plan.whole.program),
        "least": plan.traced_least,
    }
    Path(path).write_text(json.dumps(content, separators=(",", ":")), "utf-8")


def _of(kind: type[_Plan], content: Mapping[str, Any]) -> _Plan:
    """The plan of a file.

    Raises:
        ValueError, TypeError, KeyError, IndexError, AttributeError, OverflowError: they do not fit together.
    """
    if content["format"] != _FORMAT:
        raise ValueError(f"format {content['format']!r} instead of {_FORMAT}")
    if content["policy"] not in POLICIES:
        raise ValueError(f"the policy {content['policy']!r}")
    machine, program = Machine(**content["machine"]), _program(content["program"])
    windows = _whole(content["max_inflight_bytes"]), _whole(content["prefetch_bytes"])
    budget, config = _whole(content["device_budget"]), OffloadConfig.from_text(content["config"])
    steps = _whole(content["steps"])
    seconds = _measured(content["op_seconds"], program) if steps else tuple(program.seconds(machine))
    problem = Problem(program, seconds, machine.out, machine.back, *windows, room_of(config), machine.memory)
    again, whole = tuple(map(str, content["again"])), None
    if content["whole"] is not None:
        program = _program(content["whole"])
        whole = replace(problem, program=program, op_seconds=tuple(program.seconds(machine)))
    least = None if (given := content["least"]) is None else _least(given)
    if (whole is None) != (least is None):
        raise ValueError("it has no least peak of what may be computed again")
    if not {*again} <= {*program.modules}:
        raise ValueError(f"{again!r} are none of its modules")
    moves = tuple(bool(_whole(one)) for one in content["moves"])
    if len(moves) != len(problem.program.storages):
        raise ValueError(f"{len(moves)} decisions on {len(problem.program.storages)} storages")
    rehearsal = content["rehearsal"]
    if rehearsal is not None:
        rehearsal = _rehearsal(rehearsal, problem.program)
    return kind(
        str(content["model"]),
        machine,
        budget,
        content["policy"],
        problem,
        moves,
        config,
        rehearsal,
        again,
        whole,
        least,
        steps,
    )


@contextmanager
def reading(kind: type[_Plan], path: str | os.PathLike[str]) -> Iterator[_Plan]:
    """Gives the plan that ``path`` holds to a block that looks at it.

    Raises:
        ConfigError: that is no plan, or one of another version; or the block raises because its numbers do not fit.
    """
    try:
        yield _of(kind, json.loads(Path(path).read_text("utf-8")))
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, OverflowError) as error:
        raise ConfigError(f"{os.fspath(path)!r} holds no plan that this version can read: {error}") from error


def room_of(config: OffloadConfig) -> int | None:
    """Bytes that a decision may let rest in the tier at one time; ``None``: any number."""
    budget = config.host_budget
    return budget - budget // _ROUNDED if isinstance(budget, int) else None


def _whole(value: object) -> int:
    if type(value) is not int or not 0 <= value < _MOST:
        raise ValueError(f"{value!r} is no number of bytes, or of operators")
    return value


def _save(content: Sequence[Any]) -> Save:
    nbytes, requires_grad, reason, storage, storage_nbytes, op, node, is_alive = content
    return Save(
        _whole(nbytes),
        bool(requires_grad),
        None if reason is None else KeepReason(reason),
        int(storage),
        _whole(storage_nbytes),
        _whole(op),
        _whole(node),
        bool(is_alive),
    )


def _storage(content: Sequence[Any]) -> Storage:
    *numbers, is_forced, packing = content
    if packing is not None:
        codec, dtype, maker, *sizes = packing
        packing = Packing(str(codec), str(dtype), str(maker), *map(_whole, sizes))
    nbytes, moved, module, made, freed, saved, asked, dropped = map(_whole, numbers)
    return Storage(nbytes, moved, module, made, freed, saved, asked, dropped, bool(is_forced), packing)


def _least(content: Sequence[Any]) -> Least:
    peak, seconds = content
    if type(seconds) not in (int, float) or not seconds >= 0:
        raise ValueError(f"{seconds!r} is no time")
    return Least(_whole(peak), float(seconds))


def _rehearsal(content: Sequence[Any], program: Program) -> Rehearsal:
    """The rehearsal of a file.

    Raises:
        ValueError: its numbers do not fit together.
    """
    seconds, living, returning, released, seen = content
    storages = len(program.storages)
    fits = type(seconds) in (int, float) and seconds >= 0 and len(released) == storages
    fits = fits and len(living) == len(program.ops) and all(type(one) is int and one >= -1 for one in released)
    if not fits or any(_whole(one) >= storages for one in returning):
        raise ValueError("the numbers of its rehearsal do not fit together")
    return Rehearsal(float(seconds), tuple(map(_whole, living)), tuple(returning), tuple(released), _whole(seen))


def _measured(content: Sequence[Any], program: Program) -> tuple[float, ...]:
    """The times of operators in a file.

    Raises:
        ValueError: they are none.
    """
    are_times = all(type(one) in (int, float) and 0 <= one < math.inf for one in content)
    if len(content) != len(program.ops) or not are_times:
        raise ValueError("the times of its operators do not fit together")
    return tuple(map(float, content))


def _call(
    module: object, begin: object, end: object, first: object, last: object, inputs: Any, rest: object
) -> ModuleCall:
    numbers = [_whole(one) for one in (module, begin, end, first, last)]
    return ModuleCall(
        numbers[0], numbers[1], numbers[2], numbers[3], numbers[4], tuple(map(_whole, inputs)), _whole(rest)
    )


def _program(content: Mapping[str, Any]) -> Program:
    """The program of a file.

    Raises:
        ValueError: its numbers do not fit together.
    """
    modules = tuple(map(str, content["modules"]))
    ops = tuple(Op(str(one[0]), _whole(one[1]), _whole(one[2]), _whole(one[3]), bool(one[4])) for one in content["ops"])
    saves = tuple(_save(one) for one in content["saves"])
    asks = tuple(Ask(*map(_whole, one)) for one in content["asks"])
    storages = tuple(map(_storage, content["storages"]))
    other_bytes = tuple(map(_whole, content["other_bytes"]))
    forward, count = _whole(content["forward_ops"]), len(ops)
    fits = forward <= count == len(other_bytes)
    fits = fits and all(
        number < len(modules) for number in [*(op.module for op in ops), *(one.module for one in storages)]
    )
    fits = fits and all(-1 <= save.storage < len(storages) and save.op <= count for save in saves)
    fits = fits and [save.op for save in saves] == sorted(save.op for save in saves)
    fits = fits and [ask.op for ask in asks] == sorted(ask.op for ask in asks)
    fits = fits and all(ask.save < len(saves) and ask.op <= count for ask in asks)
    for one in storages:
        fits = fits and one.made <= one.saved <= forward <= one.asked < one.dropped <= max(count, one.asked + 1)
        fits = fits and one.made <= one.freed <= one.asked <= count and 0 < one.moved_bytes <= one.nbytes
        fits = fits and (one.packing is None or one.packing.nbytes == one.moved_bytes)
    arguments = tuple(map(_storage, content["arguments"]))
    fits = fits and all(one.made <= one.freed <= count and one.module < len(modules) for one in arguments)
    calls = tuple(_call(*one) for one in content["calls"])
    known = len(storages) + len(arguments)
    for call in calls:
        fits = fits and call.module < len(modules) and call.begin <= call.end <= forward
        fits = fits and call.first_save < call.last_save <= len(saves) and all(one < known for one in call.inputs)
    if not fits:
        raise ValueError("its numbers do not fit together")
    return Program(modules, ops, forward, saves, asks, storages, other_bytes, calls, arguments)
