"""What a plan is made of, and its file, which is read again as it was written or not at all."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path
from types import UnionType
from typing import Any, NamedTuple, Self, TypeVar, get_args, get_origin, get_type_hints

from eager_offload.config import OffloadConfig
from eager_offload.errors import ConfigError
from eager_offload.planning.choose import Chosen
from eager_offload.planning.machine import Machine
from eager_offload.planning.problem import Problem
from eager_offload.planning.replay import Outcome
from eager_offload.planning.states import States
from eager_offload.version import digest

#: The form of the file.
_FORMAT = 5


class Point(NamedTuple):
    """What a budget buys."""

    budget: int
    """Bytes of the device."""
    peak_bytes: int
    """That the step takes at most."""
    step_seconds: float

    @classmethod
    def least_of(cls, chosen: Chosen) -> Self:
        """For the least budget that buys this."""
        return cls(chosen.peak_bytes, chosen.peak_bytes, chosen.step_seconds)


class Again(NamedTuple):
    """What comes of it where modules are computed again."""

    names: tuple[str, ...]
    """Of those modules."""
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
    """The step as numbers, in the windows that were chosen."""
    outcome: Outcome
    """What moves, and what comes of it."""
    fraction: float
    """The part of the bytes that may move that does."""
    config: OffloadConfig
    """The settings of the ``Offload`` that trains by it."""
    least: Point
    """The least peak that any decision has."""
    windows: tuple[int, ...] = ()
    """The windows that were chosen among; bytes, smallest first."""
    again: tuple[str, ...] = ()
    """The names of the modules that are computed again in backward: see ``Plan.apply``."""
    whole: Problem | None = None
    """The step in which nothing is computed again, where something is."""
    whole_windows: tuple[int, ...] = ()
    """The windows that were chosen among for that."""
    may_again: Again | None = None
    """What ``recompute=True`` would bring, where that is much."""
    is_compiled: bool = False
    """Whether the model, a module of it or the loss is compiled: the step is of the eager code."""
    states: States | None = None
    """Of the optimizer; ``None``: they are not counted."""
    shards: int = 1
    """Over how many devices FSDP2 shards the model."""


_Plan = TypeVar("_Plan", bound=PlanFields)


def write(plan: PlanFields, path: str | os.PathLike[str]) -> None:
    """Writes ``plan`` to ``path``, as JSON."""
    content = _text(plan)
    Path(path).write_text(f'{{"format":{_FORMAT},"digest":"{digest(content)}","plan":{content}}}', "utf-8")


def read(kind: type[_Plan], path: str | os.PathLike[str]) -> _Plan:
    """The plan that ``write`` has put there.

    Raises:
        ConfigError: that is no plan, or one of another version, or something has changed it.
    """
    try:
        content = json.loads(Path(path).read_text("utf-8"))
        if content["format"] != _FORMAT:
            raise ValueError(f"format {content['format']!r} instead of {_FORMAT}")
        if content["digest"] != digest(_text(content["plan"])):
            raise ValueError("it is not as it was written")
        found: _Plan = _read(kind, content["plan"])
    except (ValueError, TypeError, KeyError) as error:
        raise ConfigError(f"{os.fspath(path)!r} holds no plan that this version can read: {error}") from error
    return found


def _text(plan: object) -> str:
    """Named tuples become lists, dataclasses objects, and a configuration its own text."""

    def content(one: Any) -> object:
        if isinstance(one, OffloadConfig):
            return one.to_text()
        return {field.name: getattr(one, field.name) for field in fields(one)}

    return json.dumps(plan, separators=(",", ":"), default=content)


_hints = cache(get_type_hints)


def _read(kind: Any, value: Any) -> Any:
    """The ``kind`` that ``_text`` has written as ``value``."""
    if get_origin(kind) in (tuple, Sequence):
        return tuple(_read(get_args(kind)[0], one) for one in value)
    if get_origin(kind) is UnionType:  # with None
        return None if value is None else _read(get_args(kind)[0], value)
    if kind is OffloadConfig:
        return OffloadConfig.from_text(value)
    if isinstance(value, list):
        return kind(*[_read(hint, one) for hint, one in zip(_hints(kind).values(), value, strict=True)])
    if isinstance(value, dict):
        return kind(**{name: _read(_hints(kind)[name], one) for name, one in value.items()})
    return kind(value)
