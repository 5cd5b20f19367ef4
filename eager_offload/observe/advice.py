"""What limited a run, and which knob to turn: sentences that follow from the stats and the configuration alone.

Each rule below is a function of both that has something to say or has not. They are in the order of how much they
matter. Shares of time are of the time since counting began, so a run that mostly does something else hears less.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import TypeAlias

from eager_offload.config import MIB, OffloadConfig, size_literal, size_text
from eager_offload.stats import OffloadStats

#: What a rule says, or ``None``.
Rule: TypeAlias = Callable[[OffloadStats, OffloadConfig], str | None]

#: A share of the time that compute may wait without a word.
_STALL = 0.03
#: A share of the time in which transfers of one way ran: forward and backward take about half of it each.
_BUSY = 0.4
#: Shares of the saved bytes from which a reason to stay is worth a sentence.
_MUCH, _MOST = 0.10, 0.30
#: Of ``plan_misses``: what is counted where no plan was followed, so that none was differed from.
_NO_MISSES = ("room", "decided", "twice")
#: Terabytes a day. A disk for consumers is made for a few hundred in its life, one for servers for thousands.
_WEARS = 10.0
#: Of a shorter run nothing is said about a day.
WEAR_SECONDS = 60.0
#: Bytes of a step from which it is worth a sentence that a process does not shrink.
_SHRINKS = 64 * MIB


def advise(stats: OffloadStats, config: OffloadConfig) -> tuple[str, ...]:
    """What is to be said of a run, or a part of it, a sentence or two each; that all is well if nothing is."""
    found = tuple(filter(None, (rule(stats, config) for rule in RULES)))
    return found or (_is_fine(stats),)


# -- it does not do what was asked of it -----------------------------------------------------------------------------


def over_budget(stats: OffloadStats, config: OffloadConfig) -> str | None:
    count = stats.demotions.get("over_budget", 0)
    if not count or stats.keep_last_bytes or stats.plan is not None:
        return None  # it has come down since
    return (
        f"{count:,} forwards had a peak above device_budget, with nothing kept that may leave: raise it, or take "
        "smaller windows, a smaller min_bytes or a smaller batch."
    )


def over_the_plan(stats: OffloadStats, config: OffloadConfig) -> str | None:
    """A plan that knew too little of what is on the device."""
    plan = stats.plan
    if plan is None or not (count := stats.demotions.get("over_budget", 0)):
        return None
    found = "" if plan.peak_bytes is None else f", {size_text(plan.peak_bytes)} were measured of it"
    return (
        f"{_times(count)} the peak was found above the plan's device_budget, and less stayed from then on where that "
        f"was possible. What is followed now predicts {size_text(plan.predicted_peak_bytes)}{found}. Name what else is "
        "on the device as optimizer_bytes when planning, or plan for a larger device_budget."
    )


def not_as_planned(stats: OffloadStats, config: OffloadConfig) -> str | None:
    """Forwards that the plan does not fit."""
    misses = {name: times for name, times in stats.plan_misses.items() if name not in _NO_MISSES}
    count = sum(misses.values())
    if stats.plan is None or not count or count < _MUCH * (count + stats.followed_forwards):
        return None
    how = ", ".join(f"{name} {times:,}" for name, times in sorted(misses.items()))
    return (
        f"{count:,} forwards differed from what was planned ({how}), where {stats.followed_forwards:,} began to follow "
        "it: plan with the model and the inputs of these steps."
    )


# -- it does not offload at all -------------------------------------------------------------------------------------


def switched_off(stats: OffloadStats, config: OffloadConfig) -> str | None:
    if config.enabled:
        return None
    return "Offload is switched off, by enabled=False or EAGER_OFFLOAD=0 in the environment: nothing moves."


def nothing_was_saved(stats: OffloadStats, config: OffloadConfig) -> str | None:
    if not config.enabled or stats.saved_tensors or stats.empty_forwards or stats.foreign_hooks:
        return None
    return "No saved tensor was seen. Put `with offload:` around the forward, under grad mode."


def hidden_by_others(stats: OffloadStats, config: OffloadConfig) -> str | None:
    if not (stats.foreign_hooks or (stats.empty_forwards and not stats.saved_tensors)):
        return None
    return (
        "Other saved-tensor hooks hide from this context what is saved inside them. Enter `with offload:` inside "
        "theirs, or leave one of the two out."
    )


def failed_writes(stats: OffloadStats, config: OffloadConfig) -> str | None:
    count = stats.demotions.get("write_failed", 0)
    if not count:
        return None
    return (
        f"{_times(count)} a write to a tier failed, and the bytes stayed: the first warning tells why. Look after the "
        "disk, or name another as disk_path."
    )


def no_room(stats: OffloadStats, config: OffloadConfig) -> str | None:
    count = stats.demotions.get("budget", 0)
    if not count:
        return None
    kept = stats.kept_bytes.get("budget", 0)
    what = f"{_times(count)} no tier had room" + (f", and {size_text(kept)} stayed" if kept else "")
    if config.tier == "disk" and not stats.disk_bytes_peak:
        return f"{what}, from the first byte on: the first warning tells why. Look after the disk, or name another."
    if config.tier != "host" and stats.disk_bytes_peak:
        return (
            f"{what}. Raise disk_budget above the {size_text(stats.disk_bytes_peak)} of the peak, or free room there."
        )
    if config.tier == "auto" and config.disk_paths is None:
        return f"{what}. Raise host_budget above {size_text(stats.host_bytes_peak)}, or give a disk_path to spill to."
    return f"{what}. Raise host_budget above {size_text(stats.host_bytes_peak)}."


def spilled(stats: OffloadStats, config: OffloadConfig) -> str | None:
    count = stats.demotions.get("host_to_disk", 0)
    if not count:
        return None
    return (
        f"{_times(count)} host memory was full and bytes went to disk, which is slower. If there is more memory, raise "
        f"host_budget above {size_text(stats.host_bytes_peak)}."
    )


def unpinned(stats: OffloadStats, config: OffloadConfig) -> str | None:
    if not (stats.demotions.get("unpinned") or stats.demotions.get("uncompiled")):
        return None
    return (
        "Compiled code waits for each of its transfers, since the pass that orders them did not run. Compile with "
        "offload.compile(model, ...), with Inductor."
    )


# -- what it waits for ----------------------------------------------------------------------------------------------


def planned_waits(stats: OffloadStats, config: OffloadConfig) -> str | None:
    """A plan says what moves: less does for a larger budget, and no other knob goes with it."""
    plan = stats.plan
    if plan is None or not _stalls(stats):
        return None
    took = "" if plan.step_seconds is None else f", and {plan.step_seconds:,.4g} s were measured"
    said = f"{_waited(stats).capitalize()}. The plan predicted a step of {plan.predicted_step_seconds:,.4g} s{took}"
    planned = stats._planned
    if planned is None or (relief := planned.relief) is None:
        return (
            f"{said}: plan for a larger device_budget to wait less, or with larger windows; plan.front() says what "
            "budgets buy."
        )
    least = "" if planned.policy == "least" else 'policy="least" and '
    return (
        f'{said}: plan with {least}device_budget="{size_literal(relief.device_budget)}", and it waits for about '
        f"{_percent(relief.waits)} of it by the same prediction."
    )


def slow_link(stats: OffloadStats, config: OffloadConfig) -> str | None:
    """Bandwidth: transfers run all the time, and compute waits for them all the same."""
    if not _stalls(stats) or not _is_busy(stats):
        return None
    rate, larger = _rate(stats), 4 * config.size("min_bytes") or MIB
    disks = "A list of paths on several disks as disk_path shares the load; else " if stats.disk_bytes_peak else ""
    if config.slowdown is None and config.keep_last_bytes == "auto":
        disks = disks or "To move less, "
        disks += 'policy="free" moves what the link hides and no more; or '
    return (
        f"Bandwidth is the limit: {_waited(stats)}, while transfers ran {_percent(_busy(stats))} of the time"
        f"{f' at {size_text(rate)}/s' if rate else ''}. {disks or 'To move less, '}checkpoint a part of the model, put "
        f'`with eo.no_offload():` around modules that compute little, or try min_bytes="{size_literal(larger)}".'
    )


def full_window(stats: OffloadStats, config: OffloadConfig) -> str | None:
    """The window: forward waits for room in it although the link has time to spare."""
    window = config.size("max_inflight_bytes")
    if not _waits_in_forward(stats) or window >= _of_a_step(stats):
        return None
    return (
        f"{_waited(stats).capitalize()}, mostly in forward for room in the in-flight window. Where memory allows, "
        f'raise max_inflight_bytes from {size_text(window)} to "{size_literal(2 * window)}".{_or_bandwidth(stats)}'
    )


def late_reloads(stats: OffloadStats, config: OffloadConfig) -> str | None:
    """The look-ahead: backward waits for what could have come earlier."""
    ahead = config.size("prefetch_bytes")
    if not _stalls(stats) or _is_busy(stats) or _waits_in_forward(stats) or ahead >= _of_a_step(stats):
        return None
    return (
        f"{_waited(stats).capitalize()}, mostly in backward for what was not back yet. Where memory allows, raise "
        f'prefetch_bytes from {size_text(ahead)} to "{size_literal(max(2 * ahead, 64 * MIB))}".{_or_bandwidth(stats)}'
    )


def windows_hold_all(stats: OffloadStats, config: OffloadConfig) -> str | None:
    """It waits, and neither bandwidth nor a window is why: a step is shorter than the way there and back."""
    if not _stalls(stats) or any(rule(stats, config) for rule in (slow_link, full_window, late_reloads)):
        return None
    return (
        f"{_waited(stats).capitalize()}, though the windows hold all that a step offloads and transfers had time to "
        "spare: backward asks for the newest bytes at once. Let what is small or computes little stay, with a larger "
        "min_bytes, keep_last_bytes or `with eo.no_offload():`."
    )


# -- what stays -----------------------------------------------------------------------------------------------------


def originals_alive(stats: OffloadStats, config: OffloadConfig) -> str | None:
    """A reference to the originals, beside which moving copies of them frees nothing."""
    return _of_what_stayed(
        *(stats, "alive", _MUCH),
        "stayed since something else keeps the originals alive until backward: outputs that are collected in a list, "
        "attributes of modules, tensors that the training loop still names. Let go of them before backward.",
    )


def small_tensors(stats: OffloadStats, config: OffloadConfig) -> str | None:
    least = config.size("min_bytes")
    smaller = max(least // 4, 1)
    if least < 2 or stats.small_bytes_largest < smaller:
        return None  # of a smaller one none of them would move
    return _of_what_stayed(
        *(stats, "small", _MUCH),
        f'stayed as smaller than min_bytes, which is {size_text(least)}. Try min_bytes="{size_literal(smaller)}".',
    )


def newest_bytes(stats: OffloadStats, config: OffloadConfig) -> str | None:
    # A step may save less than the line holds.
    most = min(config.delay_bytes, stats.resident_bytes_peak or config.delay_bytes)
    smaller = max(most // 4, MIB)
    if _stalls(stats) or most <= smaller or config.device_budget is not None or config.slowdown is not None:
        return None
    return _of_what_stayed(
        *(stats, "newest", _MOST),
        f'stayed as the newest bytes, and compute hardly waits: keep_last_bytes="{size_literal(smaller)}" leaves '
        "fewer of them on the device.",
    )


def other_devices(stats: OffloadStats, config: OffloadConfig) -> str | None:
    return _of_what_stayed(
        *(stats, "device", _MUCH),
        "are on a device that nothing can be moved from here: the CPU and the accelerator of torch.accelerator are.",
    )


def layouts(stats: OffloadStats, config: OffloadConfig) -> str | None:
    return _of_what_stayed(stats, "layout", _MUCH, "stayed for their layout: sparse and quantized tensors do not move.")


# -- what is moved in vain ------------------------------------------------------------------------------------------


def never_asked_for(stats: OffloadStats, config: OffloadConfig) -> str | None:
    return _of_what_left(
        stats, stats.released_bytes, "were never asked for: run forwards without a backward under torch.no_grad()."
    )


def asked_too_soon(stats: OffloadStats, config: OffloadConfig) -> str | None:
    if config.slowdown is not None:
        return None  # what stays is learnt from what is waited for
    if stats.plan is not None:
        knob = "A plan for a larger device_budget leaves them where they are."
    elif config.device_budget is not None:
        knob = "A larger device_budget leaves them where they are."
    elif config.keep_last_bytes != "auto":
        knob = 'keep_last_bytes="auto" learns which those are.'
    else:
        knob = f'Try keep_last_bytes="{size_literal(2 * config.delay_bytes or 64 * MIB)}".'
    vain = f"were asked for before they had left, so that moving them was in vain. {knob}"
    return _of_what_left(stats, stats.forwarded_bytes, vain)


def wear(stats: OffloadStats, config: OffloadConfig) -> str | None:
    daily = stats.terabytes_a_day
    if daily < _WEARS or stats.seconds < WEAR_SECONDS:
        return None
    return (
        f"{daily:,.0f} TB a day would be written to disk, which wears it. Where host memory has room, host_budget "
        "keeps more of it there."
        if stats.host_bytes_peak
        else f"{daily:,.0f} TB a day would be written to disk, which wears it: compare with what the disk is rated for."
    )


def freed_memory(stats: OffloadStats, config: OffloadConfig) -> str | None:
    """A CPU, and a process that does not shrink when saved tensors are freed."""
    if not stats.keeps_freed_memory or _of_a_step(stats) < _SHRINKS:
        return None
    return (
        "Freed memory of the CPU stays with the process unless eo.release_freed_memory() is called once, before the "
        "model is built: what the system says of the process hardly falls without it."
    )


def _unplanned(rule: Rule) -> Rule:
    """A rule whose knobs do not go with a plan."""

    @wraps(rule)
    def without_plan(stats: OffloadStats, config: OffloadConfig) -> str | None:
        return None if stats.plan is not None else rule(stats, config)

    return without_plan


RULES: tuple[Rule, ...] = (
    *(switched_off, nothing_was_saved, hidden_by_others, failed_writes, no_room, spilled, unpinned, over_budget),
    *(over_the_plan, not_as_planned, planned_waits),
    *map(_unplanned, (slow_link, full_window, late_reloads, windows_hold_all)),
    *(originals_alive, _unplanned(small_tensors), _unplanned(newest_bytes), other_devices, layouts),
    *(never_asked_for, asked_too_soon, wear, freed_memory),
)


def _is_fine(stats: OffloadStats) -> str:
    if not stats.offloaded_bytes:
        return "Nothing has left yet: all that was saved is among what has to stay."
    return f"Nothing held this run up: {_waited(stats)}."


# -- shares and sizes -----------------------------------------------------------------------------------------------


def _stalls(stats: OffloadStats) -> bool:
    return stats.seconds > 0 and stats.stall_seconds >= _STALL * stats.seconds


def _waits_in_forward(stats: OffloadStats) -> bool:
    """Whether it waits, mostly for room in the window, while the link has time to spare."""
    return _stalls(stats) and not _is_busy(stats) and 2 * stats.window_stall_seconds >= stats.stall_seconds


def _of_a_step(stats: OffloadStats) -> int:
    """Bytes that a step offloads."""
    return stats.offloaded_bytes // max(stats.steps, 1)


def _busy(stats: OffloadStats) -> float:
    """The larger share of the time in which transfers ran, of both ways."""
    return max(stats.out_seconds, stats.in_seconds) / stats.seconds if stats.seconds else 0.0


def _is_busy(stats: OffloadStats) -> bool:
    return _busy(stats) >= _BUSY


def _or_bandwidth(stats: OffloadStats) -> str:
    """What else it may be where transfers cannot be timed."""
    if stats.out_seconds or stats.in_seconds:
        return ""
    return " If that changes little, bandwidth is the limit: checkpoint a part of the model."


def _rate(stats: OffloadStats) -> int:
    """Bytes a second of the way that was busier; 0 where it was not timed."""
    if stats.out_seconds >= stats.in_seconds:
        return int(stats.bytes_out / stats.out_seconds) if stats.out_seconds else 0
    return int(stats.bytes_in / stats.in_seconds)


def _of_what_stayed(stats: OffloadStats, reason: str, share: float, sentence: str) -> str | None:
    """``sentence`` of the bytes that stayed for ``reason``, if they are that share of all; parameters take no part."""
    nbytes = stats.kept_bytes.get(reason, 0)
    if not nbytes or nbytes < share * (stats.saved_bytes - stats.kept_bytes.get("parameter", 0)):
        return None
    return f"{size_text(nbytes)} ({_percent(nbytes / stats.saved_bytes)} of what is saved) {sentence}"


def _of_what_left(stats: OffloadStats, nbytes: int, sentence: str) -> str | None:
    """``sentence`` of a part of what was offloaded, if that is much of it."""
    if not stats.offloaded_bytes or nbytes < _MOST * stats.offloaded_bytes:
        return None
    return f"{size_text(nbytes)} ({_percent(nbytes / stats.offloaded_bytes)} of what was offloaded) {sentence}"


def _waited(stats: OffloadStats) -> str:
    return f"compute waited {_percent(stats.stall_seconds / stats.seconds if stats.seconds else 0.0)} of the time"


def _percent(share: float) -> str:
    return f"{share:.1%}".replace("%", " %") if share < 0.1 else f"{share:.0%}".replace("%", " %")


def _times(count: int) -> str:
    return "Once" if count == 1 else f"{count:,} times"
