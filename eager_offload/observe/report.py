"""The report of the stats, as ``print(offload.stats())`` shows it; and that of a trace, as numbers and as text."""

from __future__ import annotations

import re
import textwrap
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from eager_offload.config import OffloadConfig, rate_text, size_text
from eager_offload.observe.advice import (
    WEAR_SECONDS,
    change_text,
    counts_text,
    percent_text,
    processor_share,
    sizes_text,
    stays_within_host,
)
from eager_offload.observe.timeline import SliceKind
from eager_offload.observe.trace import MemorySample, SavedGroup, Trace
from eager_offload.stats import OffloadStats

#: Rows of the table of savers; all others are one more row.
_MOST_SAVERS = 15


# -- the stats --------------------------------------------------------------------------------------------------------


def describe(stats: OffloadStats, config: OffloadConfig) -> str:
    """Returns the report of a run with that configuration; it ends in advice."""
    lines = [_headline(stats, config), *_table(stats)]
    peaks = {
        "in flight": stats.inflight_bytes_peak,
        "resident": stats.resident_bytes_peak,
        "host": stats.host_bytes_peak,
        "disk": stats.disk_bytes_peak,
    }
    if any(peaks.values()):
        lines.append("peaks      " + ", ".join(f"{size_text(nbytes)} {name}" for name, nbytes in peaks.items()))
    if stats.step_memory_peak:
        most = size_text(stats.step_memory_peak)
        lines.append(f"measured   {most} in use by the process at the peak of the last step")
    if stats.releases_freed_memory:
        lines.append("freed      memory goes back to the system (not with EAGER_OFFLOAD_RELEASE_FREED_MEMORY=0)")
    if stats.max_inflight_bytes:
        out, back = size_text(stats.max_inflight_bytes), size_text(stats.prefetch_bytes)
        lines.append(f"windows    {out} on the way out, {back} brought back early")
    if stats.fallbacks:
        lines.append(f"fallbacks  {counts_text(stats.fallbacks)}")
    if stats.disk_bytes_written:
        daily = stats.terabytes_a_day
        pace = f", {daily:,.1f} TB a day if it goes on" if daily >= 0.1 and stats.seconds >= WEAR_SECONDS else ""
        lines.append(f"written    {size_text(stats.disk_bytes_written)} to disk{pace}")
    if stats.device_budget:
        lines.append(
            f"budget     {size_text(stats.device_budget)} of the device, whose peak was "
            f"{size_text(stats.device_memory_peak)}: {size_text(stats.keep_last_bytes)} may stay"
        )
    learns = not stats.compiled_regions or stats.keep_last_bytes  # compiled code does not
    if config.is_free and learns:
        lines.append(
            f"policy     free: compute waits {percent_text(stats.slowdown)} of a step, and "
            f"{size_text(stats.keep_last_bytes)} may stay"
        )
    if stats.compiled_regions:
        graphs, runs = _number(stats.compiled_graphs, "graph"), _number(stats.compiled_regions, "run")
        lines.append(f"compiled   {graphs}, {runs}")
    if stats.plan is not None:
        lines.append(f"planned    {stats.plan}")
    if stats.table_misses:
        differed = f"{sum(stats.table_misses.values()):,} of {stats.table_forwards:,} forwards"
        why = counts_text(stats.table_misses)
        lines.append(f"tables     {differed} that began like an earlier step differed from it later: {why}")
    if stats.is_approximate:
        lines.append("note       an interrupt came inside the library: the figures are approximate")
    for sentence in stats.advice:
        lines += textwrap.wrap(sentence, 100, initial_indent="advice     ", subsequent_indent=" " * 11)
    return "\n".join(lines)


def _headline(stats: OffloadStats, config: OffloadConfig) -> str:
    """Returns the first line: the peaks, and the share of time that compute waited."""
    if not config.enabled:
        return "switched off"
    before, after = stats.without_offload_bytes_peak, stats.device_bytes_peak
    if not stats.offloaded_bytes or not before:
        return "nothing moved"
    stalled = percent_text(stats.stall_seconds / stats.seconds if stats.seconds else 0.0)
    change = change_text(before, after) + (", yet within host memory" if stays_within_host(stats) else "")
    took = f", copies {percent_text(processor_share(stats))} of a core" if stats.processor_seconds else ""
    return (
        f"peak saved-tensor memory {_short(after)} ({_short(before)} without offload, {change}); "
        f"stalled {stalled} of step time{took}"
    )


def _table(stats: OffloadStats) -> Iterator[str]:
    """Yields the lines of amounts, for a step and in all."""
    steps = max(stats.steps, 1)

    def row(name: str, nbytes: int, rest: str = "") -> str:
        columns = (size_text(one).split() for one in (round(nbytes / steps), nbytes))  # units below each other
        return f"{name:<11}{'  '.join(f'{number:>9} {unit:<3}' for number, unit in columns)}  {rest}".rstrip()

    yield f"{'':<11}{'a step':>13}  {_number(stats.steps, 'step'):>13}"
    yield row("saved", stats.saved_bytes, _number(stats.saved_tensors, "tensor"))
    shared = f", and {size_text(stats.shared_bytes)} on the same storages" if stats.shared_bytes else ""
    yield row("offloaded", stats.offloaded_bytes, _number(stats.offloaded_tensors, "tensor") + shared)
    yield row("kept", sum(stats.kept_bytes.values()), sizes_text(stats.kept_bytes))
    more = "more than offloaded: a view moves with all that it spans"
    yield row("moved out", stats.bytes_out, more if stats.bytes_out > stats.offloaded_bytes else "")
    found = {"still resident": stats.forwarded_bytes, "never unpacked": stats.released_bytes}
    rest = ", ".join(f"{size_text(nbytes)} {what}" for what, nbytes in found.items() if nbytes)
    more = "more than went out: unpacked several times" if stats.bytes_in > stats.bytes_out else ""
    yield row("moved in", stats.bytes_in, "; ".join(filter(None, (more, rest))))

    def times(name: str, seconds: float, rest: str = "") -> str:
        return f"{name:<11}{seconds / steps:>11.3f} s  {seconds:>11.3f} s  {rest}".rstrip()

    yield times("stalled", stats.stall_seconds, f"of {stats.seconds:,.1f} s")
    if stats.host_wait_seconds != stats.stall_seconds:  # on an accelerator
        yield times("host waited", stats.host_wait_seconds)
    if stats.processor_seconds:
        yield times("processor", stats.processor_seconds, "of a core, for copies; compute may have lacked it")


