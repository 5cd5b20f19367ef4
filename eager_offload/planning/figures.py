"""``PlanFigures``: the fields of a plan, the figures that follow from them, the printed text, and the file."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from functools import cache, cached_property
from pathlib import Path
from types import UnionType
from typing import Any, NamedTuple, Self, get_args, get_origin, get_type_hints

from eager_offload.config import OffloadConfig, size_text
from eager_offload.errors import ConfigError
from eager_offload.planning.levels import Kept
from eager_offload.planning.machine import Machine
from eager_offload.planning.program import Problem, Program, floor_seconds, kind_of
from eager_offload.planning.simulate import Candidate, Outcome, PolicySearch
from eager_offload.planning.states import States
from eager_offload.stats import KeepReason
from eager_offload.version import digest

_FORMAT = 7


class Point(NamedTuple):
    """The step for a budget."""

    budget: int
    """Bytes of device memory."""
    peak_bytes: int
    step_seconds: float

    @classmethod
    def least_of(cls, chosen: Candidate) -> Self:
        """Returns the point of ``chosen`` for the smallest budget that it fits."""
        return cls(chosen.peak_bytes, chosen.peak_bytes, chosen.step_seconds)


class Again(NamedTuple):
    """The step if the modules of ``names`` are recomputed."""

    names: tuple[str, ...]
    peak_bytes: int
    step_seconds: float


def _text(plan: object) -> str:
    def content(one: Any) -> object:
        if isinstance(one, OffloadConfig):
            return one.to_text()
        return {field.name: getattr(one, field.name) for field in fields(one)}

    return json.dumps(plan, separators=(",", ":"), default=content)


_hints = cache(get_type_hints)


def _read(kind: Any, value: Any) -> Any:
    if get_origin(kind) in (tuple, Sequence):
        return tuple(_read(get_args(kind)[0], one) for one in value)
    if get_origin(kind) is UnionType:  # T | None
        return None if value is None else _read(get_args(kind)[0], value)
    if kind is OffloadConfig:
        return OffloadConfig.from_text(value)
    if isinstance(value, list):
        return kind(*[_read(hint, one) for hint, one in zip(_hints(kind).values(), value, strict=True)])
    if isinstance(value, dict):
        return kind(**{name: _read(_hints(kind)[name], one) for name, one in value.items()})
    return kind(value)


#: The fields of ``to_dict``, in this order; ``modules`` follows.
_SHOWN = (
    *("model", "machine", "device_budget", "host_budget", "host_bytes", "policy", "fits", "peak_bytes"),
    *("step_seconds", "compute_seconds", "floor_seconds", "kept_bytes", "moved_bytes"),
    *("fraction", "window_bytes", "recomputed_bytes", "again", "least_budget", "guessed", "is_compiled"),
    *("shards", "parts", "node"),
)

#: Most rows of the table, without the sum of all others; the spread of measurements above which times are approximate.
_MOST_ROWS, _ROUGH = 12, 1.5


class Row(NamedTuple):
    """The movable saves of the modules of one kind."""

    kind: str
    """Their names, with ``*`` for numbers."""
    storages: int
    kept_bytes: int
    moved_bytes: int
    recomputed_bytes: int = 0


class FixedWay(NamedTuple):
    """The step of a decision that ignores the budget, for comparison."""

    name: str
    peak_bytes: int
    step_seconds: float


@dataclass(frozen=True)
class PlanFigures:
    """The fields of a plan, which its file holds, and the figures that follow. Sizes are bytes, times seconds."""

    model: str
    """The name of the model's class."""
    machine: Machine
    device_budget: int
    """Bytes of device memory that the step may take."""
    policy: str
    """``"least"``, ``"free"`` or ``"max"``."""
    problem: Problem
    """The traced step on the machine, with the chosen windows."""
    outcome: Outcome
    """The chosen moves, and the simulated step."""
    fraction: float
    """The offloaded fraction of the movable bytes."""
    config: OffloadConfig
    """The settings of the ``Offload`` that trains by the plan."""
    least: Point
    """The decision with the lowest peak."""
    windows: tuple[int, ...] = ()
    """The windows that were tried, in bytes, ascending."""
    again: tuple[str, ...] = ()
    """The names of the recomputed modules: see ``Plan.apply``."""
    kept: tuple[tuple[Kept, ...], ...] = ()
    """For each recomputed module, the results that it keeps."""
    whole: Problem | None = None
    """The step without recompute, if the plan recomputes modules."""
    whole_windows: tuple[int, ...] = ()
    """The windows that were tried for ``whole``, in bytes."""
    checkpointing: Point | None = None
    """The step with full recompute of all blocks and nothing offloaded, if ``recompute`` was given."""
    points: tuple[Point, ...] = ()
    """The Pareto front of other mixtures, for :meth:`Plan.front`: the lowest peak first."""
    may_again: Again | None = None
    """The step with ``recompute=True``, if that would help much."""
    is_compiled: bool = False
    """Whether the model, a module of it or the loss is compiled; the plan is of its eager code."""
    states: States | None = None
    """The optimizer's states; ``None``: not counted."""
    shards: int = 1
    """Devices over which FSDP2 shards the model."""
    parts: int = 1
    """Devices among which tensor parallelism divides the model."""
    node: int = 1
    """Devices of the mesh that are on one node."""

    @property
    def is_small(self) -> bool:
        """Whether all saved tensors except parameters are smaller than ``min_bytes``."""
        saves = self._whole.program.saves
        return all(save.reason in (KeepReason.SMALL, KeepReason.PARAMETER) for save in saves)

    @property
    def movable_bytes(self) -> int:
        """Bytes that could be offloaded in a step."""
        return self._whole.program.movable_bytes

    @property
    def fits(self) -> bool:
        """Whether the peak is within the budget."""
        return self.peak_bytes <= self.device_budget

    @property
    def live_bytes(self) -> tuple[int, ...]:
        """Live bytes on the device at each operator of the step."""
        return self.outcome.live_bytes

    @property
    def peak_bytes(self) -> int:
        """Peak bytes of parameters, gradients, optimizer states, inputs, activations and copies in flight. Workspaces
        of kernels and fragmentation of the allocator are not included."""
        return self.outcome.peak_bytes

    @property
    def step_seconds(self) -> float:
        """Time of forward and backward, stalls included."""
        return self.outcome.step_seconds

    @property
    def compute_seconds(self) -> float:
        """Time of forward and backward without transfers and without recompute."""
        return self._whole.compute_seconds

    @property
    def host_budget(self) -> int | None:
        """Bytes that the tier may store at one time; ``None``: unlimited."""
        budget = self.config.host_budget
        return budget if isinstance(budget, int) else None

    @property
    def host_bytes(self) -> int:
        """Most bytes that the tier stores at one time, in whole pages."""
        return self.problem.tier_bytes(self.outcome.moves)

    @property
    def window_bytes(self) -> int:
        """Most bytes in flight to the tier, and from it if both windows were chosen together."""
        return self.problem.window

    @property
    def floor_seconds(self) -> float:
        """A lower bound on step time for any transfer order: in each half, the longer of compute and transfers."""
        one = self.problem
        backward = one.compute_seconds - one.forward_seconds
        return floor_seconds(one.forward_seconds, backward, self.moved_bytes, one.out, one.back)

    @property
    def moved_bytes(self) -> int:
        """Bytes that are offloaded in forward and reloaded in backward."""
        storages = self.problem.program.storages
        return sum(storages[number].moved_bytes for number in self._returning)

    @property
    def kept_bytes(self) -> int:
        """Movable bytes that are kept."""
        storages = self.problem.program.storages
        return sum(one.nbytes for number, one in enumerate(storages) if number not in self._returning)

    @property
    def recomputed_bytes(self) -> int:
        """Movable bytes that are recomputed instead of saved."""
        return sum(row.recomputed_bytes for row in self.rows())

    @property
    def least_budget(self) -> int:
        """The smallest ``device_budget`` that a plan fits."""
        return self.least.peak_bytes

    @property
    def guessed(self) -> list[str]:
        """Functions of the step that may save other tensors on the device than in the trace on a CPU."""
        return [*self._whole.program.guessed]

    def rows(self) -> list[Row]:
        """Returns the movable saves by kind of module, the largest first."""
        program, found = self.problem.program, dict[str, Row]()
        for number, one in enumerate(program.storages):
            kind = kind_of(program.modules[one.module])
            row = found.get(kind, Row(kind, 0, 0, 0))
            stay, move = (0, one.moved_bytes) if number in self._returning else (one.nbytes, 0)
            found[kind] = Row(kind, row.storages + 1, row.kept_bytes + stay, row.moved_bytes + move)
        for kind, nbytes in (_by_kind(self._whole.program) - _by_kind(program)).items():  # differences above 0
            found[kind] = found.get(kind, Row(kind, 0, 0, 0))._replace(recomputed_bytes=nbytes)
        return sorted(found.values(), key=lambda row: (-sum(row[2:]), row.kind))

    @cached_property
    def _returning(self) -> frozenset[int]:
        return frozenset(self.outcome.reloaded_storages)

    @cached_property
    def _candidates(self) -> PolicySearch:
        return PolicySearch(self.problem, self.windows)

    @property
    def _whole(self) -> Problem:
        return self.problem if self.whole is None else self.whole

    def to_dict(self) -> dict[str, Any]:
        """Returns the figures as JSON types, without the traced step."""
        shown = {name: getattr(self, name) for name in _SHOWN}
        rows = [row._asdict() for row in self.rows()]
        states = None if self.states is None else self.states._asdict()
        made = {"machine": asdict(self.machine), "states": states, "again": list(self.again), "modules": rows}
        return shown | made

    def __str__(self) -> str:
        shards = f", sharded over {self.shards} devices," if self.shards > 1 else ""
        shards = f", each matrix over {self.parts}{shards or ','}" if self.parts > 1 else shards
        states = "without optimizer states"
        if self.states is not None:
            states = f"with {size_text(self.states.nbytes)} of {self.states.name} states"
        table = _table(self.rows(), is_again=bool(self.again))
        first, *others = sentences(self)
        return "\n".join([first, f"{self.model}{shards} {states} on {self.machine}", *others, *table])

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the plan to ``path`` as JSON, and replaces an existing file."""
        content = _text(self)
        Path(path).write_text(f'{{"format":{_FORMAT},"digest":"{digest(content)}","plan":{content}}}', "utf-8")

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """Returns the plan that ``save`` wrote to ``path``.

        Raises:
            ConfigError: the file is not a plan, is of another version, or was edited.
            FileNotFoundError: the file does not exist.
        """
        try:
            content = json.loads(Path(path).read_text("utf-8"))
            if content["format"] != _FORMAT:
                raise ValueError(f"format {content['format']!r} instead of {_FORMAT}")
            if content["digest"] != digest(_text(content["plan"])):
                raise ValueError("it is not as it was written")
            found: Self = _read(cls, content["plan"])
        except (ValueError, TypeError, KeyError) as error:
            raise ConfigError(f"{os.fspath(path)!r} holds no plan that this version can read: {error}") from error
        return found


def _by_kind(program: Program) -> Counter[str]:
    found = Counter[str]()
    for one in program.storages:
        found[kind_of(program.modules[one.module])] += one.nbytes
    return found


def sentences(plan: PlanFigures) -> list[str]:
    """Returns the printed lines; the first one says whether the plan fits, its step time, and the bytes that move."""
    lines = [_answer(plan), f"smallest budget that fits: {size_text(plan.least_budget)}"]
    if not plan.fits and plan.device_budget >= plan.least_budget:
        lines.append('less would be taken with policy="least", which keeps to its budget')
    elif not plan.fits:
        again = "" if plan.again else "recompute=True (--recompute), "
        mesh = "" if plan.shards > 1 else "mesh=... (--mesh) if FSDP2 shards the model, "
        lines.append(
            f"less is taken with {again}a smaller batch, {mesh}or smaller max_inflight_bytes and prefetch_bytes"
        )
    about, times = about_text(plan.machine), plan.step_seconds / (plan.compute_seconds or 1)
    again = " or recompute" if plan.again else ""
    lines.append(
        f"step: {about}{seconds_text(plan.step_seconds)}, {times:.3f}x the step without transfers{again}; "
        f"lower bound {about}{seconds_text(plan.floor_seconds)}"
    )
    if plan.checkpointing is not None:
        lines.append(
            f"checkpointing instead: {about}{seconds_text(plan.checkpointing.step_seconds)}, "
            f"a peak of {size_text(plan.checkpointing.peak_bytes)}"
        )
    if plan.may_again is not None:
        names, peak_bytes, seconds = plan.may_again
        lines.append(
            f"recompute=True would make that at most {seconds_text(seconds)} ({seconds / (plan.step_seconds or 1):.2f} "
            f"times), with a peak of {size_text(peak_bytes)}: {_kinds(names)} recomputed"
        )
    if plan.is_small and not plan.movable_bytes:
        smallest = size_text(plan.config.size("min_bytes"))
        lines.append(f"nothing moves: no saved tensor except parameters reaches min_bytes, {smallest}")
    else:
        again = f"; {size_text(plan.recomputed_bytes)} are recomputed" if plan.again else ""
        if plan.moved_bytes:
            again += f"; windows of {size_text(plan.window_bytes)}, fraction {plan.fraction:.2f}"
        lines.append(
            f"of {size_text(plan.movable_bytes)} that may move, {size_text(plan.moved_bytes)} "
            f"{'move' if plan.moved_bytes else 'do'} and {size_text(plan.kept_bytes)} stay{again}"
        )
    if plan.guessed:
        lines.append(f"guessed, since the device is not here: {'; '.join(plan.guessed)}")
    if plan.is_compiled:
        lines.append(
            "of the model as it is written: when it is compiled, each graph is decided by itself, to this budget"
        )
    if plan.node > 1:
        device, host = size_text(plan.node * plan.peak_bytes), size_text(plan.node * plan.host_bytes)
        lines.append(f"each node of {plan.node} devices: a peak of {device} on them, and {host} of its own memory")
    if plan.host_budget is not None:
        lines.append(f"in the tier: {size_text(plan.host_bytes)} of at most {size_text(plan.host_budget)}")
    return lines


def _answer(plan: PlanFigures) -> str:
    peak, budget, stay, move = map(size_text, (plan.peak_bytes, plan.device_budget, plan.kept_bytes, plan.moved_bytes))
    compute = plan.compute_seconds or 1
    instead = "" if plan.checkpointing is None else f" (checkpointing: {plan.checkpointing.step_seconds / compute:.2f})"
    if plan.again:
        kept = dict.fromkeys(one.name for each in plan.kept for one in each)
        among = f" ({', '.join(kept)} among them)" if kept else ""
        what = f"{stay} stay and {move} move{among}; the rest of {_kinds(plan.again)} is recomputed"
    else:
        what = f"{move} move and {stay} stay" if plan.moved_bytes else "nothing moves"
    fits = f"fits in {peak} of {budget}" if plan.fits else f"does not fit: {peak}, more than the budget of {budget}"
    return f"{fits}; {plan.step_seconds / compute:.2f}x the step without transfers{instead}; {what}"


def _kinds(names: Sequence[str]) -> str:
    return f"{len(names)} of {', '.join(dict.fromkeys(map(kind_of, names)))}"


def _table(rows: Sequence[Row], *, is_again: bool) -> list[str]:
    if not rows:
        return []
    shown, others = list(rows[:_MOST_ROWS]), rows[_MOST_ROWS:]
    if others:
        columns = zip(*(row[1:] for row in others), strict=True)
        shown.append(Row(f"{len(others)} other kinds", *map(sum, columns)))
    width = max(len(row.kind) for row in shown)
    title = f"  {'again':>11}" if is_again else ""
    lines = ["", f"{'module':<{width}}  {'storages':>8}  {'stay':>11}  {'move':>11}{title}"]
    for row in shown:
        stay, move = size_text(row.kept_bytes), size_text(row.moved_bytes)
        last = f"  {size_text(row.recomputed_bytes):>11}" if is_again else ""
        lines.append(f"{row.kind:<{width}}  {row.storages:>8,}  {stay:>11}  {move:>11}{last}")
    return lines


def about_text(machine: Machine) -> str:
    """Returns "about " for times of a ``machine`` whose measured rates vary much, otherwise ""."""
    return "about " if machine.spread > _ROUGH else ""


def seconds_text(value: float) -> str:
    return f"{value:.3f} s" if value >= 1 else f"{1e3 * value:,.3g} ms"
