"""Why bytes stay on the device, as a text that names a setting: most of a step's, and all at an out-of-memory error."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

from eager_offload import contexts
from eager_offload.config import OffloadConfig, size_text
from eager_offload.stats import KeepReason, OffloadStats
from eager_offload.tiers.forking import Living
from eager_offload.torch_private.autograd import on_backwards
from eager_offload.torch_private.memory import is_out_of_memory

#: The predicate of a sentence about bytes that stay, by reason.
REASONS = {
    KeepReason.SMALL: "are of tensors smaller than min_bytes, which is {min_bytes}",
    KeepReason.PARAMETER: "are parameters, which stay in memory anyway: the `with` has to be around the forward",
    KeepReason.DEVICE: "are on a device that nothing can be moved from here: in a process with an accelerator, tensors "
    "of the CPU move only if a disk_path or a tier is given",
    KeepReason.LAYOUT: "have no plain memory that could move: because of their layout, or because they are of a "
    "subclass of Tensor with a __torch_dispatch__ and no __tensor_flatten__, which would list their inner tensors",
    KeepReason.MARKED: "were marked to stay, by eo.keep or eo.no_offload",
    KeepReason.REGION: "were saved in a place that is exempt: in modules that skip names, in a marked region, in "
    "a graph that calls a nested_compile_region, or in a capture",
    KeepReason.NEWEST: "are the newest ones, which stay because backward needs them at once: {setting} is {newest}",
    KeepReason.ALIVE: "are of tensors that something else keeps alive until backward (outputs in a list, attributes of "
    "modules, variables of the loop): delete these references before backward",
    KeepReason.BUDGET: "found no room in any tier: raise {budgets}, or name another disk_path",
    KeepReason.FAILED: "could not be copied: an earlier warning says why",
}


def why(stats: OffloadStats, config: OffloadConfig) -> str:
    """Returns the text after "nothing moved, because": the reason, and the settings that would change it."""
    if stats.foreign_hooks or (stats.empty_forwards and not stats.saved_tensors):
        return (
            "other saved-tensor hooks inside the context hide the tensors saved there: enter `with offload:` inside "
            "theirs, or leave one of the two out"
        )
    if not stats.saved_tensors:
        return "no saved tensor was seen: put `with offload:` around the forward, under grad mode"
    if not stats.kept_bytes:
        return f"the {stats.saved_tensors:,} tensors that were saved have no bytes"
    return main_reason(stats, config)[1]


def main_reason(stats: OffloadStats, config: OffloadConfig, share: float = 0.0) -> tuple[KeepReason | None, str]:
    """Returns the reason for which most bytes of a step stay, and a clause that says so; parameters come last.
    ``share``: the share of a step's saves from which a reason counts; if none does, ``None`` and an empty clause."""
    others = {reason: nbytes for reason, nbytes in stats.kept_bytes.items() if reason != KeepReason.PARAMETER}
    kept = others or stats.kept_bytes
    steps = max(stats.steps, 1)
    whole = stats.saved_bytes - stats.kept_bytes.get(KeepReason.PARAMETER, 0) if others else sum(kept.values())
    reason = max(kept, key=lambda reason: kept[reason], default=None)
    if reason is None or kept[reason] < share * whole:
        return None, ""
    whole, reason = max(whole, sum(kept.values())), KeepReason(reason)
    saved, stays = size_text(whole // steps), size_text(kept[reason] // steps)
    is_bounded = config.device_budget is not None or config.is_free
    sentence = reason_text(reason, config, stats.prefetch_bytes)
    clause = f"of the {saved} that a step saves, {'all' if kept[reason] == whole else stays} {sentence}"
    if reason is not KeepReason.NEWEST:
        pass
    elif stats.plan is not None:
        clause = f"of the {saved} that a step saves, {stays} stay as the plan says"
    elif config.newest_bytes(1) == 0:
        clause = f"{stays} a step were unpacked, or their context was closed, before they left"
    elif 0 < stats.device_memory_peak <= stats.device_budget:
        clause = f"the {saved} that a step saves fit into device_budget with all other memory"
    elif is_bounded and stats.compiled_regions and not (stats.device_budget or stats.keep_last_bytes):
        clause = (
            f"of the {saved} that a step saves, {stays} stay as was decided for compiled code: by its budget, "
            "since the link hides no more, or since less than a window frees nothing"
        )
    elif config.is_free:
        clause = (
            f'of the {saved} that a step saves, {stays} stay, as long as policy="free" has not found that they move '
            "in time: that takes two steps of a kind"
        )
    return reason, clause


def reason_text(reason: KeepReason, config: OffloadConfig, prefetch_bytes: int) -> str:
    """Returns the predicate of a sentence about bytes that stay for ``reason``; ``prefetch_bytes``: the window in
    force."""
    setting = "prefetch_bytes" if config.keep_last_bytes == "auto" else "keep_last_bytes"
    return REASONS[reason].format(
        setting=setting,
        budgets=budgets_text(config),
        min_bytes=config.written("min_bytes") or size_text(config.size("min_bytes")),
        newest=config.written(setting) or size_text(config.newest_bytes(prefetch_bytes)),
    )


def budgets_text(config: OffloadConfig, host_peak: int = 0, disk_peak: int = 0) -> str:
    """Returns the budgets to raise if no tier had room: one per tier in use, with the value that the user wrote or the
    peak of the tier."""
    peaks = {"host_budget": host_peak, "disk_budget": disk_peak}
    given = [field for field in peaks if getattr(config, field) != "auto"]
    in_use = [f"{config.tier}_budget"] if config.tier != "auto" else []
    in_use = in_use or [field for field in peaks if peaks[field] or (field in given and not disk_peak)]
    return " or ".join(budget_text(config, field, peaks[field]) for field in in_use or peaks)


def budget_text(config: OffloadConfig, field: str, peak: int) -> str:
    """Returns a budget with the value to go above: the one that the user wrote, else the ``peak`` of its tier."""
    if getattr(config, field) != "auto":
        return f"{field} above {config.written(field) or size_text(config.size(field))}"
    return f"{field} above the {size_text(peak)} of the peak" if peak else field


# -- the note on an error ----------------------------------------------------------------------------------------------


class Held(NamedTuple):
    """Bytes of saved tensors on the devices of one ``Offload`` at a moment."""

    stays: Counter[KeepReason]
    """Bytes that stay, by reason; of tensors smaller than ``min_bytes``, those of an average step."""
    leaving: int
    returning: int
    """Bytes that were brought back, or are on their way."""
    prefetch_bytes: int

    def note(self, config: OffloadConfig) -> str:
        """Returns the note: a line for each reason, most bytes first, and the setting that would have freed most."""
        settings = {
            KeepReason.NEWEST: "keep_last_bytes=0" if config.keep_last_bytes != 0 else "",
            KeepReason.SMALL: "a smaller min_bytes",
            KeepReason.BUDGET: "a larger host_budget or disk_budget, or a disk_path,",
        }
        if config.device_budget is not None:
            settings[KeepReason.NEWEST] = "a smaller device_budget"
        elif config.policy == "free":
            settings[KeepReason.NEWEST] = 'policy="max"'
        rows = [
            (nbytes, reason_text(reason, config, self.prefetch_bytes), settings.get(reason, ""))
            for reason, nbytes in self.stays.items()
        ]
        rows.append((self.leaving, "are on their way out", "a smaller max_inflight_bytes"))
        rows.append((self.returning, "were brought back, or are on their way", "a smaller prefetch_bytes"))
        rows = sorted((row for row in rows if row[0]), reverse=True)
        advice = "no setting would move more of it: a smaller batch or checkpointing frees memory"
        for nbytes, _, setting in reversed(rows):
            if setting:
                advice = f"{setting} would have freed up to {size_text(nbytes)}"
        head = f"eager_offload: {size_text(sum(nbytes for nbytes, *_ in rows))} of saved tensors are on the device"
        return "\n  ".join([head, *(f"{size_text(nbytes)} {what}" for nbytes, what, _ in rows), advice])


class Watching(Protocol):
    """Looks at the backwards of a process."""

    def before_backward(self) -> Any:
        """Returns the argument of ``after_backward``."""

    def after_backward(self, before: Any) -> None:
        """Looks at a backward that is over."""


class _Watch:
    """Counts backwards, and adds the note to their errors, also outside every ``with``."""

    def __init__(self) -> None:
        #: Returns a note on the held bytes of each live ``Offload`` that holds any.
        self.notes: Callable[[], list[str]] = list
        #: Are asked for their state before a backward, and given it after one.
        self.watching: Living[Watching] = Living()
        #: Is called after each backward.
        self.ended: Callable[[], None] = lambda: None
        #: Whether any ``Offload`` is alive.
        self.is_wanted: Callable[[], bool] = lambda: False
        self._patch = on_backwards(self._around)

    def put_on(self) -> None:
        """Begins to watch backwards, until one runs when every ``Offload`` is gone."""
        if self._patch.active is None:
            self._patch.put_on()

    def note(self, error: BaseException | None) -> None:
        """Adds the notes to ``error``, once, if it is an out-of-memory error."""
        if not isinstance(error, Exception) or not is_out_of_memory(error):
            return
        if not any(note.startswith("eager_offload: ") for note in getattr(error, "__notes__", ())):
            for note in self.notes():
                error.add_note(note)

    def _around(self, replaced: Callable[..., Any]) -> Callable[..., Any]:
        def run_backward(*arguments: Any, **named: Any) -> Any:
            contexts.thread.backwards += 1
            contexts.process.backwards += not contexts.thread.is_outside
            watching = [(one, one.before_backward()) for one in self.watching] if self.watching else ()
            try:
                result = replaced(*arguments, **named)
            except Exception as error:
                self.note(error)
                raise
            finally:
                if not self.is_wanted():
                    self._patch.take_off()
            self.ended()
            for one, before in watching:
                one.after_backward(before)
            return result

        return run_backward


watch = _Watch()
