"""What a page says of a trace, in numbers; pure."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from eager_offload.runtime.base import covered_seconds
from eager_offload.trace_file import HOST_STALLS, MemorySample, SavedGroup, Slice, SliceKind, Trace


def peaks(trace: Trace) -> MemorySample:
    """Most bytes at one moment, by where they were."""
    columns = zip(*trace.memory, strict=True) if trace.memory else [(0,)] * 5
    return MemorySample(*map(max, columns))


@dataclass(frozen=True, slots=True)
class WorkTotal:
    """All slices of one name on one device."""

    device: str
    name: str
    """That of the kind, or of the track of what the host of an accelerator waits, which compute may not notice."""
    kind: SliceKind
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
    found: dict[tuple[str, str, SliceKind], list[Slice]] = {}
    for one in trace.slices:
        name = HOST_STALLS if one.track.startswith(HOST_STALLS) else one.kind.value
        found.setdefault((one.device, name, one.kind), []).append(one)
    devices, kinds = trace.devices, list(SliceKind)
    return [
        WorkTotal(
            *key,
            len(slices),
            covered_seconds([(one.start, one.stop) for one in slices]),
            sum(one.nbytes for one in slices),
        )
        for key, slices in sorted(
            found.items(), key=lambda item: (devices.index(item[0][0]), kinds.index(item[0][2]), item[0][1])
        )
    ]


class OutcomeBytes(NamedTuple):
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
    outcomes: tuple[OutcomeBytes, ...]
    """Most bytes first."""


def savers(groups: Sequence[SavedGroup], *, alike: bool) -> list[Saver]:
    """What saved most, first; with ``alike``, ``layers.0.mlp`` and ``layers.1.mlp`` count as one, ``layers.*.mlp``."""
    members: dict[tuple[str, str], list[SavedGroup]] = {}
    for group in groups:
        module = re.sub(r"(?<=\.)\d+(?=\.|$)", "*", group.module) if alike else group.module
        members.setdefault((group.operation, module), []).append(group)
    found = []
    for (operation, module), those in members.items():
        names = {group.module for group in those}
        outcomes: Counter[tuple[str, bool]] = Counter()
        for group in those:
            outcomes[group.reason or group.outcome, group.outcome == "kept"] += group.nbytes
        found.append(
            Saver(
                operation=operation,
                module=names.pop() if len(names) == 1 else module,
                modules=len({group.module for group in those}),
                count=sum(group.count for group in those),
                nbytes=sum(group.nbytes for group in those),
                outcomes=tuple(OutcomeBytes(*which, nbytes) for which, nbytes in outcomes.most_common()),
            )
        )
    return sorted(found, key=lambda one: -one.nbytes)


class Placed(NamedTuple):
    """A slice, and how many others of its track it lies inside."""

    slice: Slice
    depth: int


@dataclass(frozen=True, slots=True)
class Track:
    """A track of a device, as it is drawn."""

    device: str
    name: str
    kind: SliceKind
    placed: tuple[Placed, ...]
    """In the order of time; what lies outside comes before what lies inside."""

    @property
    def depth(self) -> int:
        """How many slices lie over each other, at most."""
        return 1 + max((one.depth for one in self.placed), default=0)


def tracks(trace: Trace) -> list[Track]:
    """All tracks: by device, then in the order of ``SliceKind``, then by name, forward above backward."""
    members: dict[tuple[str, str], list[Slice]] = {}
    for one in trace.slices:
        members.setdefault((one.device, one.track), []).append(one)
    found = [Track(device, name, those[0].kind, _placed(those)) for (device, name), those in members.items()]
    devices, kinds = trace.devices, list(SliceKind)
    return sorted(
        found,
        key=lambda one: (devices.index(one.device), kinds.index(one.kind), "backward" in one.name, one.name),
    )


def _placed(slices: Sequence[Slice]) -> tuple[Placed, ...]:
    placed: list[Placed] = []
    around: list[Slice] = []
    for one in sorted(slices, key=lambda one: (one.start, -one.stop)):
        # Times are rounded: what ends a moment after its neighbour began lies beside it, not inside of it.
        while around and (around[-1].stop <= one.start or around[-1].stop < one.stop):
            around.pop()
        placed.append(Placed(one, len(around)))
        around.append(one)
    return tuple(placed)
