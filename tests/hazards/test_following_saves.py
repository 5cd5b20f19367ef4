"""H54: saves of which a user has said something, and those that are asked for more than once, in steps that follow."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import eager_offload as eo
from eager_offload.stats import KeepReason
from eager_offload.step_plan import Fate
from tests.hazards.backends import Backend, assert_settled
from tests.hazards.programs import REGIMES, Around, Regime, Settled, assert_identical, assert_moved, leaf, one_step
from tests.hazards.test_following import deep, follows, plan_of

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


@pytest.mark.parametrize("how", ["mark", "region"])
def test_h54_what_a_plan_has_as_said_leaves_where_it_is_not(how: str, backend: Backend) -> None:
    silent = {} if how == "mark" else {"regions": 6}
    said = {"mark": eo.keep} if how == "mark" else {"region": eo.no_offload, **silent}
    stats = follows(backend, lambda around, fields: step(around, **fields), [said, said, silent], 2, {}, 0.5)
    kept = {reason: nbytes for reason, nbytes in stats.kept_bytes.items() if reason not in ("small", "newest")}
    assert kept == ({"marked": 2 * 2 * SIZE} if how == "mark" else {"region": 2 * 6 * SIZE})


# -- what is asked for twice ------------------------------------------------------------------------------------------


class LooksTwice(torch.autograd.Function):
    """A product whose backward looks at ``saved_tensors`` for each gradient: each time all of them are unpacked."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor) -> Tensor:
        ctx.save_for_backward(x, y)
        return x * y

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        return gradient * ctx.saved_tensors[1], gradient * ctx.saved_tensors[0]


@one_step
def function() -> tuple[Tensor, ...]:
    x = leaf(SIDE, SIDE)
    y = x * 2
    for _ in range(3):
        y = LooksTwice.apply(y.sin(), y.cos())
    return y, x


def backwards(around: Around, count: int = 2) -> Tensor | None:
    x = leaf(SIDE, SIDE)
    loss = deep(x, around, 4)
    for _ in range(count):
        loss.backward(retain_graph=True)
    return x.grad


def graph_of_gradients(around: Around) -> Tensor | None:
    x = leaf(SIDE, SIDE)
    loss = deep(x, around, 4)
    (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
    gradient.square().sum().backward()
    return x.grad


@one_step
def graph_of_gradients_inside() -> tuple[Tensor, ...]:
    """What backward saves is of the same forward."""
    x = leaf(SIDE, SIDE)
    loss = deep(x, nullcontext(), 4)
    (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
    return gradient.square(), x


@pytest.mark.parametrize("regime", REGIMES, ids=str)
@pytest.mark.parametrize("step", [function, backwards, graph_of_gradients, graph_of_gradients_inside])
def test_h54_a_save_that_is_asked_for_twice_is_followed(
    step: Callable[[Around], Tensor | None], regime: Regime, backend: Backend
) -> None:
    offload, expected = backend.offload(step_plans=True, **regime.fields), step(nullcontext())
    for _ in range(6):
        assert_identical(expected, step(regime.around(offload)))
    stats = assert_settled(offload)
    if backend.name == "virtual" and step is graph_of_gradients_inside:  # a thread of autograd's saves the half of it
        assert stats.followed_forwards > 0
        return
    assert (stats.followed_forwards, stats.plan_misses) == (5, {})
    assert stats.bytes_out > 0
    assert offload.step_plan().asks_again


@pytest.mark.parametrize("step", [function, backwards])
def test_h54_a_plan_that_asks_twice_begins_a_run(
    step: Callable[[Around], Tensor | None], backend: Backend, tmp_path: Path
) -> None:
    plan_of(backend, step).save(tmp_path / "plan.json")
    plan = eo.StepPlan.load(tmp_path / "plan.json")
    follows(backend, lambda around, _: step(around), [None], 1, {}, plan=plan)


@pytest.mark.parametrize(("first", "later", "misses"), [(1, 2, {"order": 1}), (2, 1, {}), (2, 3, {"order": 1})])
def test_h54_another_number_of_backwards_is_exact(
    first: int, later: int, misses: dict[str, int], backend: Backend
) -> None:
    follows(backend, backwards, [first, first, later, first], 2 if misses else 3, misses)


def test_h54_a_backward_over_and_over_is_followed_by_none_and_says_so_once(backend: Backend) -> None:
    follows(backend, backwards, [5] * 3, 0, {"twice": 1})


@pytest.mark.parametrize("before", [0, 1])
def test_h54_what_is_changed_raises_in_the_first_or_the_second_backward(before: int, backend: Backend) -> None:
    offload = backend.offload(step_plans=True)
    for changes in (False, False, True):
        x = leaf(SIDE, SIDE)
        with Settled(offload):
            y = x * 2
            loss = y.sin().exp().sum()
        for _ in range(before):
            loss.backward(retain_graph=True)
        if changes:
            y.add_(1)
            with pytest.raises(eo.SavedTensorModifiedError, match="modified by an inplace operation"):
                loss.backward()
        else:
            del y
            loss.backward()
    assert offload.stats().followed_forwards == 2
    del loss, y
    assert_moved(assert_settled(offload), 0.6)


def test_h54_what_was_rounded_has_the_same_numbers_the_second_time(backend: Backend) -> None:
    def step(around: Around) -> list[Tensor]:
        x, w = leaf(SIDE, SIDE), leaf(SIDE, SIDE, seed=2)
        with around:
            loss = ((x * 2).sin() * (w * 3).cos()).sum()
        return [*torch.autograd.grad(loss, [x, w], retain_graph=True), *torch.autograd.grad(loss, [x, w])]

    found = []
    for step_plans in (False, True):
        offload = backend.offload(codec="bf16", step_plans=step_plans)
        found.append([step(Settled(offload)) for _ in range(5)])
        stats = assert_settled(offload)
        assert (stats.followed_forwards > 0, stats.plan_misses) == (step_plans, {})
        assert stats.coded_bytes
    assert_identical(found[0], found[1])
    for gradients in found[1]:
        assert_identical(gradients[:2], gradients[2:])
