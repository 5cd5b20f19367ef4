"""``Plan``: what is known of a step before it runs."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from eager_offload.config import size_text
from eager_offload.errors import ConfigError
from eager_offload.machine import Machine
from eager_offload.plan.predict import Moves, Prediction, Problem
from eager_offload.plan.program import Ask, Op, Program, Save, Storage, kind_of
from eager_offload.plan.solve import Decision, Solver
from eager_offload.stats import KeepReason

__all__ = ["POLICIES", "Plan", "Point"]

#: What a plan aims at.
POLICIES = ("least", "free", "max")
#: The form of the file that ``Plan.save`` writes.
_FORMAT = 1
#: Rows of the table; what is left is one more.
_MOST_ROWS = 12


class Point(NamedTuple):
    """What a budget buys."""

    budget: int
    """Bytes of the device."""
    peak_bytes: int
    """That the step takes at most."""
    step_seconds: float


class Row(NamedTuple):
    """What modules of one kind save."""

    kind: str
    """Their names, with ``*`` for numbers."""
    storages: int
    kept_bytes: int
    moved_bytes: int


@dataclass(frozen=True)
class Plan:
    """What a step of a model is to move on a device, and what comes of it; :func:`eager_offload.plan` makes one.

    ``print`` shows it: whether it fits, its peak, its time, and what is moved of each kind of module. All of it is
    predicted, by arithmetic on shapes: nothing was run. Sizes are bytes, times seconds.
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

    @property
    def fits(self) -> bool:
        """Whether the peak is within the budget."""
        return self.peak_bytes <= self.device_budget

    @property
    def peak_bytes(self) -> int:
        """Of parameters, gradients, inputs, activations and what is on its way, at most. Optimizer states count where
        they were named; memory that kernels take for themselves, and what an allocator cannot hand out, do not."""
        return self._prediction.peak_bytes

    @property
    def step_seconds(self) -> float:
        """Forward and backward, with what compute waits for transfers."""
        return self._prediction.step_seconds

    @property
    def compute_seconds(self) -> float:
        """Forward and backward without any transfer."""
        return self.problem.compute_seconds

    @property
    def floor_seconds(self) -> float:
        """What no order of these transfers goes below: the longer of compute and transfers, in each of its halves."""
        return self.problem.floor_seconds(self.moved_bytes)

    @property
    def moved_bytes(self) -> int:
        """That leave the device in forward, and come back in backward."""
        return self._prediction.moved_bytes

    @property
    def kept_bytes(self) -> int:
        """That could leave the device, and stay."""
        storages = self.problem.program.storages
        return sum(one.nbytes for number, one in enumerate(storages) if number not in self._returning)

    @property
    def least_budget(self) -> int:
        """The least ``device_budget`` that a plan fits."""
        return self._solver.least.prediction.peak_bytes

    def front(self, points: int = 16) -> list[Point]:
        """The best plans for budgets from ``least_budget`` to where nothing has to move, in that order.

        Args:
            points: how many, 2 or more.

        Raises:
            ConfigError: there are fewer.
        """
        if type(points) is not int or points < 2:
            raise ConfigError(f"points={points!r} is not accepted: points takes a whole number, 2 or more")
        nothing = self.problem.predict((False,) * len(self.moves))
        low, high = self.least_budget, max(nothing.peak_bytes, self.least_budget)
        found: list[Point] = []
        best: Decision | None = None
        for step in range(points):
            budget = low + (high - low) * step // (points - 1)
            decision = self._solver.within(budget)
            if best is not None and best.prediction.step_seconds <= decision.prediction.step_seconds:
                decision = best  # what fits less fits here
            best = decision
            found.append(Point(budget, decision.prediction.peak_bytes, decision.prediction.step_seconds))
        return found

    def rows(self) -> list[Row]:
        """What modules of each kind save that may move, the largest first."""
        program, found = self.problem.program, dict[str, Row]()
        for number, storage in enumerate(program.storages):
            kind = kind_of(program.modules[storage.module])
            row = found.get(kind, Row(kind, 0, 0, 0))
            kept, moved = (0, storage.moved_bytes) if number in self._returning else (storage.nbytes, 0)
            found[kind] = Row(kind, row.storages + 1, row.kept_bytes + kept, row.moved_bytes + moved)
        return sorted(found.values(), key=lambda row: (-row.kept_bytes - row.moved_bytes, row.kind))

    @cached_property
    def _prediction(self) -> Prediction:
        return self.problem.predict(self.moves)

    @cached_property
    def _returning(self) -> frozenset[int]:
        return self.problem.returning(self.moves)

    @cached_property
    def _solver(self) -> Solver:
        return Solver(self.problem)

    # -- for a reader -------------------------------------------------------------------------------------------------

    def __str__(self) -> str:
        fits = "fits" if self.fits else "does not fit"
        lines = [
            f"{self.model} on {self.machine}",
            f"{fits}: a peak of {size_text(self.peak_bytes)}, where {size_text(self.device_budget)} may be taken; the "
            f"least that a plan fits is {size_text(self.least_budget)}",
            f"step: {_seconds(self.step_seconds)}, {self.step_seconds / (self.compute_seconds or 1):.3f} times one "
            f"without transfers; floor {_seconds(self.floor_seconds)}",
            f"of {size_text(self.problem.program.movable_bytes)} that may move, {size_text(self.moved_bytes)} "
            f"{'move' if self.moved_bytes else 'do'} and {size_text(self.kept_bytes)} stay",
        ]
        rows = self.rows()
        if rows:
            shown, others = rows[:_MOST_ROWS], rows[_MOST_ROWS:]
            if others:
                kept, moved = sum(row.kept_bytes for row in others), sum(row.moved_bytes for row in others)
                storages = sum(row.storages for row in others)
                shown.append(Row(f"{len(others)} other kinds", storages, kept, moved))
            width = max(len(row.kind) for row in shown)
            lines += ["", f"{'module':<{width}}  {'storages':>8}  {'stay':>11}  {'move':>11}"]
            for row in shown:
                stay, move = size_text(row.kept_bytes), size_text(row.moved_bytes)
                lines.append(f"{row.kind:<{width}}  {row.storages:>8,}  {stay:>11}  {move:>11}")
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
            "policy": self.policy,
            "fits": self.fits,
            "peak_bytes": self.peak_bytes,
            "step_seconds": self.step_seconds,
            "compute_seconds": self.compute_seconds,
            "floor_seconds": self.floor_seconds,
            "kept_bytes": self.kept_bytes,
            "moved_bytes": self.moved_bytes,
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
            "program": asdict(problem.program),
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
        except (ValueError, TypeError, KeyError, IndexError, AttributeError) as error:
            raise ConfigError(f"{os.fspath(path)!r} holds no plan that this version can read: {error}") from error

    @classmethod
    def _from_dict(cls, content: Mapping[str, Any]) -> Plan:
        if content["format"] != _FORMAT:
            raise ValueError(f"format {content['format']!r} instead of {_FORMAT}")
        if content["policy"] not in POLICIES:
            raise ValueError(f"the policy {content['policy']!r}")
        machine, program = Machine(**content["machine"]), _program(content["program"])
        problem = Problem(
            program,
            tuple(program.seconds(machine)),
            machine.out,
            machine.back,
            _whole(content["max_inflight_bytes"]),
            _whole(content["prefetch_bytes"]),
        )
        moves = tuple(bool(_whole(one)) for one in content["moves"])
        if len(moves) != len(program.storages):
            raise ValueError(f"{len(moves)} decisions on {len(program.storages)} storages")
        budget = _whole(content["device_budget"])
        return cls(str(content["model"]), machine, budget, content["policy"], problem, moves)


