"""``Plan``: what is known of a step before it runs."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from torch import nn

from eager_offload.config import OffloadConfig, size_text
from eager_offload.errors import ConfigError
from eager_offload.machine import Machine
from eager_offload.plan.apply import checkpointed
from eager_offload.plan.decide import Outcome, RehearsedSolver, outcome_of
from eager_offload.plan.draft import Rehearsal, draft
from eager_offload.plan.predict import Moves, Problem
from eager_offload.plan.program import Ask, ModuleCall, Op, Program, Save, Storage, kind_of
from eager_offload.plan.recompute import Recomputing
from eager_offload.stats import KeepReason
from eager_offload.step_plan import ComputedPlan, Fate, StepPlan

__all__ = ["POLICIES", "Least", "Plan", "Point", "room_of"]

#: What a plan aims at.
POLICIES = ("least", "free", "max")
#: Numbers in files are below it.
_MOST = 1 << 62
#: The form of the file that ``Plan.save`` writes.
_FORMAT = 1
#: Rows of the table; what is left is one more.
_MOST_ROWS = 12
#: A part of a step for which another plan is worth while.
_GAIN = 0.02
#: Of a budget of the tier, one part in so many is left for what its slabs round.
_ROUNDED = 8


class Point(NamedTuple):
    """What a budget buys."""

    budget: int
    """Bytes of the device."""
    peak_bytes: int
    """That the step takes at most."""
    step_seconds: float


class FixedWay(NamedTuple):
    """What comes of a decision that looks at no budget."""

    name: str
    peak_bytes: int
    step_seconds: float


class Least(NamedTuple):
    """What the plan of the least peak comes to."""

    peak_bytes: int
    step_seconds: float


class Row(NamedTuple):
    """What modules of one kind save."""

    kind: str
    """Their names, with ``*`` for numbers."""
    storages: int
    kept_bytes: int
    moved_bytes: int
    recomputed_bytes: int = 0


@dataclass(frozen=True)
class Plan(ComputedPlan):
    """What a step of a model is to move on a device, and what comes of it; :func:`eager_offload.plan` makes one.

    ``print`` shows it: whether it fits, its peak, its time, and what is moved of each kind of module. The model was not
    run: its step was traced, and the library itself was rehearsed with it on a simulated device, whose peak and time
    these are. ``Offload(plan=plan)`` does the same in training. Sizes are bytes, times seconds.
    """

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
    """The names of the modules that are computed again in backward: see :meth:`apply`."""
    whole: Problem | None = None
    """The step in which nothing is computed again, where something may be."""
    traced_least: Least | None = None
    """What the least peak is where something may be computed again, which takes the model to say."""
    steps: int = 0
    """By how many real steps the times of operators are; 0: estimated."""

    @cached_property
    def step_plans(self) -> tuple[StepPlan, ...]:
        """What ``Offload(plan=...)`` follows from the first step on; empty where no step plan can say it: backward runs
        inside of forward, or twice, or tensors are marked by ``eo.keep`` or ``eo.prefer_offload``."""
        drafted = None if self.rehearsal is None else draft(self.problem, self.moves)
        if drafted is None or self.rehearsal is None:
            return ()
        program, released = self.problem.program, self.rehearsal.released
        saves = (
            replace(save, release=released[program.saves[number].storage]) if save.fate is Fate.OFFLOAD else save
            for number, save in enumerate(drafted.saves)
        )
        return (replace(drafted, saves=tuple(saves)),)

    @property
    def fits(self) -> bool:
        """Whether the peak is within the budget."""
        return self.peak_bytes <= self.device_budget

    @property
    def peak_bytes(self) -> int:
        """Of parameters, gradients, inputs, activations and what is on its way, at most. Optimizer states count where
        they were named; memory that kernels take for themselves, and what an allocator cannot hand out, do not."""
        return self._outcome.peak_bytes

    @property
    def step_seconds(self) -> float:
        """Forward and backward, with what compute waits for transfers."""
        return self._outcome.step_seconds

    @property
    def compute_seconds(self) -> float:
        """Forward and backward without any transfer, and with nothing computed again."""
        return self._whole.compute_seconds

    @property
    def host_budget(self) -> int | None:
        """Bytes that may rest in the tier at one time; ``None``: any number."""
        budget = self.config.host_budget
        return budget if isinstance(budget, int) else None

    @property
    def host_bytes(self) -> int:
        """That rest in the tier at one time, at most, in whole pages."""
        return self.problem.tier_bytes(self.moves)

    @property
    def floor_seconds(self) -> float:
        """What no order of these transfers goes below: the longer of compute and transfers, in each of its halves."""
        return self.problem.floor_seconds(self.moved_bytes)

    @property
    def moved_bytes(self) -> int:
        """That leave the device in forward, and come back in backward."""
        storages = self.problem.program.storages
        return sum(storages[number].moved_bytes for number in self._returning)

    @property
    def kept_bytes(self) -> int:
        """That could leave the device, and stay."""
        storages = self.problem.program.storages
        return sum(one.nbytes for number, one in enumerate(storages) if number not in self._returning)

    @property
    def recomputed_bytes(self) -> int:
        """That could leave the device, and are computed again in place of being saved."""
        storages = self._whole.program.storages
        return sum(storages[number].nbytes for number in self._recomputed)

    @contextmanager
    def apply(self, model: nn.Module) -> Iterator[None]:
        """Puts ``torch.utils.checkpoint`` around the modules that are computed again, and takes it off afterwards.

            with plan.apply(model):
                train(model)

        The checkpoints are not reentrant and keep the state of random numbers. Parameters, hooks and ``state_dict`` of
        the model stay as they are, and its copies have no checkpoints. May be entered in several threads, and more
        than once. Where nothing is to be computed again it does nothing.

        Args:
            model: the one that was planned, or one like it, wrapped or not.

        Raises:
            ConfigError: a module is not there.
        """
        with checkpointed(model, self.again):
            yield

    def adapted(self, surplus: int) -> Plan | None:
        """The plan for a device on which so many bytes more are in use than this one knows of, or fewer.

        ``Offload`` asks for it, by the peaks that it has measured: see the page on planning.

        Returns:
            With more of them, one whose peak is lower; with fewer, one whose step is 2 % shorter, where what moves is
            as little as can be. ``None`` where there is none.
        """
        problem = self.problem.with_more(surplus)
        found = RehearsedSolver(problem, self.machine.launch_seconds).within(self.device_budget)
        if surplus > 0:
            is_better = found.peak_bytes < self.peak_bytes + surplus
        else:
            is_better = self.policy == "least" and found.step_seconds <= self.step_seconds * (1 - _GAIN)
            is_better = is_better and found.peak_bytes <= self.device_budget
        if not is_better or found.rehearsal is None:
            return None
        whole, least = self.whole, self.traced_least
        if whole is not None and least is not None:
            whole, least = whole.with_more(surplus), least._replace(peak_bytes=least.peak_bytes + surplus)
        return replace(
            self, problem=problem, moves=found.moves, rehearsal=found.rehearsal, whole=whole, traced_least=least
        )

    @property
    def least_budget(self) -> int:
        """The least ``device_budget`` that a plan fits."""
        return self._least.peak_bytes

    def front(self, points: int = 16) -> list[Point]:
        """The best plans for budgets from ``least_budget`` to where nothing has to move, in that order.

        Those in which something is computed again are worked out by numbers: no step of theirs was traced.

        Args:
            points: how many, 2 or more.

        Raises:
            ConfigError: there are fewer.
        """
        if type(points) is not int or points < 2:
            raise ConfigError(f"points={points!r} is not accepted: points takes a whole number, 2 or more")
        nothing = self._solver.nothing
        low, high = self.least_budget, max(nothing.peak_bytes, self.least_budget)
        found: list[Point] = []
        best = self._least
        for step in range(points):
            budget = low + (high - low) * step // (points - 1)
            outcome = self._solver.within(budget)
            if outcome.peak_bytes <= budget and outcome.step_seconds < best.step_seconds:
                best = Least(outcome.peak_bytes, outcome.step_seconds)
            found.append(Point(budget, *best))
        return found

    def fixed_ways(self) -> list[FixedWay]:
        """Decisions that look at no budget, to compare with; nothing is computed again in them."""
        count = len(self._whole.program.storages)
        outcomes = {
            "nothing moves": self._solver.nothing,
            "every second storage moves": self._solver.of(tuple(number % 2 == 0 for number in range(count))),
            "all that may moves": self._solver.of((True,) * count),
        }
        return [FixedWay(name, one.peak_bytes, one.step_seconds) for name, one in outcomes.items()]

    def living(self) -> Sequence[int]:
        """Bytes that live at each operator of ``problem``."""
        return self.problem.living(self.moves) if self.rehearsal is None else self.rehearsal.living

    def rows(self) -> list[Row]:
        """What modules of each kind save that may move, the largest first."""
        program, found = self.problem.program, dict[str, Row]()
        for number, storage in enumerate(program.storages):
            kind = kind_of(program.modules[storage.module])
            row = found.get(kind, Row(kind, 0, 0, 0))
            kept, moved = (0, storage.moved_bytes) if number in self._returning else (storage.nbytes, 0)
            found[kind] = row._replace(
                storages=row.storages + 1, kept_bytes=row.kept_bytes + kept, moved_bytes=row.moved_bytes + moved
            )
        for number in self._recomputed:
            storage = self._whole.program.storages[number]
            kind = kind_of(self._whole.program.modules[storage.module])
            row = found.get(kind, Row(kind, 0, 0, 0))
            nbytes = row.recomputed_bytes + storage.nbytes
            found[kind] = row._replace(storages=row.storages + 1, recomputed_bytes=nbytes)
        return sorted(found.values(), key=lambda row: (-sum(row[2:]), row.kind))

    @cached_property
    def _outcome(self) -> Outcome:
        """What comes of it."""
        return outcome_of(self.problem, self.moves, self.rehearsal)

    @cached_property
    def _returning(self) -> frozenset[int]:
        if self.rehearsal is not None:
            return frozenset(self.rehearsal.returning)
        return self.problem.returning(self.moves)

    @cached_property
    def _solver(self) -> RehearsedSolver:
        return RehearsedSolver(self._whole, self.machine.launch_seconds, recompute=self.whole is not None)

    @cached_property
    def _least(self) -> Least:
        if self.traced_least is not None:
            return self.traced_least
        least = self._solver.least
        return Least(least.peak_bytes, least.step_seconds)

    @property
    def _whole(self) -> Problem:
        return self.problem if self.whole is None else self.whole

    @cached_property
    def _recomputed(self) -> frozenset[int]:
        """The storages of the whole step that are computed again."""
        return Recomputing(self._whole).gone(self.again)

    # -- for a reader -------------------------------------------------------------------------------------------------

    def __str__(self) -> str:
        fits = "fits" if self.fits else "does not fit"
        lines = [
            f"{self.model} on {self.machine}",
            f"{fits}: a peak of {size_text(self.peak_bytes)}, where {size_text(self.device_budget)} may be taken; the "
            f"least that a plan fits is {size_text(self.least_budget)}",
            f"step: {_seconds(self.step_seconds)}, {self.step_seconds / (self.compute_seconds or 1):.3f} times one "
            f"without transfers; floor {_seconds(self.floor_seconds)}",
            f"of {size_text(self._whole.program.movable_bytes)} that may move, {size_text(self.moved_bytes)} "
            f"{'move' if self.moved_bytes else 'do'} and {size_text(self.kept_bytes)} stay"
            + (f"; {size_text(self.recomputed_bytes)} are computed again" if self.again else ""),
        ]
        if self.steps:
            lines.append(f"operators take what they took in {self.steps} real steps")
        if self.host_budget is not None:
            lines.append(f"in the tier: {size_text(self.host_bytes)}, where {size_text(self.host_budget)} may rest")
        rows = self.rows()
        if rows:
            shown, others = rows[:_MOST_ROWS], rows[_MOST_ROWS:]
            if others:
                kept, moved = sum(row.kept_bytes for row in others), sum(row.moved_bytes for row in others)
                storages, again = (sum(column) for column in zip(*((row[1], row[4]) for row in others), strict=True))
                shown.append(Row(f"{len(others)} other kinds", storages, kept, moved, again))
            width = max(len(row.kind) for row in shown)
            title = f"  {'again':>11}" if self.again else ""
            lines += ["", f"{'module':<{width}}  {'storages':>8}  {'stay':>11}  {'move':>11}{title}"]
            for row in shown:
                stay, move = size_text(row.kept_bytes), size_text(row.moved_bytes)
                last = f"  {size_text(row.recomputed_bytes):>11}" if self.again else ""
                lines.append(f"{row.kind:<{width}}  {row.storages:>8,}  {stay:>11}  {move:>11}{last}")
        return "\n".join(lines)

    def __repr__(self) -> str:
        return (
            f"<Plan of {self.model} on {self.machine.name}: {'fits' if self.fits else 'does not fit'}, "
            f"{size_text(self.peak_bytes)}, {_seconds(self.step_seconds)}>"
        )

    # -- files --------------------------------------------------------------------------------------------------------

    def to_dict(self) -> dict[str, Any]:
        """What it says, in the types that JSON has, without the step's own numbers."""
        return {
            "model": self.model,
            "machine": asdict(self.machine),
            "device_budget": self.device_budget,
            "host_budget": self.host_budget,
            "host_bytes": self.host_bytes,
            "policy": self.policy,
            "steps": self.steps,
            "fits": self.fits,
            "peak_bytes": self.peak_bytes,
            "step_seconds": self.step_seconds,
            "compute_seconds": self.compute_seconds,
            "floor_seconds": self.floor_seconds,
            "kept_bytes": self.kept_bytes,
            "moved_bytes": self.moved_bytes,
            "recomputed_bytes": self.recomputed_bytes,
            "again": list(self.again),
            "least_budget": self.least_budget,
            "modules": [row._asdict() for row in self.rows()],
        }

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the plan to ``path``, as JSON; a file that is there is replaced."""
        problem = self.problem
        content = {
            "format": _FORMAT,
            "model": self.model,
            "machine": asdict(self.machine),
            "device_budget": self.device_budget,
            "policy": self.policy,
            "max_inflight_bytes": problem.window,
            "prefetch_bytes": problem.ahead,
            "moves": [int(one) for one in self.moves],
            "config": self.config.to_text(),
            "rehearsal": self.rehearsal,
            "program": asdict(problem.program),
            "steps": self.steps,
            "op_seconds": list(problem.op_seconds) if self.steps else None,
            "again": list(self.again),
            "whole": None if self.whole is None else asdict(self.whole.program),
            "least": self.traced_least,
        }
        Path(path).write_text(json.dumps(content, separators=(",", ":")), "utf-8")

    def html(self, path: str | os.PathLike[str]) -> None:
        """Writes a page to ``path`` that needs no network: what lives when, what other budgets buy, what moves.

        Fixed ways are drawn to compare with: nothing moves, every second storage does, all that may does.
        """
        from eager_offload.plan.html import page  # jinja2 is not needed for a plan

        Path(path).write_text(page(self), "utf-8")

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Plan:
        """The plan that ``save`` wrote to ``path``.

        Raises:
            ConfigError: the file holds no such plan, or one of another version.
        """
        try:
            return cls._from_dict(json.loads(Path(path).read_text("utf-8")))
        except (ValueError, TypeError, KeyError, IndexError, AttributeError, OverflowError) as error:
            raise ConfigError(f"{os.fspath(path)!r} holds no plan that this version can read: {error}") from error

    @classmethod
    def _from_dict(cls, content: Mapping[str, Any]) -> Plan:
        if content["format"] != _FORMAT:
            raise ValueError(f"format {content['format']!r} instead of {_FORMAT}")
        if content["policy"] not in POLICIES:
            raise ValueError(f"the policy {content['policy']!r}")
        machine, program = Machine(**content["machine"]), _program(content["program"])
        windows = _whole(content["max_inflight_bytes"]), _whole(content["prefetch_bytes"])
        budget, config = _whole(content["device_budget"]), OffloadConfig.from_text(content["config"])
        steps = _whole(content["steps"])
        seconds = _measured(content["op_seconds"], program) if steps else tuple(program.seconds(machine))
        problem = Problem(program, seconds, machine.out, machine.back, *windows, room_of(config))
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
        name, policy = str(content["model"]), content["policy"]
        found = cls(name, machine, budget, policy, problem, moves, config, rehearsal, again, whole, least, steps)
        if rehearsal is not None and not found.step_plans:
            raise ValueError("it was rehearsed, and there is no step plan")
        return found


def room_of(config: OffloadConfig) -> int | None:
    """Bytes that a decision may let rest in the tier at one time; ``None``: any number."""
    budget = config.host_budget
    return budget - budget // _ROUNDED if isinstance(budget, int) else None


def _seconds(value: float) -> str:
    return f"{value:.3f} s" if value >= 1 else f"{1e3 * value:,.3g} ms"


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
    seconds, living, returning, released = content
    storages = len(program.storages)
    fits = type(seconds) in (int, float) and seconds >= 0 and len(released) == storages
    fits = fits and len(living) == len(program.ops) and all(type(one) is int and one >= -1 for one in released)
    if not fits or any(_whole(one) >= storages for one in returning):
        raise ValueError("the numbers of its rehearsal do not fit together")
    return Rehearsal(float(seconds), tuple(map(_whole, living)), tuple(returning), tuple(released))


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
    storages = tuple(Storage(*map(_whole, one)) for one in content["storages"])
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
    arguments = tuple(Storage(*map(_whole, one)) for one in content["arguments"])
    fits = fits and all(one.made <= one.freed <= count and one.module < len(modules) for one in arguments)
    calls = tuple(_call(*one) for one in content["calls"])
    known = len(storages) + len(arguments)
    for call in calls:
        fits = fits and call.module < len(modules) and call.begin <= call.end <= forward
        fits = fits and call.first_save < call.last_save <= len(saves) and all(one < known for one in call.inputs)
    if not fits:
        raise ValueError("its numbers do not fit together")
    return Program(modules, ops, forward, saves, asks, storages, other_bytes, calls, arguments)
