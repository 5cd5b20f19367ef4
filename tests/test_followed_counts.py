"""What stays in a forward that follows a plan is counted later, many together: every reader of the stats sees it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode

from eager_offload import Offload, OffloadStats
from tests.hazards.wrappers import Dissolving

Look = Callable[[int], None]
Counted = tuple[Any, ...]

pytestmark = pytest.mark.filterwarnings("ignore:eager_offload. tier", "ignore:eager_offload. nothing moved")


def make(step_plans: bool) -> Offload:
    return Offload(tier="host", min_bytes="4KiB", keep_last_bytes=0, step_plans=step_plans)


def counted(stats: OffloadStats) -> Counted:
    names = ("parameter", "small", "region")
    kept = tuple(stats.kept_bytes.get(name, 0) for name in names)
    return stats.steps, stats.saved_tensors, stats.saved_bytes, kept


def forward(weights: list[Tensor], look: Look, *, larger: int = -1) -> Tensor:
    """Saves of each weight and each product, and of numbers that get larger and smaller again."""
    h = torch.ones(64, 64) * weights[0].detach()
    total = torch.zeros(())
    for number, weight in enumerate(weights):
        h = (h * weight).exp()
        look(3 * number)
        small = h[0, : (4, 16, 8)[number % 3] + (1 if number == larger else 0)].clone()
        look(3 * number + 1)
        total = total + small.exp().sum()
        look(3 * number + 2)
    return total + h.sum()


WEIGHTS, LOOKS = 4, 12


def frozen(weight: Tensor) -> Tensor:
    return torch.nn.Parameter(weight.detach().clone(), requires_grad=False)


def weights_of(seed: int = 1) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.nn.Parameter(torch.randn(64, 64, generator=generator) * 0.01) for _ in range(WEIGHTS)]


def train(offload: Offload, steps: int, look: Look = lambda number: None, **changes: int) -> None:
    weights = weights_of()
    for number in range(steps):
        with offload:
            loss = forward(weights, look if number == steps - 1 else lambda number: None, **changes)
        loss.backward()


def both(run: Callable[[Offload], list[Counted]]) -> None:
    """Asserts that a program sees the same numbers whether it follows a plan or not."""
    plain, following = make(False), make(True)
    expected, found = run(plain), run(following)
    assert found == expected
    assert following.step_plan() is not None or following.stats().followed_forwards > 0
    for offload in (plain, following):
        offload.close()


@pytest.mark.parametrize("when", range(LOOKS))
def test_stats_in_a_forward_have_all_that_was_saved(when: int) -> None:
    def run(offload: Offload) -> list[Counted]:
        found: list[Counted] = []
        train(offload, 4, lambda number: found.append(counted(offload.stats())) if number >= when else None)
        return [*found, counted(offload.stats())]

    both(run)


@pytest.mark.parametrize("larger", range(WEIGHTS))
def test_what_differs_from_the_plan_is_counted_once(larger: int) -> None:
    def run(offload: Offload) -> list[Counted]:
        train(offload, 3)
        train(offload, 1, larger=larger)
        assert not offload.config.step_plans or sum(offload.stats().plan_misses.values()) == 1
        return [counted(offload.stats())]

    both(run)


class Fault(Exception):
    pass


def fail(_: Offload) -> None:
    raise Fault


def save_what_no_plan_can_say(_: Offload) -> None:
    with FakeTensorMode():
        torch.ones(4, requires_grad=True).exp()


def end_from_another_thread(offload: Offload) -> None:
    """As in a forked child, where the following ends without more ado."""
    for saves in offload._hooks._saves.values():
        saves.plans.after_fork()


@pytest.mark.parametrize("when", range(LOOKS))
@pytest.mark.parametrize(
    "act", [Offload.reset_stats, Offload.close, fail, save_what_no_plan_can_say, end_from_another_thread]
)
def test_what_was_saved_before_and_after_what_comes_between_is_counted_once(
    act: Callable[[Offload], None], when: int
) -> None:
    def run(offload: Offload) -> list[Counted]:
        with pytest.raises(Fault) if act is fail else nullcontext():
            train(offload, 4, lambda number: act(offload) if number == when else None)
        if act is save_what_no_plan_can_say and offload.config.step_plans:
            assert offload.stats().plan_misses == {"modes": 1}
        return [counted(offload.stats())]

    both(run)


def test_steps_in_one_context_are_counted() -> None:
    def run(offload: Offload) -> list[Counted]:
        weights = weights_of()
        train(offload, 3)
        with offload:
            for _ in range(4):
                forward(weights, lambda number: None).backward()
        return [counted(offload.stats())]

    both(run)


@pytest.mark.parametrize(
    ("first", "later"),
    [
        (lambda w: w[:32], lambda w: w[:16]),
        (lambda w: w[:32], lambda w: w[:32].detach()),
        (lambda w: w.view(64, 64), lambda w: w * 1),
        (lambda w: w[:1, :4].detach().clone(), lambda w: w[:1, :4].detach()),
        (lambda w: w[:1, :4].detach().clone().requires_grad_() * 1, lambda w: w[:1, :4].detach().clone()),
        (lambda w: w[:1, :4].detach().clone(), lambda w: Dissolving(w[:1, :4].detach().clone(), torch.ones(1), "")),
        (lambda w: w[:1, :4].detach().clone(), lambda w: w[:1, :4].detach().to_sparse()),
        (frozen, lambda w: frozen(w[:32])),
        (lambda w: w[:1, :4].detach().clone(), lambda w: torch.nn.Parameter(w.detach()[:1, :4], requires_grad=False)),
    ],
    ids=[
        *("a smaller part", "a constant", "a copy", "a part of what is larger", "of a constant", "of another class"),
        "without a storage",
        *("a smaller weight", "a weight that is a part of what is larger"),
    ],
)
def test_what_only_looks_like_what_has_stayed_is_counted_as_what_it_is(
    first: Callable[[Tensor], Tensor], later: Callable[[Tensor], Tensor]
) -> None:
    def run(offload: Offload) -> list[Counted]:
        weights = weights_of()
        for number in range(5):
            with offload:
                h = (torch.ones(64, 64) * weights[0]).exp()
                part = first(weights[1]) if number < 4 else later(weights[1])
                small = torch.ones_like(part, layout=torch.strided).requires_grad_() * part
                loss = h.sum() + small.sum()
            loss.backward()
        assert not offload.config.step_plans or sum(offload.stats().plan_misses.values()) == 1
        return [counted(offload.stats())]

    both(run)


def test_another_thread_looks_while_one_packs() -> None:
    offload, stop, seen = make(True), threading.Event(), []

    def look() -> None:
        while not stop.is_set():
            seen.append(offload.stats().saved_tensors)

    train(offload, 2)
    before, (expected, steps) = offload.stats().saved_tensors, (make(False), 50)
    thread = threading.Thread(target=look)
    thread.start()
    try:
        train(offload, steps)
    finally:
        stop.set()
        thread.join()
    train(expected, 1)
    assert offload.stats().saved_tensors == before + steps * expected.stats().saved_tensors
    assert seen == sorted(seen)
    assert offload.stats().followed_forwards > 40
    offload.close()
