"""What a page says of a trace, in numbers; pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from eager_offload.observe.trace import Kind, SavedGroup, Slice, Trace

__all__ = ["Lane", "Outcome", "Peaks", "Placed", "Saver", "WorkTotal", "lanes", "peaks", "savers", "work_totals"]


@dataclass(frozen=True, slots=True)
class Peaks:
    """Most bytes at one moment, by where they were."""

    device: int
    host: int
    disk: int
    without_offload: int


def peaks(trace: Trace) -> Peaks:
    """Over the whole trace."""
    samples = trace.memory
    return Peaks(
        device=max((one.device for one in samples), default=0),
        host=max((one.host for one in samples), default=0),
        disk=max((one.disk for one in samples), default=0),
        without_offload=max((one.without_offload for one in samples), default=0),
    )


@dataclass(frozen=True, slots=True)
class WorkTotal:
    """All slices of one kind on one device."""

    device: str
    kind: Kind
    count: int
    seconds: float
    """During which at least one of them ran."""
    nbytes: int

    @property
    def rate(self) -> float | None:
        """Bytes a second while it ran; ``None`` for what moves none."""
        return self.nbytes / self.seconds if self.nbytes and self.seconds else None


def work_totals(trace: Trace) -> list[WorkTotal]:
    """By device and kind, in the order of both."""
    return [
        WorkTotal(device, kind, len(found), _covered(found), sum(one.nbytes for one in found))
        for device in trace.devices
        for kind in Kind
        if (found := [one for one in trace.slices if one.device == device and one.kind is kind])
    ]


def _covered(slices: Iterable[Slice]) -> float:
    """Seconds that the slices cover, however they overlap."""
    covered = reached = 0.0
    for one in sorted(slices, key=lambda one: one.start):
        covered += max(one.stop - max(one.start, reached), 0.0)
        reached = max(reached, one.stop)
    return covered


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of some saves."""

    name: str
    """``"offloaded"``, ``"shared"``, or the reason for which they were kept."""
    kept: bool
    nbytes: int


@dataclass(frozen=True, slots=True)
class Saver:
    """What saved something: an operation of a module, or of several that differ in numbers alone."""

    operation: str
    module: str
    """``*`` stands for a number that differs."""
    modules: int
    """How many modules that are."""
    count: int
    nbytes: int
    outcomes: tuple[Outcome, ...]
    """Most bytes first."""


def savers(groups: Sequence[SavedGroup], *, alike: bool) -> list[Saver]:
    """Who saved most, first.

    Args:
        alike: whether ``layers.0.mlp`` and ``layers.1.mlp`` count as one, ``layers.*.mlp``.
    """
    members: dict[tuple[str, str], list[SavedGroup]] = {}
    for group in groups:
        module = re.sub(r"(?<=\.)\d+(?=\.|$)", "*", group.module) if alike else group.module
        members.setdefault((group.operation, module), []).append(group)
    found = []
    for (operation, module), those in members.items():
        names = {group.module for group in those}
        found.append(
            Saver(
                operation=operation,
                module=names.pop() if len(names) == 1 else module,
                modules=len({group.module for group in those}),
                count=sum(group.count for group in those),
                nbytes=sum(group.nbytes for group in those),
                outcomes=_outcomes(those),
            )
        )
    return sorted(found, key=lambda one: -one.nbytes)


def _outcomes(groups: Iterable[SavedGroup]) -> tuple[Outcome, ...]:
    nbytes: dict[tuple[str, bool], int] = {}
    for group in groups:
        key = (group.reason or group.outcome, group.outcome == "kept")
        nbytes[key] = nbytes.get(key, 0) + group.nbytes
    return tuple(sorted((Outcome(*key, total) for key, total in nbytes.items()), key=lambda one: -one.nbytes))


@dataclass(frozen=True, slots=True)
class Placed:
    """A slice, and how many others of its track it lies inside."""

    slice: Slice
    depth: int


@dataclass(frozen=True, slots=True)
class Lane:
    """A track of a device, as it is drawn."""

    device: str
    name: str
    kind: Kind
    placed: tuple[Placed, ...]
    """In the order of time; what lies outside comes before what lies inside."""

    @property
    def depth(self) -> int:
        """How many slices lie over each other, at most."""
        return 1 + max((one.depth for one in self.placed), default=0)


def lanes(trace: Trace) -> list[Lane]:
    """All tracks: by device, then in the order of ``Kind``, then by name."""
    members: dict[tuple[str, str], list[Slice]] = {}
    for one in trace.slices:
        members.setdefault((one.device, one.track), []).append(one)
    devices, kinds = _places(trace.devices), _places(Kind)
    found = [Lane(device, name, those[0].kind, _placed(those)) for (device, name), those in members.items()]
    return sorted(found, key=lambda lane: (devices[lane.device], kinds[lane.kind], _backward_last(lane.name)))


def _places(names: Iterable[str]) -> Mapping[str, int]:
    return {name: place for place, name in enumerate(names)}


def _backward_last(name: str) -> tuple[bool, str]:
    """Forward stands above backward."""
    return "backward" in name, name


def _placed(slices: Sequence[Slice]) -> tuple[Placed, ...]:
    placed: list[Placed] = []
    around: list[Slice] = []
    for one in sorted(slices, key=lambda one: (one.start, -one.stop)):
        while around and around[-1].stop <= one.start:
            around.pop()
        # Times are rounded: what ends a moment after its neighbour began lies beside it, not inside of it.
        while around and around[-1].stop < one.stop:
            around.pop()
        placed.append(Placed(one, len(around)))
        around.append(one)
    return tuple(placed)
