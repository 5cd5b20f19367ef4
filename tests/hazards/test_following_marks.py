"""H54: what a user has said of tensors comes before a plan, and keeps no step from following one."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
from torch import Tensor

import eager_offload as eo
from eager_offload.stats import KeepReason
from eager_offload.step_plan import Fate
from tests.hazards.backends import Backend, assert_settled
from tests.hazards.programs import REGIMES, Around, Regime, Settled, assert_identical, assert_moved, leaf, one_step
from tests.hazards.test_following import follows

SIDE = 16
SIZE = SIDE * SIDE * 4


def unmarked(h: Tensor) -> Tensor:
    return h


@one_step
def step(
    mark: Callable[[Tensor], Tensor] = unmarked, region: Callable[[], Around] = nullcontext, regions: int = 1
) -> tuple[Tensor, ...]:
    """A chain in which one tensor may be marked, which two operators save, and some may be saved in a region."""
    x = leaf(SIDE, SIDE)
    y = x * 2
    for _ in range(4):
        y = y.sin().exp()
    h = mark(y * 3)
    y = h.sin() + h.cos()
    del h
    for _ in range(regions):
        with region():
            y = y.sin()
    for _ in range(4):
        y = y.cos().exp()
    return y, x


def test_h54_a_mark_on_what_no_step_saves_keeps_none_from_following(backend: Backend) -> None:
    aside = [eo.keep(torch.zeros(4)), eo.prefer_offload(torch.zeros(4))]
    follows(backend, lambda around, _: step(around), range(6), 5, {})
    assert len(aside) == 2


@pytest.mark.parametrize("regime", REGIMES, ids=str)
def test_h54_what_each_forward_marks_stays_in_each(regime: Regime, backend: Backend) -> None:
    stats = follows(backend, step, [eo.keep] * 6, 5, {}, 0.7, regime)
    assert stats.kept_bytes["marked"] == 2 * SIZE * 6
    (offload,) = backend.offloads
    plan = offload.step_plan()
    assert [save.reason for save in plan.saves if save.fate is Fate.DECIDE] == [KeepReason.MARKED] * 2
    assert "decide (marked)" in str(plan)


def test_h54_what_each_forward_prefers_leaves_in_each(backend: Backend) -> None:
    """Where nothing else does, since all the rest is among the newest."""
    stats = follows(backend, step, [eo.prefer_offload] * 6, 5, {}, 0.0, keep_last_bytes=64 * SIZE)
    assert stats.bytes_out == SIZE * 6


def test_h54_what_is_small_and_was_preferred_once_stays_when_it_is_not(backend: Backend) -> None:
    """The plan is of a step in which a mark had it leave."""

    @one_step
    def step(*, is_preferred: bool) -> tuple[Tensor, ...]:
        x, small = leaf(SIDE, SIDE), leaf(4, 4)
        y = x * 2
        for _ in range(4):
            y = y.sin().exp()
        h = small * 3
        if is_preferred:
            eo.prefer_offload(h)
        return h.sin().sum() + y.sum(), x

    offload = backend.offload(step_plans=True, min_bytes=SIZE)
    for is_preferred in (True, True, False, True):
        offload.reset_stats()
        expected = step(nullcontext(), is_preferred=is_preferred)
        assert_identical(expected, step(Settled(offload), is_preferred=is_preferred))
        stats = offload.stats()
        assert stats.kept_bytes.get("small", 0) == (0 if is_preferred else 64)
        assert stats.bytes_out == stats.offloaded_bytes == 5 * SIZE + (64 if is_preferred else 0)
    assert (stats.followed_forwards, stats.plan_misses) == (1, {})
    assert_moved(assert_settled(offload))


@pytest.mark.parametrize("how", ["mark", "region"])
def test_h54_what_a_plan_has_as_said_leaves_where_it_is_not(how: str, backend: Backend) -> None:
    silent = {} if how == "mark" else {"regions": 6}
    said = {"mark": eo.keep} if how == "mark" else {"region": eo.no_offload, **silent}
    stats = follows(backend, lambda around, fields: step(around, **fields), [said, said, silent], 2, {}, 0.5)
    kept = {reason: nbytes for reason, nbytes in stats.kept_bytes.items() if reason not in ("small", "newest")}
    assert kept == ({"marked": 2 * 2 * SIZE} if how == "mark" else {"region": 2 * 6 * SIZE})


def test_h54_a_region_around_much_of_what_is_saved_keeps_no_step_from_following(backend: Backend) -> None:
    """What stays takes no room of what is decided anew, so it is no part of what may be."""
    inside = {"region": eo.no_offload, "regions": 6}
    stats = follows(backend, lambda around, _: step(around, **inside), range(6), 5, {}, 0.5)
    assert stats.kept_bytes["region"] == 6 * SIZE * 6


def test_h54_a_mark_between_a_save_and_its_copy_is_decided_anew(backend: Backend) -> None:
    """The sigmoid saves its result, which is marked and saved again then."""

    @one_step
    def step() -> tuple[Tensor, ...]:
        x = leaf(SIDE, SIDE)
        y = x * 2
        for _ in range(3):
            y = y.sin().exp()
        y = eo.keep(y.sigmoid()).cos()
        for _ in range(3):
            y = y.sin().exp()
        return y, x

    stats = follows(backend, lambda around, _: step(around), range(6), 5, {}, 0.7)
    assert stats.kept_bytes["marked"] >= 6 * SIZE
