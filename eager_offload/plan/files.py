"""The file of a plan: what is written, and what is read again once its numbers fit together."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from eager_offload.config import OffloadConfig
from eager_offload.errors import ConfigError
from eager_offload.machine import Machine
from eager_offload.plan.draft import Rehearsal
from eager_offload.plan.predict import Moves, Problem
from eager_offload.plan.program import Program
from eager_offload.step_plan import read_as

#: What a plan aims at.
POLICIES = ("least", "free", "max")
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
    """The plan of a file; raises one of the errors below where its parts do not fit together."""
    if content["format"] != _FORMAT:
        raise ValueError(f"format {content['format']!r} instead of {_FORMAT}")
    if content["policy"] not in POLICIES:
        raise ValueError(f"the policy {content['policy']!r}")
    machine, program = Machine(**content["machine"]), _program(content["program"])
    numbers = ("steps", "max_inflight_bytes", "prefetch_bytes", "device_budget")
    steps, window, ahead, budget = (read_as(int, content[name]) for name in numbers)
    config = OffloadConfig.from_text(content["config"])
    seconds = read_as(tuple[float, ...], content["op_seconds"]) if steps else tuple(program.seconds(machine))
    if len(seconds) != len(program.ops) or not sum(seconds) < math.inf:
        raise ValueError("the times of its operators do not fit together")
    problem = Problem(program, seconds, machine.out, machine.back, window, ahead, room_of(config), machine.memory)
    again, whole = read_as(tuple[str, ...], content["again"]), None
    if content["whole"] is not None:
        program = _program(content["whole"])
        whole = replace(problem, program=program, op_seconds=tuple(program.seconds(machine)))
    least = read_as(Least | None, content["least"])
    if (whole is None) != (least is None):
        raise ValueError("it has no least peak of what may be computed again")
    if not {*again} <= {*program.modules}:
        raise ValueError(f"{again!r} are none of its modules")
    moves = tuple(map(bool, read_as(tuple[int, ...], content["moves"])))
    storages, ops = len(problem.program.storages), len(problem.program.ops)
    if len(moves) != storages:
        raise ValueError(f"{len(moves)} decisions on {storages} storages")
    rehearsal: Rehearsal | None = read_as(Rehearsal | None, content["rehearsal"])
    if rehearsal is not None and not (
        (len(rehearsal.living), len(rehearsal.released)) == (ops, storages)
        and all(one < storages for one in rehearsal.returning)
    ):
        raise ValueError("the numbers of its rehearsal do not fit together")
    model, policy = str(content["model"]), content["policy"]
    return kind(model, machine, budget, policy, problem, moves, config, rehearsal, again, whole, least, steps)


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


def _program(content: Mapping[str, Any]) -> Program:
    """The program of a file; raises ``ValueError`` where its numbers do not fit together."""
    program: Program = read_as(Program, content)
    modules, count, forward = len(program.modules), len(program.ops), program.forward_ops
    saves, asks, storages = program.saves, program.asks, program.storages
    known = len(storages) + len(program.arguments)
    fits = (
        forward <= count == len(program.other_bytes)
        and all(op.module < modules for op in program.ops)
        and all(one.module < modules for one in (*storages, *program.arguments))
        and all(save.storage < len(storages) and save.op <= count for save in saves)
        and all(ask.save < len(saves) and ask.op <= count for ask in asks)
        and all(save.op <= after.op for save, after in pairwise(saves))
        and all(ask.op <= after.op for ask, after in pairwise(asks))
        and all(
            one.made <= one.saved <= forward <= one.asked < one.dropped <= max(count, one.asked + 1)
            and one.made <= one.freed <= one.asked <= count
            and 0 < one.moved_bytes <= one.nbytes
            and (one.packing is None or one.packing.nbytes == one.moved_bytes)
            for one in storages
        )
        and all(one.made <= one.freed <= count for one in program.arguments)
        and all(
            call.module < modules
            and call.begin <= call.end <= forward
            and call.first_save < call.last_save <= len(saves)
            and all(one < known for one in call.inputs)
            for call in program.calls
        )
    )
    if not fits:
        raise ValueError("its numbers do not fit together")
    return program
