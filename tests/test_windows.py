"""Automatic windows: of the last step's bytes, in force where a step begins, and said in the stats."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn

import eager_offload as eo
from tests.hazards.backends import assert_settled
from tests.hazards.programs import Around, assert_identical
from tests.simulation.simulated import SimulatedRuntime

KIB, MIB = 1 << 10, 1 << 20
FIRST = 64 * MIB
WITHOUT = nullcontext()
Make = Callable[..., eo.Offload]


def window_of(saves: int, nbytes: int) -> int:
    """Of a step that saves so many small tensors of so many bytes: four of them, an eighth, and at most a quarter."""
    return min(max(4 * nbytes, saves * nbytes // 8), saves * nbytes // 4)


def chain(saves: int, nbytes: int, around: Around = WITHOUT) -> object:
    """A step that saves so many storages of so many bytes."""
    x = torch.linspace(-1, 1, nbytes // 4).requires_grad_()
    with around:
        y = x * 1
        for _ in range(saves):
            y = y.sigmoid() * 2
        loss = y.sum()
    loss.backward()
    return loss.detach(), x.grad


def windows_of(offload: eo.Offload) -> tuple[int, int]:
    stats = offload.stats()
    return stats.max_inflight_bytes, stats.prefetch_bytes


@pytest.fixture
def offloads() -> Iterator[Make]:
    """Makes an ``Offload`` of small tensors that rest on a disk; all are settled and closed at the end."""
    made: list[eo.Offload] = []

    def make(**fields: Any) -> eo.Offload:
        made.append(eo.Offload(**{"tier": "disk", "min_bytes": 0, **fields}))
        return made[-1]

    yield make
    for offload in made:
        assert_settled(offload)
        offload.close()


@pytest.mark.parametrize("step_plans", [False, True])
def test_each_step_has_the_windows_that_the_one_before_it_asks_for(offloads: Make, step_plans: bool) -> None:
    offload, expected = offloads(step_plans=step_plans), FIRST
    kinds = [(12, 64 * KIB)] * 5 + [(40, 4 * KIB), (12, 64 * KIB), (40, 4 * KIB), (6, 256 * KIB), (12, 64 * KIB)]
    for kind in kinds:
        assert_identical(chain(*kind), chain(*kind, offload))
        assert windows_of(offload) == (expected, expected)
        expected = window_of(*kind)
    assert offload.stats(synchronize=True).bytes_out > 0
    assert "\nwindows    192.0 KiB on the way out, 192.0 KiB brought back early\n" not in str(offload.stats())
    chain(12, 64 * KIB, offload)
    assert "\nwindows    192.0 KiB on the way out, 192.0 KiB brought back early\n" in str(offload.stats())


def test_a_first_step_grows_with_the_largest_size_that_four_of_its_tensors_have(offloads: Make) -> None:
    offload, seen = offloads(keep_last_bytes=0), []
    y = torch.ones(8 * MIB // 4, requires_grad=True)
    with offload:
        for times in (1, 3, 1, 1, 1):  # of 8 MiB, then of 24
            y = y.repeat(times).sigmoid()
            seen.append(windows_of(offload))
    y.sum().backward()
    assert seen == [(FIRST, FIRST)] * 4 + [(96 * MIB, 96 * MIB)]
    assert offload.stats(synchronize=True).bytes_out >= 32 * MIB


def test_what_a_user_gives_stays_in_force(offloads: Make) -> None:
    offload, given = offloads(max_inflight_bytes="1MiB"), offloads(max_inflight_bytes="3MiB", prefetch_bytes=0)
    for window in (FIRST, window_of(12, 64 * KIB)):
        for one in (offload, given):
            chain(12, 64 * KIB, one)
        assert windows_of(offload) == (MIB, window)
        assert windows_of(given) == (3 * MIB, 0)
    offload.reset_stats()
    assert windows_of(offload) == (MIB, window)


def test_no_more_is_on_its_way_than_the_windows_hold() -> None:
    runtime = SimulatedRuntime(out_bandwidth=1e6, in_bandwidth=1e6)
    with runtime.checked() as checker:
        offload = eo.Offload(runtime=runtime, tier="host", min_bytes=0, step_plans=False)
        chain(12, 64 * KIB, offload)
        for _ in range(3):
            offload.reset_stats()
            chain(12, 64 * KIB, offload)
            stats = offload.stats(synchronize=True)
            assert 0 < stats.inflight_bytes_peak <= 192 * KIB
            assert stats.resident_bytes_peak <= 3 * 192 * KIB, "what is newest, on its way out and brought back early"
        assert_settled(offload)
        offload.close()
    checker.assert_clean()


def test_a_plan_has_the_windows_of_its_step_and_its_first_step_has_them() -> None:
    model = nn.Sequential(*(layer for _ in range(8) for layer in (nn.Linear(64, 64), nn.Tanh())))
    x = torch.randn(256, 64)
    plan = eo.plan(model, x, loss=lambda y: y.square().mean(), config={"min_bytes": 0, "tier": "disk"}, policy="max")
    window = window_of(plan.movable_bytes // (256 * 64 * 4), 256 * 64 * 4)
    assert (plan.config.max_inflight_bytes, plan.config.prefetch_bytes) == (window, window)
    offload = eo.Offload({"max_inflight_bytes": "auto"}, plan=plan)
    with offload:
        loss = model(x).square().mean()
    loss.backward()
    assert windows_of(offload) == (window, window)
    with pytest.raises(eo.ConfigError, match="max_inflight_bytes='7MiB' does not go with plan"):
        eo.Offload(plan=plan, max_inflight_bytes="7MiB")
    offload.close()
