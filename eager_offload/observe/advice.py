"""What limited a run, and which knob to turn: sentences that follow from the stats and the configuration alone.

Each rule below is a function of both that has something to say or has not. They are in the order of how much they
matter. Shares of time are of the time since counting began, so a run that mostly does something else hears less.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeAlias

from eager_offload.config import MIB, OffloadConfig

if TYPE_CHECKING:
    from eager_offload.stats import OffloadStats

__all__ = ["RULES", "advise", "terabytes_a_day"]

#: What a rule says, or ``None``.
Rule: TypeAlias = Callable[["OffloadStats", OffloadConfig], str | None]

#: A share of the time that compute may wait before anybody should care.
_STALL = 0.03
#: A share of the time in which transfers of one way ran: forward and backward take about half of it each.
_BUSY = 0.4
#: Shares of the saved bytes from which a reason to stay is worth a sentence.
_MUCH, _MOST = 0.10, 0.30
#: Terabytes a day. A disk for consumers is made for a few hundred in its life, one for servers for thousands.
_WEARS = 10.0


def advise(stats: OffloadStats, config: OffloadConfig) -> tuple[str, ...]:
    """What is to be said of a run, a sentence or two each; one that says that all is well if nothing is.

    Args:
        stats: of the run, or of a part of it.
        config: that it ran with.
    """
    found = tuple(filter(None, (rule(stats, config) for rule in RULES)))
    return found or (_is_fine(stats),)


def terabytes_a_day(stats: OffloadStats) -> float:
    """What would be written to disks if it went on like this all day; 1e12 bytes."""
    return stats.disk_bytes_written / stats.seconds * 86_400 / 1e12 if stats.seconds else 0.0


# -- it does not offload at all -------------------------------------------------------------------------------------


def nothing_was_saved(stats: OffloadStats, config: OffloadConfig) -> str | None:
    if stats.saved_tensors or stats.empty_forwards or stats.foreign_hooks:
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
    what = f"{_times(count)} no tier had room" + (f", and {_size(kept)} stayed" if kept else "")
    if config.tier == "disk" and not stats.disk_bytes_peak:
        return f"{what}, from the first byte on: the first warning tells why. Look after the disk, or name another."
    if config.tier != "host" and stats.disk_bytes_peak:
        return f"{what}. Raise disk_budget above the {_size(stats.disk_bytes_peak)} of the peak, or free room there."
    if config.tier == "auto" and config.disk_paths is None:
        return f"{what}. Raise host_budget above {_size(stats.host_bytes_peak)}, or give a disk_path to spill to."
    return f"{what}. Raise host_budget above {_size(stats.host_bytes_peak)}."


def spilled(stats: OffloadStats, config: OffloadConfig) -> str | None:
    count = stats.demotions.get("host_to_disk", 0)
    if not count:
        return None
    return (
        f"{_times(count)} host memory was full and bytes went to disk, which is slower. If there is more memory, raise "
        f"host_budget above {_size(stats.host_bytes_peak)}."
    )


def unpinned(stats: OffloadStats, config: OffloadConfig) -> str | None:
    if not (stats.demotions.get("unpinned") or stats.demotions.get("uncompiled")):
        return None
    return (
        "Compiled code waits for each of its transfers, since the pass that orders them did not run. Compile with "
        "offload.compile(model, ...), with Inductor."
    )


# -- what it waits for ----------------------------------------------------------------------------------------------


def slow_link(stats: OffloadStats, config: OffloadConfig) -> str | None:
    """Bandwidth: transfers run all the time, and compute waits for them all the same."""
    if not _stalls(stats) or not _is_busy(stats):
        return None
    tell = f"Bandwidth is the limit: {_waited(stats)}, while transfers ran {_percent(_busy(stats))} of the time"
    rate = _rate(stats)
    tell += f" at {_size(rate)}/s. " if rate else ". "
    if stats.disk_bytes_peak:
        tell += "A list of paths on several disks as disk_path shares the load; else "
    else:
        tell += "To move less, "
    larger = 4 * config.size("min_bytes") or MIB
    return tell + (
        f"checkpoint a part of the model, put `with eo.no_offload():` around modules that compute little, or try "
        f'min_bytes="{_knob(larger)}".'
    )


def full_window(stats: OffloadStats, config: OffloadConfig) -> str | None:
    """The window: forward waits for room in it although the link has time to spare."""
    if not _stalls(stats) or _is_busy(stats) or 2 * stats.window_stall_seconds < stats.stall_seconds:
        return None
    window = config.size("max_inflight_bytes")
    return (
        f"{_waited(stats).capitalize()}, mostly in forward for room in the in-flight window. Where memory allows, "
        f'raise max_inflight_bytes from {_size(window)} to "{_knob(2 * window)}".{_or_bandwidth(stats)}'
    )


def late_reloads(stats: OffloadStats, config: OffloadConfig) -> str | None:
    """The look-ahead: backward waits for what could have come earlier."""
    if not _stalls(stats) or _is_busy(stats) or 2 * stats.window_stall_seconds >= stats.stall_seconds:
        return None
    ahead = config.size("prefetch_bytes")
    return (
        f"{_waited(stats).capitalize()}, mostly in backward for what was not back yet. Where memory allows, raise "
        f'prefetch_bytes from {_size(ahead)} to "{_knob(max(2 * ahead, 64 * MIB))}".{_or_bandwidth(stats)}'
    )


# -- what stays -----------------------------------------------------------------------------------------------------


def originals_alive(stats: OffloadStats, config: OffloadConfig) -> str | None:
    """A reference: somebody holds the originals, so that moving copies of them frees nothing."""
    nbytes = _kept(stats, "alive", _MUCH)
    if not nbytes:
        return None
    return (
        f"{_size(nbytes)} ({_percent(nbytes / stats.saved_bytes)} of what is saved) stayed since something else keeps "
        "the originals alive until backward: outputs that are collected in a list, attributes of modules, tensors that "
        "the training loop still names. Let go of them before backward."
    )


def small_tensors(stats: OffloadStats, config: OffloadConfig) -> str | None:
    nbytes, least = _kept(stats, "small", _MUCH), config.size("min_bytes")
    if not nbytes or least < 2:
        return None
    return (
        f"{_size(nbytes)} ({_percent(nbytes / stats.saved_bytes)} of what is saved) stayed as smaller than min_bytes, "
        f'which is {_size(least)}. Try min_bytes="{_knob(max(least // 4, 1))}".'
    )


def newest_bytes(stats: OffloadStats, config: OffloadConfig) -> str | None:
    nbytes = _kept(stats, "newest", _MOST)
    if not nbytes or _stalls(stats):
        return None
    # A step may save less than the line holds.
    most = min(config.delay_bytes, stats.resident_bytes_peak or config.delay_bytes)
    smaller = max(most // 4, MIB)
    if most <= smaller:
        return None
    return (
        f"{_size(nbytes)} ({_percent(nbytes / stats.saved_bytes)} of what is saved) stayed as the newest bytes, and "
        f'compute hardly waits: keep_last_bytes="{_knob(smaller)}" leaves fewer of them on the device.'
    )


def other_devices(stats: OffloadStats, config: OffloadConfig) -> str | None:
    nbytes = _kept(stats, "device", _MUCH)
    if not nbytes:
        return None
    return (
        f"{_size(nbytes)} ({_percent(nbytes / stats.saved_bytes)} of what is saved) are on a device that nothing can "
        "be moved from here: the CPU and the accelerator of torch.accelerator are."
    )


def layouts(stats: OffloadStats, config: OffloadConfig) -> str | None:
    nbytes = _kept(stats, "layout", _MUCH)
    if not nbytes:
        return None
    return (
        f"{_size(nbytes)} ({_percent(nbytes / stats.saved_bytes)} of what is saved) stayed for their layout: sparse "
        "and quantized tensors do not move."
    )


# -- what is moved in vain ------------------------------------------------------------------------------------------


def never_asked_for(stats: OffloadStats, config: OffloadConfig) -> str | None:
    if not stats.offloaded_bytes or stats.released_bytes < _MOST * stats.offloaded_bytes:
        return None
    return (
        f"{_size(stats.released_bytes)} ({_percent(stats.released_bytes / stats.offloaded_bytes)} of what was "
        "offloaded) were never asked for: run forwards without a backward under torch.no_grad()."
    )


def asked_too_soon(stats: OffloadStats, config: OffloadConfig) -> str | None:
    if not stats.offloaded_bytes or stats.forwarded_bytes < _MOST * stats.offloaded_bytes:
        return None
    knob = (
        'keep_last_bytes="auto" learns which those are.'
        if config.keep_last_bytes != "auto"
        else f'Try keep_last_bytes="{_knob(2 * config.delay_bytes or 64 * MIB)}".'
    )
    return (
        f"{_size(stats.forwarded_bytes)} ({_percent(stats.forwarded_bytes / stats.offloaded_bytes)} of what was "
        f"offloaded) were asked for before they had left, so that moving them was in vain. {knob}"
    )


def wear(stats: OffloadStats, config: OffloadConfig) -> str | None:
    daily = terabytes_a_day(stats)
    if daily < _WEARS:
        return None
    return (
        f"{daily:,.0f} TB a day would be written to disk, which wears it. Where host memory has room, host_budget "
        "keeps more of it there."
        if stats.host_bytes_peak
        else f"{daily:,.0f} TB a day would be written to disk, which wears it: compare with what the disk is rated for."
    )


RULES: tuple[Rule, ...] = (
    *(nothing_was_saved, hidden_by_others, failed_writes, no_room, spilled, unpinned),
    *(slow_link, full_window, late_reloads),
    *(originals_alive, small_tensors, newest_bytes, other_devices, layouts),
    *(never_asked_for, asked_too_soon, wear),
)


def _is_fine(stats: OffloadStats) -> str:
    if not stats.offloaded_bytes:
        return "Nothing has left yet: all that was saved is among what has to stay."
    return f"Nothing held this run up: {_waited(stats)}."


# -- shares and sizes -----------------------------------------------------------------------------------------------


def _stalls(stats: OffloadStats) -> bool:
    return stats.seconds > 0 and stats.stall_seconds >= _STALL * stats.seconds


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
    """Bytes a second of the way that was busier; 0 where nobody timed it."""
    if stats.out_seconds >= stats.in_seconds:
        return int(stats.bytes_out / stats.out_seconds) if stats.out_seconds else 0
    return int(stats.bytes_in / stats.in_seconds)


def _kept(stats: OffloadStats, reason: str, share: float) -> int:
    """The bytes that stayed for ``reason``, if they are that share of all; parameters take no part."""
    nbytes = stats.kept_bytes.get(reason, 0)
    return nbytes if nbytes and nbytes >= share * (stats.saved_bytes - stats.kept_bytes.get("parameter", 0)) else 0


def _waited(stats: OffloadStats) -> str:
    return f"compute waited {_percent(stats.stall_seconds / stats.seconds if stats.seconds else 0.0)} of the time"


def _percent(share: float) -> str:
    return f"{share:.1%}".replace("%", " %") if share < 0.1 else f"{share:.0%}".replace("%", " %")


def _times(count: int) -> str:
    return "Once" if count == 1 else f"{count:,} times"


def _size(nbytes: int) -> str:
    value = float(nbytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:,.0f} {unit}" if value >= 10 or unit == "B" else f"{value:,.1f} {unit}"
        value /= 1024
    return f"{value:,.1f} TiB"


def _knob(nbytes: int) -> str:
    """A size as a config takes it."""
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if nbytes >= size and nbytes % size == 0:
            return f"{nbytes // size}{unit}"
    return f"{nbytes}B"
