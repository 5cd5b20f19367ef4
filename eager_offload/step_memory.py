"""How many bytes of saved tensors a step holds on the device at most, and how many it would with other settings.

Numbers only, like ``schedule.py``: a step is the rows of what it has saved, and its peak is arithmetic over them.
Nothing runs and nothing is timed, so what is said of a setting does not depend on how fast a machine was.

[Note: the most that a step holds]
What an operator has saved leaves no sooner than the next one saves. So forward ends with all that stays, the newest
bytes (those of one operator at least), a full window of what is on its way out, and what its last operator has saved.
Backward begins with the same or, if that is more, with the window of what comes back early. A step after one like it
holds no more, however slow the link is; it holds less where copies are over sooner. Of what stays now, it is not known
what the program keeps alive besides: of such tensors moving frees nothing.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from eager_offload.config import MIB, OffloadConfig
from eager_offload.schedule import auto_window, largest_of
from eager_offload.stats import KeepReason, OffloadStats, SavedRow

#: A part of what a step would hold without offload, from which it is worth a sentence; and bytes.
WORTH, WORTH_BYTES = 0.2, MIB
#: The parts for which another value of a setting is taken, and a second setting.
_WORTH_OTHER, _WORTH_SECOND = 0.1, 0.25
#: The parts of ``min_bytes`` that are tried, the largest first.
_PARTS_OF_MIN_BYTES = (4, 16, 64, 256)
#: The times of it that are tried for less to move; and the shares of what moves between which that is less, and most.
_TIMES_MIN_BYTES, _MOST_OF_IT, _LESS = (4, 16, 64), 0.5, 0.9


class StepPeak(NamedTuple):
    """The most bytes of saved tensors that a step holds on the device, parameters left out."""

    held: int
    without_offload: int


class Trial(NamedTuple):
    """Settings that were tried, and what a step holds with them."""

    fields: Mapping[str, Any]
    """Of ``OffloadConfig``, with the values that were tried."""
    peak: StepPeak


class StepMemory:
    """The step that the stats of a run know, and how many of them are alive at one time, their backwards yet to come.

    It has no rows where none were written down, and where they do not say what moves: of a run that follows a plan, of
    compiled code, and where bytes were to leave that could not.
    """

    def __init__(self, stats: OffloadStats, config: OffloadConfig) -> None:
        is_decided_elsewhere = stats.plan is not None or stats.compiled_regions
        lacks = stats.kept_bytes.keys() & {KeepReason.BUDGET, KeepReason.FAILED}
        self.rows = () if is_decided_elsewhere or lacks else stats._rows
        self._config = config
        counted = sum(row.nbytes for row in self.rows if row.reason is not KeepReason.SMALL)
        is_whole = counted and not stats.failed_forwards  # else the peak may be of a forward that is none of these
        self.forwards = max(round(stats.without_offload_bytes_peak / counted), 1) if is_whole else 1

    @property
    def small_bytes(self) -> int:
        """Bytes that are too small to move, which the peaks of the stats leave out."""
        return self.forwards * sum(row.nbytes for row in self.rows if row.reason is KeepReason.SMALL)

    @property
    def peak(self) -> StepPeak:
        """What such steps hold at most."""
        return self.peak_with({})

    def peak_with(self, fields: Mapping[str, Any]) -> StepPeak:
        """What they would with these ``fields`` of the config."""
        tried = dataclasses.replace(self._config, **fields)
        return peak_of(self.rows, tried, self.forwards, moves_skipped="skip" in fields)

    @property
    def larger_min_bytes(self) -> int | None:
        """Returns a ``min_bytes`` with which less moves, and still most; ``None`` where there is none."""
        least = self._config.size("min_bytes")
        moving = [row for row in self.rows if row.reason is None and row.size >= least]
        moves = sum(row.nbytes for row in moving)
        for larger in [(least or MIB // 4) * times for times in _TIMES_MIN_BYTES if moves]:
            if _MOST_OF_IT * moves <= sum(row.nbytes for row in moving if row.size >= larger) <= _LESS * moves:
                return larger
        return None

    def best_trial(self, held: int, *, waits: bool) -> Trial | None:
        """Returns the settings with which it holds least; ``None`` where none lowers that by a worthwhile part.

        One setting is taken unless a second is worth its while, and of those that come to about the same the first.

        Args:
            held: bytes that it holds now.
            waits: whether compute waits for transfers: what has it wait longer is not tried then.
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
    """Returns what a step of these ``rows`` holds at most, after one like it. See [Note: the most that a step holds].

    Args:
        forwards: how many of them are alive at one time.
        moves_skipped: whether what was saved where nothing may move is taken to move.
    """
    least = config.size("min_bytes")
    reasons = {None, KeepReason.SMALL, *((KeepReason.REGION,) if moves_skipped else ())}
    movable = [row for row in rows if row.nbytes and row.size >= least and row.reason in reasons]
    moves = sum(row.nbytes for row in movable)
    stays = sum(row.nbytes for row in rows) - moves
    whole = StepPeak((stays + moves) * forwards, (stays + moves) * forwards)
    if not moves or config.device_budget is not None or config.slowdown is not None:
        return whole  # a budget, or a limit of the slowdown, may let all of it stay
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
    """Yields each setting that may lower what a step holds, then each pair of them."""
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