def _seconds(value: float) -> str:
    return f"{value:.3f} s" if value >= 1 else f"{1e3 * value:,.3g} ms"


def _whole(value: object) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(f"{value!r} is no number of bytes, or of operators")
    return value


def _program(content: Mapping[str, Any]) -> Program:
    """The program of a file.

    Raises:
        ValueError: its numbers do not fit together.
    """
    modules = tuple(map(str, content["modules"]))
    ops = tuple(Op(str(one[0]), _whole(one[1]), _whole(one[2]), _whole(one[3]), bool(one[4])) for one in content["ops"])
    saves = tuple(
        Save(_whole(one[0]), bool(one[1]), None if one[2] is None else KeepReason(one[2]), int(one[3]))
        for one in content["saves"]
    )
    asks = tuple(Ask(*map(_whole, one)) for one in content["asks"])
    storages = tuple(Storage(*map(_whole, one)) for one in content["storages"])
    other_bytes = tuple(map(_whole, content["other_bytes"]))
    forward, count = _whole(content["forward_ops"]), len(ops)
    fits = forward <= count == len(other_bytes)
    fits = fits and all(
        number < len(modules) for number in [*(op.module for op in ops), *(one.module for one in storages)]
    )
    fits = fits and all(-1 <= save.storage < len(storages) for save in saves)
    fits = fits and all(ask.save < len(saves) and ask.op <= count for ask in asks)
    for one in storages:
        fits = fits and one.made <= one.saved <= forward <= one.asked < one.dropped <= max(count, one.asked + 1)
        fits = fits and one.made <= one.freed <= one.asked <= count and 0 < one.moved_bytes <= one.nbytes
    if not fits:
        raise ValueError("its numbers do not fit together")
    return Program(modules, ops, forward, saves, asks, storages, other_bytes)
