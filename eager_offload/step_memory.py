"""The most bytes of saved tensors that a step holds on the device, the reasons, and settings with which it holds less.

A step is given by its rows, and its peak is arithmetic over them, with the present settings or with others. Nothing
runs and nothing is timed, so the result does not depend on the speed of the machine.

[Note: the most that a step holds]
The saves of an operator leave no sooner than the next operator saves. So forward ends with all bytes that stay, the
newest bytes (at least those of one operator), a full in-flight window, and the saves of its last operator. Backward
begins with the same bytes or, if that is more, with a full prefetch window. A step after one like it holds no more,
however slow the link is; it holds less if copies are over sooner. Tensors that stay now may be alive in the program
besides, so that moving them would free nothing; the rows do not tell.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from eager_offload.config import MIB, OffloadConfig, size_literal, size_text
from eager_offload.schedule import auto_window, largest_of
from eager_offload.stats import KeepReason, OffloadStats, SavedRow

#: A saving is worth a sentence from this share of the peak without offload on, and from so many bytes.
WORTH, WORTH_BYTES = 0.2, MIB
#: The shares from which another value of a setting, and a second setting, are worth it.
_WORTH_OTHER, _WORTH_SECOND = 0.1, 0.25
#: The divisors of ``min_bytes`` that are tried.
_PARTS_OF_MIN_BYTES = (4, 16, 64, 256)
#: The factors of ``min_bytes`` that are tried for less to move; and between which shares of the movable bytes it may
#: be.
_TIMES_MIN_BYTES, _MOST_OF_IT, _LESS = (4, 16, 64), 0.5, 0.9
#: The predicate of a sentence about bytes that stay, by reason.
REASONS = {
    KeepReason.SMALL: "are of tensors smaller than min_bytes, which is {min_bytes}",
    KeepReason.PARAMETER: "are parameters, which stay in memory anyway: the `with` has to be around the forward",
    KeepReason.DEVICE: "are on a device that nothing can be moved from here: in a process with an accelerator, tensors "
    "of the CPU move only where a disk_path or a tier is given",
    KeepReason.LAYOUT: "have no plain memory that could move: for their layout, or since they are of a subclass of "
    "Tensor with a __torch_dispatch__ and no __tensor_flatten__, which would say what tensors they are made of",
    KeepReason.MARKED: "were marked to stay, by eo.keep or eo.no_offload",
    KeepReason.REGION: "were saved where nothing may move: in a region that is marked, in a graph that calls a "
    "nested_compile_region, or in a capture",
    KeepReason.NEWEST: "are the newest ones, which stay since backward asks for them at once, and that is up to "
    "{newest}",
    KeepReason.ALIVE: "are of tensors that something else keeps alive until backward, as outputs in a list, attributes "
    "of modules and names in the loop do: let go of them before it",
    KeepReason.BUDGET: "found no room in any tier: raise host_budget or disk_budget, or name another disk_path",
    KeepReason.FAILED: "could not be copied: an earlier warning says why",
}


class StepPeak(NamedTuple):
    """The most bytes of saved tensors that a step holds on the device, parameters left out."""

    held: int
    without_offload: int


class Trial(NamedTuple):
    """Settings that were tried, and the peak of a step with them."""

    fields: Mapping[str, Any]
    """Fields of ``OffloadConfig``, with the values that were tried."""
    peak: StepPeak


class StepMemory:
    """The step of a run that the stats know, and the number of forwards alive at one time, before their backwards.

    It has no rows if none were kept, or if they do not decide what moves: in a run by a plan, in compiled code, and if
    bytes could not leave that should have.
    """

    def __init__(self, stats: OffloadStats, config: OffloadConfig) -> None:
        is_decided_elsewhere = stats.plan is not None or stats.compiled_regions
        lacks = stats.kept_bytes.keys() & {KeepReason.BUDGET, KeepReason.FAILED}
        self.rows = () if is_decided_elsewhere or lacks else stats._rows
        self._config = config
        counted = sum(row.nbytes for row in self.rows if row.reason is not KeepReason.SMALL)
        is_whole = counted and not stats.failed_forwards  # else the peak may be of a forward that failed
        self.forwards = max(round(stats.without_offload_bytes_peak / counted), 1) if is_whole else 1

    @property
    def small_bytes(self) -> int:
        """Bytes of tensors too small to move, which the peaks of the stats leave out."""
        return self.forwards * sum(row.nbytes for row in self.rows if row.reason is KeepReason.SMALL)

    @property
    def peak(self) -> StepPeak:
        """The most that such steps hold."""
        return self.peak_with({})

    def peak_with(self, fields: Mapping[str, Any]) -> StepPeak:
        """Returns the most that such steps would hold with these ``fields`` of the config."""
        tried = dataclasses.replace(self._config, **fields)
        return peak_of(self.rows, tried, self.forwards, moves_skipped="skip" in fields)

    @property
    def larger_min_bytes(self) -> int | None:
        """A ``min_bytes`` with which fewer bytes move, and still most of them; ``None`` if there is none."""
        least = self._config.size("min_bytes")
        moving = [row for row in self.rows if row.reason is None and row.size >= least]
        moves = sum(row.nbytes for row in moving)
        for larger in [(least or MIB // 4) * times for times in _TIMES_MIN_BYTES if moves]:
            if _MOST_OF_IT * moves <= sum(row.nbytes for row in moving if row.size >= larger) <= _LESS * moves:
                return larger
        return None

    def best_trial(self, held: int, *, waits: bool) -> Trial | None:
        """Returns the settings with which the step holds least; ``None`` if none lowers that enough.

        It is one setting unless a second lowers the peak enough, and the first of settings with about the same result.

        Args:
            held: bytes that the step holds now.
            waits: whether compute waits for transfers: then no setting is tried that makes it wait longer.
        """
        best: Trial | None = None
        for fields in _tried(self.rows, self._config, waits=waits):
            peak = self.peak_with(fields)
            share, least = WORTH, held
            if best is not None:
                share, least = _WORTH_OTHER if len(fields) == len(best.fields) else _WORTH_SECOND, best.peak.held
            if peak.held <= least - max(share * peak.without_offload, WORTH_BYTES):
                best = Trial(fields, peak)
        return best


def peak_of(
    rows: Sequence[SavedRow], config: OffloadConfig, forwards: int = 1, *, moves_skipped: bool = False
) -> StepPeak:
    """Returns the most that a step of these ``rows`` holds, after one like it. See [Note: the most that a step holds].

    Args:
        forwards: how many such forwards are alive at one time.
        moves_skipped: takes saves in regions where nothing may move to move.
    """
    least = config.size("min_bytes")
    reasons = {None, KeepReason.SMALL, *((KeepReason.REGION,) if moves_skipped else ())}
    movable = [row for row in rows if row.nbytes and row.size >= least and row.reason in reasons]
    moves = sum(row.nbytes for row in movable)
    stays = sum(row.nbytes for row in rows) - moves
    whole = StepPeak((stays + moves) * forwards, (stays + moves) * forwards)
    if not moves or config.device_budget is not None or config.slowdown is not None:
        return whole  # a budget or a limit of the slowdown may keep all of it
    sizes = [row.nbytes for row in movable]
    auto, largest = auto_window(moves, largest_of(sizes)), max(sizes)
    inflight, prefetch = (
        auto if given == "auto" else int(given) for given in (config.max_inflight_bytes, config.prefetch_bytes)
    )
    if moves <= config.small_step_bytes(prefetch):
        return whole
    of_operators = Counter[int]()
    for row in movable:
        of_operators[row.operator] += row.nbytes
    operator = max(of_operators.values())
    leaving = max(forwards * config.newest_bytes(prefetch), operator) + max(inflight, largest)
    held = max(leaving, prefetch) + operator
    return StepPeak(stays * forwards + min(held, moves * forwards), whole.without_offload)


def _tried(rows: Sequence[SavedRow], config: OffloadConfig, *, waits: bool) -> Iterator[dict[str, Any]]:
    """Yields each setting that may lower the peak of a step, then each pair of them."""
    single = list(_candidates(rows, config, waits=waits))
    yield from single
    for one, other in itertools.combinations(single, 2):
        if not one.keys() & other.keys():
            yield one | other


def _candidates(rows: Sequence[SavedRow], config: OffloadConfig, *, waits: bool) -> Iterator[dict[str, Any]]:
    if config.device_budget is not None:
        yield {"device_budget": None}
    if config.policy == "free":
        yield {"policy": "max"}
    elif config.max_slowdown is not None:
        yield {"max_slowdown": None}
    if config.skip and any(row.reason is KeepReason.REGION for row in rows):
        yield {"skip": ()}
    least = config.size("min_bytes")
    small = max((row.size for row in rows if row.reason is KeepReason.SMALL), default=0)
    for part in _PARTS_OF_MIN_BYTES:
        if 0 < least // part <= small:
            yield {"min_bytes": least // part}
    if waits:
        return
    given = [name for name in ("max_inflight_bytes", "prefetch_bytes") if getattr(config, name) != "auto"]
    if given:
        yield dict.fromkeys(given, "auto")
    if config.keep_last_bytes not in ("auto", 0):
        yield {"keep_last_bytes": "auto"}


# -- for a reader ------------------------------------------------------------------------------------------------------


def why(stats: OffloadStats, config: OffloadConfig) -> str:
    """Returns the text after "nothing moved, because": the reason, and the settings that would change it.

    Args:
        stats: the stats of a run in which nothing was offloaded.
        config: the configuration of the run.
    """
    if stats.foreign_hooks or (stats.empty_forwards and not stats.saved_tensors):
        return (
            "other saved-tensor hooks inside the context hide what is saved there: enter `with offload:` inside "
            "theirs, or leave one of the two out"
        )
    if not stats.saved_tensors:
        return "no saved tensor was seen: put `with offload:` around the forward, under grad mode"
    if not stats.kept_bytes:
        return f"the {stats.saved_tensors:,} tensors that were saved have no bytes"
    _, cause = main_reason(stats, config)
    step = StepMemory(stats, config)
    return cause + (settings_text(step, step.peak.without_offload, config) if step.rows else "")


def main_reason(stats: OffloadStats, config: OffloadConfig, share: float = 0.0) -> tuple[KeepReason | None, str]:
    """Returns the reason for which most bytes of a step stay, and a clause that says so; parameters come last.

    Args:
        share: the share of a step's saves from which a reason counts; if none does, ``None`` and an empty clause.
    """
    others = {reason: nbytes for reason, nbytes in stats.kept_bytes.items() if reason != KeepReason.PARAMETER}
    kept = others or stats.kept_bytes
    steps = max(stats.steps, 1)
    whole = stats.saved_bytes - stats.kept_bytes.get(KeepReason.PARAMETER, 0) if others else sum(kept.values())
    reason = max(kept, key=lambda reason: kept[reason], default=None)
    if reason is None or kept[reason] < share * whole:
        return None, ""
    whole = max(whole, sum(kept.values()))
    saved, stays = size_text(whole // steps), size_text(kept[reason] // steps)
    return KeepReason(reason), _clause(KeepReason(reason), saved, stays, stats, config, is_all=kept[reason] == whole)


def _clause(
    reason: KeepReason, saved: str, stays: str, stats: OffloadStats, config: OffloadConfig, *, is_all: bool
) -> str:
    is_bounded = config.device_budget is not None or config.slowdown is not None
    if reason is KeepReason.NEWEST and stats.plan is not None:
        return f"of the {saved} that a step saves, {stays} stay as the plan says"
    if reason is KeepReason.NEWEST:
        if config.newest_bytes(1) == 0:
            return f"{stays} a step were asked for, or closed upon, before they left"
        if 0 < stats.device_memory_peak <= stats.device_budget:
            return f"the {saved} that a step saves fit into device_budget beside all else"
        if is_bounded and stats.compiled_regions and not (stats.device_budget or stats.keep_last_bytes):
            return (
                f"of the {saved} that a step saves, {stays} stay as was decided for compiled code: by its budget, "
                "since the link hides no more, or since less than a window frees nothing"
            )
        if config.slowdown is not None:
            return (
                f"of the {saved} that a step saves, {stays} stay, as long as {config.says_slowdown} has not found "
                "that they move in time: that takes some steps"
            )
    sentence = reason_text(reason, config, stats.prefetch_bytes)
    return f"of the {saved} that a step saves, {'all' if is_all else stays} {sentence}"


def reason_text(reason: KeepReason, config: OffloadConfig, prefetch_bytes: int) -> str:
    """Returns the predicate of a sentence about bytes that stay for ``reason``; ``prefetch_bytes``: the window in
    force."""
    setting = "prefetch_bytes" if config.keep_last_bytes == "auto" else "keep_last_bytes"
    return REASONS[reason].format(
        min_bytes=config.written("min_bytes") or size_text(config.size("min_bytes")),
        newest=config.written(setting) or size_text(config.newest_bytes(prefetch_bytes)),
    )


def settings_text(
    step: StepMemory, held: int, config: OffloadConfig, *, waits: bool = False, says_none: bool = True
) -> str:
    """Returns a sentence about the settings with which ``step`` holds least, to follow another one.

    Args:
        held, waits: as for ``StepMemory.best_trial``.
        says_none: whether there is a sentence if no setting is worth it.
    """
    best = step.best_trial(held, waits=waits)
    if best is None:
        if not says_none:
            return ""
        share = f"{WORTH:.0%}".replace("%", " %")
        return f". None of the settings that were tried lowers that by {share} and by {size_text(WORTH_BYTES)}"
    fields = best.fields.items()
    set_to = [f"{name}={_literal(value)}" for name, value in fields if value not in (None, ())]
    left_out = [name for name, value in fields if value in (None, ())]
    parts = ([f"with {' and '.join(set_to)}"] if set_to else []) + [f"without {name}" for name in left_out]
    given = {**vars(config), **best.fields}
    known = "" if "auto" not in (given["max_inflight_bytes"], given["prefetch_bytes"]) else ", once one like it has run"
    text, alive = " and ".join(parts), step.forwards
    who, whose = (
        ("a step holds", "its") if alive == 1 else (f"the {alive} forwards that are alive at once hold", "their")
    )
    return (
        f". {text[0].upper()}{text[1:]} {who} at most {size_text(best.peak.held)} of {whose} "
        f"{size_text(best.peak.without_offload)}{known}"
    )


def _literal(value: object) -> str:
    return f'"{size_literal(value)}"' if isinstance(value, int) and value else repr(value).replace("'", '"')
