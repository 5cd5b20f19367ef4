"""What offload has done to memory: the first sentence of the advice."""

from __future__ import annotations

from typing import NamedTuple

from eager_offload.config import OffloadConfig, size_text
from eager_offload.nothing_moved import main_reason, settings_text, why
from eager_offload.stats import KeepReason, OffloadStats
from eager_offload.step_memory import WORTH, StepMemory

#: A share of what was offloaded that no backward asked for, from which a run has saved nothing that it needed.
_ALL_IN_VAIN = 0.9
#: A share of what a step saves from which a reason to stay explains why memory has not fallen.
_EXPLAINS = 0.3


class MemoryVerdict(NamedTuple):
    """What memory has come to."""

    sentence: str
    fell: bool
    """In the steps that were counted."""
    reason: KeepReason | None = None
    """To stay, which the sentence has named."""


def of_memory(stats: OffloadStats, config: OffloadConfig, *, waits: bool) -> MemoryVerdict:
    """Returns whether memory has fallen, by how much or why not, and the settings that would lower it.

    Args:
        stats: of a run in which something was saved.
        waits: whether compute waits for transfers.
    """
    if not stats.offloaded_bytes:
        return MemoryVerdict(f"Memory did not fall: nothing moved, because {why(stats, config)}.", fell=False)
    if stays_within_host(stats):
        sentence = (
            f"Memory did not fall: {size_text(stats.host_bytes_peak)} were copied within host memory, which is the "
            'device of CPU tensors. tier="auto" and tier="disk" move them to disk.'
        )
        return MemoryVerdict(sentence, fell=False)
    in_vain = stats.released_bytes - stats.failed_bytes
    if in_vain >= _ALL_IN_VAIN * stats.offloaded_bytes:
        return MemoryVerdict("Memory was moved in vain: there was no backward for what forwards saved.", fell=False)
    before, after = stats.without_offload_bytes_peak, stats.device_bytes_peak
    peaks = (
        f"at most {size_text(after)} of saved tensors on the device, {size_text(before)} without offload "
        f"({change_text(before, after)})"
    )
    step = StepMemory(stats, config)
    steady = min(after + step.small_bytes, step.peak.held) if step.rows else after
    least = (1 - WORTH) * (before + step.small_bytes)
    falls = steady <= least
    settings = settings_text(step, steady, config, waits=waits, says_none=not falls) if step.rows else ""
    if after + step.small_bytes <= least:
        later = f"; a step after one like it holds at most {size_text(steady)}" if steady <= after * (1 - WORTH) else ""
        return MemoryVerdict(f"Memory fell: {peaks}{later}{settings}.", fell=True)
    if falls:
        sentence = (
            f"Memory falls once a step is known: one after one like it holds at most {size_text(steady)}. Before that "
            f"windows are large: {peaks}{settings}."
        )
        return MemoryVerdict(sentence, fell=False)
    reason, cause = main_reason(stats, config, _EXPLAINS)
    out, back = size_text(stats.max_inflight_bytes), size_text(stats.prefetch_bytes)
    cause = cause or f"windows of {out} on the way out and of {back} brought back early hold most of what may move"
    return MemoryVerdict(f"Memory hardly fell: {peaks}, since {cause}{settings}.", fell=False, reason=reason)


def stays_within_host(stats: OffloadStats) -> bool:
    """Whether what left CPU tensors is in host memory still, so that nothing was freed."""
    return stats.copies_within_host and not stats.disk_bytes_peak


def change_text(before: int, after: int) -> str:
    """A change for a reader, such as ``"-76 %"``."""
    share = f"{after / before - 1:+.0%}" if before else "0%"
    return share.replace("+0%", "0%").replace("-0%", "0%").replace("%", " %")
