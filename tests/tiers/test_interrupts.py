"""H10: an interrupt at any line of a tier: no byte is handed out twice, and all room comes back, none in use."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from linecache import getline
from pathlib import Path
from types import FrameType
from typing import Any
from unittest.mock import Mock

import pytest

import eager_offload.tiers
from eager_offload.tiers.base import Tier
from eager_offload.tiers.memory import PAGE
from tests.sampling import one_in
from tests.tiers.files import Watched
from tests.tiers.rig import MIB, Made, Verdicts, equal, noise, reserve, stored

_HERE = str(Path(eager_offload.tiers.__file__).parent)


@contextmanager
def interrupted_at(number: int) -> Iterator[list[int]]:
    """Within it, a KeyboardInterrupt comes before the line of the tiers' code of that number; yields how many came."""
    lines = [0]

    def trace(frame: FrameType, event: str, arg: object) -> Any:
        if not frame.f_code.co_filename.startswith(_HERE):
            return None
        # Behind these the interpreter does not look for signals.
        silent = getline(frame.f_code.co_filename, frame.f_lineno).lstrip().startswith(("with ", "try:"))
        if event == "line" and not silent:
            lines[0] += 1
            if lines[0] == number:
                raise KeyboardInterrupt
        return trace

    sys.settrace(trace)
    try:
        yield lines
    finally:
        sys.settrace(None)


def steps(tier: Tier, verdicts: Verdicts) -> None:
    """Every way in which room is found, and comes back."""
    first = [tier.reserve(nbytes) for nbytes in (8192, 100, 8192, 70_000, 700_000, 2 * MIB)]
    for name, slot in enumerate(first):
        assert slot is not None
        slot.record.fences += (verdicts.fence(name),)
    del slot, first[::2]
    verdicts.over.update(range(4))
    second = [tier.reserve(nbytes) for nbytes in (8192, 5000, 12_000, 3 * MIB, 66 * MIB)]
    assert None not in second
    first.clear()
    assert tier.used_bytes > 0


def with_a_use_that_goes_on(kind: str, directory: Path) -> tuple[Made, Verdicts, weakref.ref[object]]:
    """A tier, and the room of a slot that has gone while it was read."""
    made, verdicts = Made(kind, directory), Verdicts()
    slot = reserve(made.tier, 8192)
    slot.record.fences += (verdicts.fence("reload"),)
    made.files.clear()  # which only slots keep
    Watched.opened.clear()
    return made, verdicts, weakref.ref(slot.slab.tensor if kind == "host" else slot._file)


@pytest.mark.parametrize("kind", ["host", "disk"])
def test_h10_an_interrupt_at_any_line_loses_no_room_and_no_use(kind: str, directory: Path) -> None:
    made, verdicts, _ = with_a_use_that_goes_on(kind, directory)
    before = stored(made.tier, noise(12_000, 9))
    with interrupted_at(0) as lines:
        steps(made.tier, verdicts)
    del before
    # The first request is for what is in use: there the use is handed on, and each line counts.
    numbers = [*range(1, 100, 2), *one_in(30, list(range(100, lines[0] + 1)))]
    assert len(numbers) > 75
    for number in numbers:
        made, verdicts, in_use = with_a_use_that_goes_on(kind, directory)
        tier = made.tier
        before = stored(tier, noise(12_000, 9))
        with interrupted_at(number), pytest.raises(KeyboardInterrupt):
            steps(tier, verdicts)
        assert tier.used_bytes == 12_000, number
        slots = [stored(tier, noise(nbytes, seed)) for seed, nbytes in enumerate((8192, 100, 8192, 70_000, 600_000))]
        assert equal([before, *slots], (9, *range(5))), number
        assert tier.used_bytes == 12_000 + sum(slot.nbytes for slot in slots)
        slots.clear()
        del before
        assert tier.used_bytes == 0
        tier.close()
        assert tier.used_bytes == 0
        assert (kind == "host") == (in_use() is not None), (number, "a device may still read it")
        verdicts.over.update([*range(10), "reload"])
        assert tier.used_bytes == tier.held_bytes == 0, number
        assert not made.system.alive, number
        assert in_use() is None


@pytest.mark.parametrize("kind", ["host", "disk"])
def test_h10_what_a_crashed_tier_gave_counts_and_its_room_goes_with_it(kind: str, directory: Path) -> None:
    made, verdicts = Made(kind, directory, MIB, one_slab=True), Verdicts()
    tier = made.tier
    before = [stored(tier, noise(MIB // 8, seed)) for seed in range(3)]
    stored(tier, noise(MIB // 2)).record.fences += (verdicts.fence("reload"),)
    verdicts.meanwhile = Mock(side_effect=KeyboardInterrupt)
    with pytest.raises(KeyboardInterrupt):
        tier.reserve(MIB // 2 + PAGE)
    assert (tier.used_bytes, tier.held_bytes) == (3 * MIB // 8, MIB)
    assert tier.reserve(PAGE) is None, "nothing is cut from what was left, and the budget has room for no more"
    assert equal(before, range(3))
    before.clear()
    assert tier.used_bytes == 0
    if kind == "host":
        assert made.taken_bytes == MIB, "a device may still read it"
        verdicts.over.add("reload")
    assert tier.used_bytes == tier.held_bytes == 0
    assert equal([stored(tier, noise(MIB))], [0])
