"""The report of a trace, as numbers and as text."""

from __future__ import annotations

import re
import textwrap
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from eager_offload.config import rate_text, size_text
from eager_offload.observe.advice import change_text, counts_text, percent_text, sizes_text
from eager_offload.trace_file import MemorySample, SavedGroup, SliceKind, Trace

#: Rows of the table of savers; all others are one more row.
_MOST_SAVERS = 15


class Tile(NamedTuple):
    """A number of the summary, with its name and a text to compare it with."""

    name: str
    value: str
    rest: str


@dataclass(frozen=True, slots=True)
class SaverRow:
    """The saves of an operation of a module, or of several modules whose paths differ in numbers alone."""

    operation: str
    module: str
    """The path, with ``*`` for a number that differs."""
    modules: int
    """The number of modules."""
    count: int
    """The number of saves."""
    nbytes: int
    outcomes: dict[str, int]
    """Bytes by outcome: ``offloaded``, ``shared``, or the reason for which they were kept."""

    @property
    def became(self) -> str:
        """The outcomes, most bytes first."""
        return sizes_text(self.outcomes)


def peaks(trace: Trace) -> MemorySample:
    """Returns the most bytes at one moment, by where they were."""
    columns = zip(*trace.memory, strict=True) if trace.memory else [(0,)] * 5
    return MemorySample(*map(max, columns))


def summary(trace: Trace) -> list[Tile]:
    """Returns the numbers of the summary."""
    stats, most = trace.stats, peaks(trace)
    saved, offloaded = stats.get("saved_bytes", 0), stats.get("offloaded_bytes", 0)
    shared, kept = stats.get("shared_bytes", 0), stats.get("kept_bytes", {})
    stall, demotions = stats.get("stall_seconds", 0.0), stats.get("demotions", {})
    host_wait = stats.get("host_wait_seconds", stall)
    moved = f"{size_text(stats.get('bytes_in', 0))} back{_rate(trace, SliceKind.RELOAD, SliceKind.PREFETCH)}"
    if written := stats.get("disk_bytes_written"):
        moved += f"; {size_text(written)} written to disk"
    waited = f"{_share(stall, trace.seconds)} of {time_text(trace.seconds)}"
    return [
        Tile(
            "Peak on the device",
            size_text(most.device),
            f"{size_text(most.without_offload)} without offload ({change_text(most.without_offload, most.device)})",
        ),
        Tile("Saved", size_text(saved), f"in {stats.get('saved_tensors', 0):,} tensors"),
        Tile(
            "Offloaded",
            size_text(offloaded),
            f"and {size_text(shared)} shared with them: {_share(offloaded + shared, saved)} of what is saved",
        ),
        Tile("Kept", size_text(sum(kept.values())), sizes_text(kept)),
        Tile("Moved out", f"{size_text(stats.get('bytes_out', 0))}{_rate(trace, SliceKind.OFFLOAD)}", moved),
        Tile(
            "Compute stalled",
            time_text(stall),
            waited if host_wait == stall else f"{waited}; the host waited {time_text(host_wait)}",
        ),
        Tile(
            "Fallbacks",
            f"{sum(demotions.values()):,}",
            counts_text(demotions) or "everything went as planned",
        ),
    ]


def saved_rows(groups: Sequence[SavedGroup], most: int = _MOST_SAVERS) -> list[SaverRow]:
    """Returns the savers of most bytes, and a last row for all others.

    ``layers.0.mlp`` and ``layers.1.mlp`` count as one, ``layers.*.mlp``.
    """
    members: dict[tuple[str, str], list[SavedGroup]] = {}
    for group in groups:
        members.setdefault((group.operation or "unknown operation", kind_of(group.module)), []).append(group)
    ordered = sorted(members.items(), key=lambda item: -sum(group.nbytes for group in item[1]))
    rows = [_row_of(operation, module, those) for (operation, module), those in ordered[:most]]
    if others := ordered[most:]:
        rows.append(_row_of(f"{len(others)} others", "", [group for _, those in others for group in those]))
    return rows


def kind_of(path: str) -> str:
    """Returns the path of a module with ``*`` for each number, which is equal for modules of one kind."""
    return re.sub(r"(?<=\.)\d+(?=\.|$)", "*", path)


def _row_of(operation: str, module: str, groups: Sequence[SavedGroup]) -> SaverRow:
    outcomes: Counter[str] = Counter()
    for group in groups:
        outcomes[group.reason or group.outcome] += group.nbytes
    names, count = {group.module for group in groups}, sum(group.count for group in groups)
    module = next(iter(names)) if len(names) == 1 else module
    return SaverRow(operation, module, len(names), count, sum(outcomes.values()), dict(outcomes))


def notes(trace: Trace) -> list[str]:
    """Returns caveats on the numbers of a trace."""
    found = [f"The run ended early: {trace.error}"] if trace.error else []
    if trace.dropped:
        found.append(
            f"{trace.dropped:,} slices, samples and saves were too many and are left out; totals are of the others."
        )
    return found


def title(trace: Trace) -> str:
    """Returns the duration, the devices and the versions of a trace."""
    versions = ", ".join(f"{what} {version}" for what, version in trace.versions.items())
    return " · ".join(filter(None, (time_text(trace.seconds), ", ".join(trace.devices) or "no device", versions)))


def to_text(trace: Trace) -> str:
    """Returns the report as text: summary, advice and the savers of most bytes."""
    return "\n".join(_lines(trace))


def _lines(trace: Trace) -> Iterator[str]:
    yield title(trace)
    for tile in summary(trace):
        yield f"{tile.name:<20}{tile.value}" + (f"  ({tile.rest})" if tile.rest else "")
    for sentence in (*notes(trace), *trace.advice):
        yield from ("", *textwrap.wrap(sentence, 100))
    yield from ("", f"{'bytes':>10}  {'saves':>7}  saved by")
    for row in saved_rows(trace.saved):
        yield f"{size_text(row.nbytes):>10}  {row.count:>7,}  {row.operation} {row.module} ({row.became})"


def time_text(seconds: float) -> str:
    """Returns a time for a reader, such as ``"12.3 ms"``."""
    if not seconds or seconds >= 1:
        return f"{seconds:,.2f} s" if seconds else "0 s"
    return f"{seconds * 1e3:,.1f} ms" if seconds >= 1e-3 else f"{seconds * 1e6:,.0f} µs"


def _rate(trace: Trace, *kinds: SliceKind) -> str:
    """Returns the rate of the link while at least one copy ran."""
    copies = [one for one in trace.slices if one.track in kinds]
    seconds = _covered_seconds((one.start, one.stop) for one in copies)
    return f" at {rate_text(sum(one.nbytes for one in copies) / seconds)}" if seconds else ""


def _share(part: float, whole: float) -> str:
    return percent_text(part / whole if whole else 0.0)


def _covered_seconds(spans: Iterable[tuple[float, float]]) -> float:
    """Seconds during which at least one of the spans, each from its start to its stop, goes on."""
    covered = reached = 0.0
    for start, stop in sorted(spans):
        covered += max(stop - max(start, reached), 0.0)
        reached = max(reached, stop)
    return covered