def _short(nbytes: int) -> str:
    """Returns a size in three digits."""
    number, unit = size_text(nbytes).replace(",", "").split()
    return f"{float(number):,.0f} {unit}" if float(number) >= 100 else f"{float(number):.3g} {unit}"


def _number(count: int, what: str) -> str:
    return f"{count:,} {what}" + ("s" if count != 1 else "")


# -- a trace ----------------------------------------------------------------------------------------------------------


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
    count: int
    nbytes: int
    outcomes: dict[str, int]
    """Bytes by outcome: ``offloaded``, ``shared``, or the reason for which they were kept."""


def peaks(trace: Trace) -> MemorySample:
    """Returns the most bytes at one moment, by place."""
    columns = zip(*trace.memory, strict=True) if trace.memory else [(0,)] * 5
    return MemorySample(*map(max, columns))


def summary(trace: Trace) -> list[Tile]:
    stats, most = OffloadStats(**trace.stats), peaks(trace)
    saved, offloaded, shared, kept = stats.saved_bytes, stats.offloaded_bytes, stats.shared_bytes, stats.kept_bytes
    stall, host_wait, fallbacks = stats.stall_seconds, stats.host_wait_seconds, stats.fallbacks
    moved = f"{size_text(stats.bytes_in)} back{_rate(trace, SliceKind.RELOAD, SliceKind.PREFETCH)}"
    if stats.disk_bytes_written:
        moved += f"; {size_text(stats.disk_bytes_written)} written to disk"
    waited = f"{_share(stall, trace.seconds)} of {time_text(trace.seconds)}"
    return [
        Tile(
            "Peak on the device",
            size_text(most.device),
            f"{size_text(most.without_offload)} without offload ({change_text(most.without_offload, most.device)})",
        ),
        Tile("Saved", size_text(saved), f"in {stats.saved_tensors:,} tensors"),
        Tile(
            "Offloaded",
            size_text(offloaded),
            f"and {size_text(shared)} shared with them: {_share(offloaded + shared, saved)} of the saved bytes",
        ),
        Tile("Kept", size_text(sum(kept.values())), sizes_text(kept)),
        Tile("Moved out", f"{size_text(stats.bytes_out)}{_rate(trace, SliceKind.OFFLOAD)}", moved),
        Tile(
            "Compute stalled",
            time_text(stall),
            waited if host_wait == stall else f"{waited}; the host waited {time_text(host_wait)}",
        ),
        Tile("Fallbacks", f"{sum(fallbacks.values()):,}", counts_text(fallbacks) or "everything went as planned"),
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
    found = [f"The run ended early: {trace.error}"] if trace.error else []
    if trace.dropped:
        found.append(
            f"{trace.dropped:,} slices, samples and saves were too many and are left out; totals are of the others."
        )
    return found


def title(trace: Trace) -> str:
    """Returns the duration, the devices and the versions of a trace."""
    versions = ", ".join(f"{what} {version}" for what, version in trace.versions.items())
    devices = dict.fromkeys(one.device for one in trace.slices)
    return " · ".join(filter(None, (time_text(trace.seconds), ", ".join(devices) or "no device", versions)))


def to_text(trace: Trace) -> str:
    """Returns the report as text: summary, advice and the savers of most bytes."""
    lines = [title(trace)]
    for tile in summary(trace):
        lines.append(f"{tile.name:<20}{tile.value}" + (f"  ({tile.rest})" if tile.rest else ""))
    for sentence in (*notes(trace), *trace.advice):
        lines += ["", *textwrap.wrap(sentence, 100)]
    lines += ["", f"{'bytes':>10}  {'saves':>7}  saved by"]
    for row in saved_rows(trace.saved):
        lines.append(
            f"{size_text(row.nbytes):>10}  {row.count:>7,}  {row.operation} {row.module} ({sizes_text(row.outcomes)})"
        )
    return "\n".join(lines)


def time_text(seconds: float) -> str:
    """Returns a time for a reader, such as ``"12.3 ms"``."""
    if not seconds or seconds >= 1:
        return f"{seconds:,.2f} s" if seconds else "0 s"
    return f"{seconds * 1e3:,.1f} ms" if seconds >= 1e-3 else f"{seconds * 1e6:,.0f} µs"


def _rate(trace: Trace, *kinds: SliceKind) -> str:
    """Returns the rate of the link while at least one copy ran."""
    copies = [one for one in trace.slices if one.track in kinds]
    seconds = reached = 0.0
    for start, stop in sorted((one.start, one.stop) for one in copies):
        seconds += max(stop - max(start, reached), 0.0)
        reached = max(reached, stop)
    return f" at {rate_text(sum(one.nbytes for one in copies) / seconds)}" if seconds else ""


def _share(part: float, whole: float) -> str:
    return percent_text(part / whole if whole else 0.0)
