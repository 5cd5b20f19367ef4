"""Why nothing moved, in a sentence that says what to change: of plain loops and of every integration."""

from __future__ import annotations

from eager_offload.config import OffloadConfig, size_text
from eager_offload.stats import KeepReason, OffloadStats

#: What goes on behind the bytes of a reason.
_REASONS = {
    KeepReason.SMALL: "are of tensors smaller than min_bytes, which is {min_bytes}: set a smaller min_bytes",
    KeepReason.PARAMETER: "are parameters, which stay in memory anyway: the `with` has to be around the forward",
    KeepReason.DEVICE: "are on a device that nothing can be moved from here: in a process with an accelerator, tensors "
    "of the CPU move only where a disk_path or a tier is given",
    KeepReason.LAYOUT: "are of a layout that does not move, such as a sparse one",
    KeepReason.MARKED: "were marked to stay, by eo.keep or eo.no_offload",
    KeepReason.REGION: "were saved where nothing may move: in a region that is marked, or in a capture",
    KeepReason.NEWEST: "are the newest ones of a step, which stay since backward asks for them at once, and that is up "
    "to {newest}: a small model has no need to move anything, and keep_last_bytes=0 moves it anyway",
    KeepReason.ALIVE: "are of tensors that something else keeps alive until backward: let go of them before it",
    KeepReason.BUDGET: "found no room in any tier: raise host_budget or disk_budget, or name another disk_path",
    KeepReason.FAILED: "could not be copied: an earlier warning says why",
}


def why(stats: OffloadStats, config: OffloadConfig) -> str:
    """What follows "nothing moved, because".

    Args:
        stats: of a run of which nothing was offloaded.
        config: that it ran with.
    """
    if stats.foreign_hooks or (stats.empty_forwards and not stats.saved_tensors):
        return (
            "other saved-tensor hooks inside the context hide what is saved there: enter `with offload:` inside "
            "theirs, or leave one of the two out"
        )
    if not stats.saved_tensors:
        return "no saved tensor was seen: put `with offload:` around the forward, under grad mode"
    others = {reason: nbytes for reason, nbytes in stats.kept_bytes.items() if reason != KeepReason.PARAMETER}
    kept = others or stats.kept_bytes
    if not kept:
        return f"the {stats.saved_tensors:,} tensors that were saved have no bytes"
    reason = max(kept, key=lambda reason: kept[reason])
    newest = config.newest_bytes(stats.prefetch_bytes)
    setting = "prefetch_bytes" if config.keep_last_bytes == "auto" else "keep_last_bytes"
    if reason == KeepReason.NEWEST and config.newest_bytes(1) == 0:
        return f"the {size_text(sum(kept.values()))} that were saved were asked for, or closed upon, before they left"
    if reason == KeepReason.NEWEST and 0 < stats.device_memory_peak <= stats.device_budget:
        return f"the {size_text(sum(kept.values()))} that were saved fit into device_budget beside all else"
    is_bounded = config.device_budget is not None or config.slowdown is not None
    if reason == KeepReason.NEWEST and is_bounded and not (stats.device_budget or stats.keep_last_bytes):
        total, stay = size_text(sum(kept.values())), size_text(kept[reason])
        return (
            f"of the {total} that were saved, {stay} stay as was decided for compiled code: by its budget, since the "
            "link hides no more, or since less than a window frees nothing"
        )
    if reason == KeepReason.NEWEST and config.slowdown is not None:
        return (
            f"of the {size_text(sum(kept.values()))} that were saved, {size_text(kept[reason])} stay, as long as "
            f"{config.says_slowdown} has not found that they move in time: that takes some steps"
        )
    sentence = _REASONS[KeepReason(reason)].format(
        min_bytes=config.written("min_bytes") or size_text(config.size("min_bytes")),
        newest=config.written(setting) or size_text(newest),
    )
    share = "all" if len(kept) == 1 else size_text(kept[reason])
    return f"of the {size_text(sum(kept.values()))} that were saved, {share} {sentence}"
