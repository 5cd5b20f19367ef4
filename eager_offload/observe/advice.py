"""Sentences on what limited a run and which setting to change, from the stats and the configuration.

Offload exists to save memory, so the first sentence is about memory, and a run whose memory did not fall gets no
praise. Shares of time are relative to the time since counting began, so a run with much other work gets less advice.
For a run by a plan, the sentences name only settings that may be combined with a plan.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from eager_offload.config import MIB, OffloadConfig, size_literal, size_text
from eager_offload.observe.memory import budget_text, budgets_text, main_reason, reason_text, why
from eager_offload.stats import KeepReason, OffloadStats
from eager_offload.tiers.limits import PAGEABLE_COST

#: Memory has fallen if its peak is lower by at least this share of the peak without offload.
_FELL = 0.2
#: Compute may wait for this share of the time without a sentence.
_STALL = 0.03
#: The link is busy if transfers of one direction ran for this share of the time; forward and backward are about half
#: each.
_BUSY = 0.4
#: A reason to stay is worth a sentence from this share of the saved bytes on.
_MUCH = 0.10
#: Reasons that no setting changes.
_STAYS = (KeepReason.ALIVE, KeepReason.DEVICE, KeepReason.LAYOUT)
#: A run moves everything in vain if no backward uses this share of the offloaded bytes.
_ALL_UNUSED = 0.9
#: A reason to stay explains why memory has not fallen from this share of a step's saves on.
_EXPLAINS = 0.3
#: Moving in vain is worth a sentence from this share of the offloaded bytes on.
_UNUSED = 0.30
#: Terabytes a day. A consumer disk is rated for a few hundred in its life, a server disk for thousands.
_WEARS = 10.0
#: A shorter run gets no sentence about a day.
WEAR_SECONDS = 60.0
#: The first size, in bytes, to suggest for a window of 0.
_LEAST_WINDOW = 64 * MIB
#: A process that does not shrink is worth a sentence from so many bytes of a step on.
_SHRINKS = 64 * MIB


def advise(stats: OffloadStats, config: OffloadConfig) -> tuple[str, ...]:
    """Returns the sentences on a run, or a part of it; one of them says that all is well if nothing else applies."""
    context = tuple(_of_the_context(stats, config))
    if not config.enabled or not stats.saved_tensors:
        return context
    memory = _of_memory(stats, config)
    parts = (_of_failures, _of_budgets, _of_waits, _of_unused_moves)
    found = context if stats.offloaded_bytes else ()  # else the sentence on memory names it as the reason
    found += tuple(sentence for part in parts for sentence in part(stats, config))
    found += tuple(_of_what_stays(stats, config, memory.reason))
    if memory.fell and not found:
        found = (f"Nothing held this run up: {_waited(stats)}.",)
    return memory.sentence, *found


class MemoryVerdict(NamedTuple):
    sentence: str
    fell: bool
    """Whether memory fell in the steps that were counted."""
    reason: KeepReason | None = None
    """The reason to stay that the sentence names."""


def _of_memory(stats: OffloadStats, config: OffloadConfig) -> MemoryVerdict:
    """Returns whether memory has fallen in a run in which tensors were saved, and by how much or why not."""
    if not stats.offloaded_bytes:
        return MemoryVerdict(f"Memory did not fall: nothing moved, because {why(stats, config)}.", fell=False)
    if stays_within_host(stats):
        sentence = (
            f"Memory did not fall: {size_text(stats.host_bytes_peak)} were copied within host memory, which is the "
            'device of CPU tensors. tier="auto" and tier="disk" move them to disk.'
        )
        return MemoryVerdict(sentence, fell=False)
    unused = stats.released_bytes - stats.failed_bytes
    if unused >= _ALL_UNUSED * stats.offloaded_bytes:
        return MemoryVerdict("Memory was moved in vain: no backward used the saved tensors.", fell=False)
    before, after = stats.without_offload_bytes_peak, stats.device_bytes_peak
    peaks = (
        f"at most {size_text(after)} of saved tensors on the device, {size_text(before)} without offload "
        f"({change_text(before, after)})"
    )
    if after <= (1 - _FELL) * before:
        return MemoryVerdict(f"Memory fell: {peaks}.", fell=True)
    reason, cause = main_reason(stats, config, _EXPLAINS)
    of_windows = stats.max_inflight_bytes + stats.prefetch_bytes
    if not cause and 2 * of_windows < before:
        if stats.forwarded_bytes > sum(stats.kept_bytes.values()):
            early = size_text(stats.forwarded_bytes // max(stats.steps, 1))
            cause = f"backward needed {early} a step before they had left"
        else:
            reason, cause = main_reason(stats, config)
    if not cause:
        out, back = size_text(stats.max_inflight_bytes), size_text(stats.prefetch_bytes)
        first = " (those of a first step are large)" if stats.steps == 1 else ""
        cause = f"windows of {out} on the way out and {back} brought back early hold most of the movable bytes{first}"
    return MemoryVerdict(f"Memory hardly fell: {peaks}, since {cause}.", fell=False, reason=reason)


def _of_the_context(stats: OffloadStats, config: OffloadConfig) -> Iterator[str]:
    if not config.enabled:
        yield "Offload is switched off, by enabled=False or EAGER_OFFLOAD=0 in the environment: nothing moves."
    if stats.foreign_hooks or (stats.empty_forwards and not stats.saved_tensors):
        yield (
            "Other saved-tensor hooks hide the tensors saved inside them from this context. Enter `with offload:` "
            "inside theirs, or leave one of the two out."
        )
    elif config.enabled and not stats.saved_tensors:
        yield "No saved tensor was seen. Put `with offload:` around the forward, under grad mode."


def _of_failures(stats: OffloadStats, config: OffloadConfig) -> Iterator[str]:
    """Yields sentences on forwards that an error has ended, and on bytes that did not reach the intended tier."""
    if stats.failed_forwards:
        yield (
            f"{_times(stats.failed_forwards)} a forward ended in an error, and its saved tensors were dropped: the "
            "peaks include these forwards. offload.reset_stats() sets the counters to zero."
        )
    if count := stats.fallbacks.get("write_failed", 0):
        yield (
            f"{_times(count)} a write to a tier failed, and the bytes stayed: the first warning tells why. Look after "
            "the disk, or name another as disk_path."
        )
    if count := stats.fallbacks.get("budget", 0):
        kept = stats.kept_bytes.get("budget", 0)
        what = f"{_times(count)} no tier had room" + (f", and {size_text(kept)} stayed" if kept else "")
        if config.tier == "disk" and config.disk_budget == "auto" and not stats.disk_bytes_peak:
            yield f"{what}, from the first byte on: the first warning tells why. Look after the disk, or name another."
        else:
            instead = ", or free room there" if stats.disk_bytes_peak else ""
            if config.tier == "auto" and config.disk_path is None and stats.host_bytes_peak and not instead:
                instead = ", or give a disk_path to spill to"
            yield f"{what}. Raise {budgets_text(config, stats.host_bytes_peak, stats.disk_bytes_peak)}{instead}."
    if count := stats.fallbacks.get("host_to_disk", 0):
        yield (
            f"{_times(count)} host memory was full and bytes went to disk, which is slower. If there is more memory, "
            f"raise {budget_text(config, 'host_budget', stats.host_bytes_peak)}."
        )
    if count := stats.fallbacks.get("pageable", 0):
        yield (
            f"{_times(count)} host memory could not be pinned, and the first warning tells why: copies of it "
            f"{PAGEABLE_COST}. python -m eager_offload doctor measures how much can be."
        )
    if stats.fallbacks.get("unpinned") or stats.fallbacks.get("uncompiled"):
        yield (
            "Compiled code waits for each of its transfers, since the pass that orders them did not run. Compile with "
            "offload.compile(model, ...), with Inductor."
        )


def _of_budgets(stats: OffloadStats, config: OffloadConfig) -> Iterator[str]:
    count, plan = stats.fallbacks.get("over_budget", 0), stats.plan
    if count and plan is None and not stats.keep_last_bytes:  # else it has come down since
        yield (
            f"{count:,} forwards had a peak above device_budget, with nothing kept that may leave: raise it, or take "
            "smaller windows, a smaller min_bytes or a smaller batch."
        )
    if plan is None:
        return
    if count:
        found = "" if plan.peak_bytes is None else f", {size_text(plan.peak_bytes)} were measured of it"
        yield (
            f"{_times(count)} the peak was found above the plan's device_budget, and fewer bytes stayed from then on "
            f"if possible. The plan predicts {size_text(plan.predicted_peak_bytes)}{found}. Name other memory on the "
            "device as optimizer_bytes when planning, or plan for a larger device_budget."
        )
    count = sum(stats.table_misses.values())
    if count and count >= _MUCH * (count + stats.table_forwards):
        yield (
            f"{count:,} of {stats.table_forwards:,} forwards differed from those that they began like "
            f"({counts_text(stats.table_misses)}), and a plan is of one kind of step: plan with the inputs that take "
            "most."
        )


def _of_waits(stats: OffloadStats, config: OffloadConfig) -> Iterator[str]:
    if stats.seconds <= 0 or stats.stall_seconds < _STALL * stats.seconds:
        return
    waited, a_step = _waited(stats), _of_a_step(stats)
    in_forward = 2 * stats.window_stall_seconds >= stats.stall_seconds
    window, ahead = stats.max_inflight_bytes, stats.prefetch_bytes
    ways = (stats.out_seconds, stats.bytes_out), (stats.in_seconds, stats.bytes_in)
    ran, nbytes = max(ways, key=lambda way: way[0])
    # Without timed transfers the cause may also be the bandwidth.
    otherwise = "" if ran else " If that changes little, bandwidth is the limit: checkpoint a part of the model."
    if stats.plan is not None:
        yield f"{waited.capitalize()}. {_planned_waits(stats)}"
    elif ran >= _BUSY * stats.seconds:
        less = "To move less, "
        if not config.is_free and config.keep_last_bytes == "auto":
            less += 'set policy="free", which moves only bytes that the link hides; or '
        yield (
            f"Bandwidth is the limit: {waited}, while transfers ran {percent_text(ran / stats.seconds)} of the time at "
            f"{size_text(int(nbytes / ran))}/s. {less}checkpoint a part of the model, put `with eo.no_offload():` "
            "around modules that compute little, or set a larger min_bytes."
        )
    elif in_forward and window < a_step and _leaves_much(stats, window):
        raised = f"If memory allows, raise max_inflight_bytes from {size_text(window)} to {_larger(window)}."
        yield f"{waited.capitalize()}, mostly in forward for room in the in-flight window. {raised}{otherwise}"
    elif not in_forward and ahead < a_step and _leaves_much(stats, ahead):
        raised = f"If memory allows, raise prefetch_bytes from {size_text(ahead)} to {_larger(ahead)}."
        yield f"{waited.capitalize()}, mostly in backward for tensors that were not back yet. {raised}{otherwise}"
    else:  # a step is shorter than the way there and back
        yield (
            f"{waited.capitalize()}, and windows hold most of the bytes that a step offloads: backward needs the "
            "newest at once. Keep tensors of modules that compute little, with a larger min_bytes, "
            "`with eo.no_offload():` or skip."
        )


def _leaves_much(stats: OffloadStats, more: int) -> bool:
    """Returns whether windows with ``more`` bytes would hold less than most bytes of a step."""
    return stats.max_inflight_bytes + stats.prefetch_bytes + more <= (1 - _FELL) * stats.without_offload_bytes_peak


def _larger(now: int) -> str:
    """Returns twice the bytes of a window, as a config takes them."""
    return f'"{size_literal(2 * now or _LEAST_WINDOW)}"'


def _planned_waits(stats: OffloadStats) -> str:
    """Returns the sentence for a run by a plan: only a larger budget makes it move less."""
    plan, planned = stats.plan, stats._planned
    assert plan is not None
    took = "" if plan.step_seconds is None else f", and {plan.step_seconds:,.4g} s were measured"
    said = f"The plan predicted a step of {plan.predicted_step_seconds:,.4g} s{took}"
    if planned is None or (relief := planned.relief) is None:
        return (
            f"{said}: plan for a larger device_budget to wait less, or with larger windows; plan.front() compares "
            "budgets."
        )
    least = "" if planned.policy == "least" else 'policy="least" and '
    return (
        f'{said}: plan with {least}device_budget="{size_literal(relief.device_budget)}", and it waits for about '
        f"{percent_text(relief.waits)} of it by the same prediction."
    )


def _of_what_stays(stats: OffloadStats, config: OffloadConfig, said: KeepReason | None) -> Iterator[str]:
    """Yields a sentence on each reason that no setting changes and that keeps many bytes.

    Args:
        said: the reason that the sentence on memory has named already.
    """
    may_move = stats.saved_bytes - stats.kept_bytes.get("parameter", 0)
    for reason in _STAYS:
        nbytes = stats.kept_bytes.get(reason, 0)
        if nbytes and nbytes >= _MUCH * may_move and reason is not said:
            a_step = size_text(nbytes // max(stats.steps, 1))
            sentence = reason_text(reason, config, stats.prefetch_bytes)
            yield f"{a_step} a step ({percent_text(nbytes / stats.saved_bytes)} of the saved bytes) {sentence}."


def _of_unused_moves(stats: OffloadStats, config: OffloadConfig) -> Iterator[str]:
    def much(nbytes: int, sentence: str) -> Iterator[str]:
        if stats.offloaded_bytes and nbytes >= _UNUSED * stats.offloaded_bytes:
            share = percent_text(nbytes / stats.offloaded_bytes)
            yield f"{size_text(nbytes)} ({share} of the offloaded bytes) {sentence}"

    unused = max(stats.released_bytes - stats.failed_bytes, 0)
    yield from much(unused, "were never unpacked: run forwards without a backward under torch.no_grad().")
    if (knob := _knob_of_what_stays(stats, config)) is not None:
        reason = "were unpacked before they had left, so moving them was in vain."
        yield from much(stats.forwarded_bytes, f"{reason}{knob}")
    daily = stats.terabytes_a_day
    if daily >= _WEARS and stats.seconds >= WEAR_SECONDS:
        yield f"{daily:,.0f} TB a day would be written to disk, which wears it" + (
            ". If host memory has room, a larger host_budget keeps more of it there."
            if stats.host_bytes_peak
            else ": compare this with the disk's rating."
        )
    if stats.keeps_freed_memory and _of_a_step(stats) >= _SHRINKS:  # on a CPU
        yield (
            "Freed memory of the CPU stays with the process, because of release_freed_memory=False, so the process "
            'hardly shrinks: release_freed_memory="auto" or one call of eo.release_freed_memory() returns it.'
        )


def _knob_of_what_stays(stats: OffloadStats, config: OffloadConfig) -> str | None:
    """Returns a sentence on the setting that keeps more of the last saved bytes.

    It is empty if a larger window would hold most bytes of a step, and ``None`` if the library itself learns how many
    bytes to keep.
    """
    if config.is_free or 0 < stats.device_memory_peak <= stats.device_budget:
        return None
    if stats.plan is not None:
        return " A plan for a larger device_budget keeps them on the device."
    if config.device_budget is not None:
        return " A larger device_budget keeps them on the device."
    if config.keep_last_bytes != "auto":
        return ' keep_last_bytes="auto" finds these tensors and keeps them.'
    newest = config.newest_bytes(stats.prefetch_bytes)
    return f" Try keep_last_bytes={_larger(newest)}." if _leaves_much(stats, newest) else ""


# -- shares and sizes -----------------------------------------------------------------------------------------------


def stays_within_host(stats: OffloadStats) -> bool:
    """Returns whether bytes of CPU tensors were copied within host memory, so that nothing was freed."""
    return stats.copies_within_host and not stats.disk_bytes_peak


def change_text(before: int, after: int) -> str:
    """Returns a change for a reader, such as ``"-76 %"``."""
    share = f"{after / before - 1:+.0%}" if before else "0%"
    return share.replace("+0%", "0%").replace("-0%", "0%").replace("%", " %")


def _of_a_step(stats: OffloadStats) -> int:
    return stats.offloaded_bytes // max(stats.steps, 1)


def _waited(stats: OffloadStats) -> str:
    waited = f"compute waited {percent_text(stats.stall_seconds / stats.seconds if stats.seconds else 0.0)} of the time"
    if not (took := processor_share(stats)):
        return waited
    return f"{waited} for copies, which took {percent_text(took)} of a core"


def processor_share(stats: OffloadStats) -> float:
    return stats.processor_seconds / stats.seconds if stats.seconds else 0.0


def percent_text(share: float) -> str:
    """Returns a share for a reader, such as ``"4.2 %"``."""
    return f"{share:.1%}".replace("%", " %") if share < 0.1 else f"{share:.0%}".replace("%", " %")


def sizes_text(parts: Mapping[str, int]) -> str:
    """Returns named sizes for a reader, the largest first."""
    return ", ".join(f"{name} {size_text(nbytes)}" for name, nbytes in sorted(parts.items(), key=lambda one: -one[1]))


def counts_text(parts: Mapping[str, int]) -> str:
    """Returns named counts for a reader."""
    return ", ".join(f"{name} {count:,}" for name, count in sorted(parts.items()))


def _times(count: int) -> str:
    return "Once" if count == 1 else f"{count:,} times"
