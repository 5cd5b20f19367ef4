"""The report of the stats, as ``print(offload.stats())`` shows it."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator

from eager_offload.config import OffloadConfig, size_text
from eager_offload.observe.advice import (
    WEAR_SECONDS,
    change_text,
    counts_text,
    percent_text,
    processor_share,
    sizes_text,
    stays_within_host,
)
from eager_offload.stats import OffloadStats


def describe(stats: OffloadStats, config: OffloadConfig) -> str:
    """Returns the report of a run with that configuration; it ends in advice."""
    lines = [_headline(stats, config), *_table(stats), *_peaks(stats)]
    if stats.max_inflight_bytes:
        out, back = size_text(stats.max_inflight_bytes), size_text(stats.prefetch_bytes)
        lines.append(f"windows    {out} on the way out, {back} brought back early")
    if stats.demotions:
        lines.append(f"fallbacks  {counts_text(stats.demotions)}")
    if stats.coded_bytes or stats.refused:
        lines.append(f"coded      {_codecs_text(stats)}")
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
    if stats.plan_misses:
        looked_up = _number(stats.followed_forwards, "forward")
        lines.append(f"looked up  {looked_up}; not to the end: {counts_text(stats.plan_misses)}")
    if stats.is_approximate:
        lines.append("note       an interrupt came in the midst of the library: the figures are approximate")
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
        return f"{name:<11}{_column(round(nbytes / steps))}  {_column(nbytes)}  {rest}".rstrip()

    yield f"{'':<11}{'a step':>13}  {_number(stats.steps, 'step'):>13}"
    yield row("saved", stats.saved_bytes, _number(stats.saved_tensors, "tensor"))
    shared = f", and {size_text(stats.shared_bytes)} on the same storages" if stats.shared_bytes else ""
    yield row("offloaded", stats.offloaded_bytes, _number(stats.offloaded_tensors, "tensor") + shared)
    yield row("kept", sum(stats.kept_bytes.values()), sizes_text(stats.kept_bytes))
    more = "more than offloaded: of a view, all that it spans travels"
    yield row("moved out", stats.bytes_out, more if stats.bytes_out > stats.offloaded_bytes else "")
    found = {"still resident": stats.forwarded_bytes, "never asked for": stats.released_bytes}
    rest = ", ".join(f"{size_text(nbytes)} {what}" for what, nbytes in found.items() if nbytes)
    more = "more than went out: asked for several times" if stats.bytes_in > stats.bytes_out else ""
    yield row("moved in", stats.bytes_in, "; ".join(filter(None, (more, rest))))
    stalled = f"{stats.stall_seconds / steps:>11.3f} s  {stats.stall_seconds:>11.3f} s"
    yield f"{'stalled':<11}{stalled}  of {stats.seconds:,.1f} s{_step_times(stats)}"
    if stats.host_wait_seconds != stats.stall_seconds:  # on an accelerator
        waited = f"{stats.host_wait_seconds / steps:>11.3f} s  {stats.host_wait_seconds:>11.3f} s"
        yield f"{'host waited':<11}{waited}"
    if stats.processor_seconds:
        took = f"{stats.processor_seconds / steps:>11.3f} s  {stats.processor_seconds:>11.3f} s"
        yield f"{'processor':<11}{took}  of a core, for copies; compute may have lacked it"


def _step_times(stats: OffloadStats) -> str:
    """Returns the times of a step with and without offload, if both were measured."""
    plan = stats.plan
    if plan is None or plan.step_seconds is None or plan.without_offload_seconds is None:
        return ""
    return f"; a step took {plan.step_seconds:,.4g} s, and {plan.without_offload_seconds:,.4g} s without offload"


def _codecs_text(stats: OffloadStats) -> str:
    """Returns the bytes that each codec has packed, and how often it refused."""
    found = []
    for name, nbytes in sorted(stats.coded_bytes.items()):
        packed = stats.packed_bytes[name]
        found.append(f"{name} {size_text(nbytes)} as {size_text(packed)} ({packed / nbytes:.2f})")
    found += (f"{name} refused {count:,}" for name, count in sorted(stats.refused.items()))
    return ", ".join(found)


def _peaks(stats: OffloadStats) -> Iterator[str]:
    peaks = {
        "in flight": stats.inflight_bytes_peak,
        "resident": stats.resident_bytes_peak,
        "host": stats.host_bytes_peak,
        "disk": stats.disk_bytes_peak,
    }
    if any(peaks.values()):
        yield "peaks      " + ", ".join(f"{size_text(nbytes)} {name}" for name, nbytes in peaks.items())
    if stats.step_memory_peak:
        yield f"measured   {size_text(stats.step_memory_peak)} in use by the process at the peak of the last step"
    if stats.releases_freed_memory:
        yield "freed      memory goes back to the system (not with EAGER_OFFLOAD_RELEASE_FREED_MEMORY=0)"


def _column(nbytes: int) -> str:
    """Returns a size for a column, units below each other."""
    number, unit = size_text(nbytes).split()
    return f"{number:>9} {unit:<3}"


def _short(nbytes: int) -> str:
    """Returns a size in three digits."""
    number, unit = size_text(nbytes).replace(",", "").split()
    return f"{float(number):,.0f} {unit}" if float(number) >= 100 else f"{float(number):.3g} {unit}"


def _number(count: int, what: str) -> str:
    return f"{count:,} {what}" + ("s" if count != 1 else "")
