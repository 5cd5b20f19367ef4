"""What a plan predicts is near what comes of it, and little more than what no plan goes below."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

import eager_offload as eo
from tests.planning.programs import (
    CONFIG,
    Made,
    Stack,
    budget_of,
    planned,
    shared,
    simulated,
    slow,
    small,
    wide,
)
from tests.simulation.stage import Stage

pytestmark = pytest.mark.usefixtures("one_thread")

#: A device whose host computes itself, and one whose host runs ahead.
HOSTS = pytest.mark.parametrize("launch", [0.0, 1e-5], ids=["together", "ahead"])
MODELS = pytest.mark.parametrize("made", [wide, shared])


# -- the peak ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("made", [small, wide, shared])
def test_the_peak_where_nothing_moves_is_the_most_bytes_that_live_in_a_real_step(made: Made) -> None:
    model, x = made()
    plan = eo.plan(model, x, device=slow(), config={"min_bytes": "1KiB"}, optimizer=None)
    step = Stage(slow()).step(eo.Offload(enabled=False), model, x, lambda: model(x))
    assert plan.moved_bytes == 0
    assert step.peak_bytes == plan.peak_bytes
    assert plan.step_seconds == pytest.approx(step.seconds)


# -- beside the simulated device --------------------------------------------------------------------------------------


@MODELS
@HOSTS
@pytest.mark.parametrize("part", ["all", 0.0, 0.3, 0.7])
def test_peak_and_step_are_near_what_was_predicted(made: Made, launch: float, part: float | str) -> None:
    """A plan says how much stays, and a step which of it."""
    machine = slow(out=1e8, back=1e8, launch_seconds=launch)
    moves = {"policy": "max"} if isinstance(part, str) else {"device_budget": budget_of(machine, made, part)}
    plan = planned(made, device=machine, **moves)
    steps, stats = simulated(Stage(machine), plan, *made(), 6)
    for step in steps[4:]:  # each learns from the one before what is late
        assert step.peak_bytes == pytest.approx(plan.peak_bytes, rel=0.05)
        assert step.seconds == pytest.approx(plan.step_seconds, rel=0.02)
        assert step.seconds >= sum(step.op_seconds) * (1 - 1e-9)
    assert stats.plan is not None
    assert stats.plan.step_seconds is not None
    longest = max(step.seconds for step in steps)
    assert 0.75 * plan.step_seconds < stats.plan.step_seconds <= longest, "less what comes after the last ask"


def test_so_they_are_where_modules_are_computed_again() -> None:
    machine = slow(out=3e7, back=3e7, launch_seconds=1e-5)
    plan = planned(device=machine, device_budget=budget_of(machine, wide, 0.2), recompute=True)
    assert plan.again
    assert plan.moved_bytes > 0
    model, x = wide()
    with plan.apply(model):
        steps, _ = simulated(Stage(machine), plan, model, x, 6)
    for step in steps[4:]:
        assert step.peak_bytes == pytest.approx(plan.peak_bytes, rel=0.05)
        assert step.seconds == pytest.approx(plan.step_seconds, rel=0.05)


@pytest.mark.parametrize("link", [0.8, 1.0, 1.2])
def test_a_step_over_another_link_takes_no_longer_than_if_compute_waited_for_all_that_is_slower(link: float) -> None:
    machine = slow(out=1e8, back=1e8, launch_seconds=1e-5)
    plan = planned(device=machine, policy="max")
    real = replace(machine, out=machine.out * link, back=machine.back * link)
    steps, _ = simulated(Stage(real, 0.3), plan, *wide(), 4)
    slower = max(1 / link - 1, 0) * 2 * plan.moved_bytes / machine.out
    assert max(step.seconds for step in steps) <= (plan.step_seconds + slower) * 1.1


# -- beside what no plan goes below, and other decisions --------------------------------------------------------------


def large() -> tuple[nn.Module, Tensor]:
    """What it saves is many times its windows."""
    return Stack(4, 32, 4, 2, 64), torch.empty(512, 32)


@pytest.mark.long
def test_a_step_is_near_what_no_order_of_the_least_transfers_goes_below() -> None:
    for rate, part in ((5e7, 0.5), (1e8, 0.25)):
        machine = slow(out=rate, back=rate)
        kept = planned(large, device=machine)
        budget = budget_of(machine, large, part)
        plan = planned(large, device=machine, device_budget=budget)
        assert plan.fits
        assert kept.peak_bytes - budget <= plan.moved_bytes <= 1.2 * (kept.peak_bytes - budget)
        assert kept.compute_seconds <= plan.floor_seconds <= plan.step_seconds <= 1.1 * plan.floor_seconds


# -- what a plan does not depend on -----------------------------------------------------------------------------------


def test_a_plan_heeds_nothing_of_its_caller_and_leaves_nothing_behind() -> None:
    model, x = wide()
    expected = eo.plan(model, x, device=slow(), policy="max", config=CONFIG)
    state, generator = torch.get_rng_state(), random.getstate()
    marked = eo.keep(torch.ones(4))  # of another program
    with torch.no_grad(), torch.device("meta"), torch.inference_mode():
        found = eo.plan(model, x, device=slow(), policy="max", config=CONFIG)
    assert found == expected
    assert torch.equal(state, torch.get_rng_state())
    assert generator == random.getstate()
    assert all(parameter.grad is None for parameter in model.parameters())
    del marked


def test_a_step_that_no_plan_can_say_has_a_peak_all_the_same() -> None:
    class Twice(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            inner = super().forward(x).exp()
            (slope,) = torch.autograd.grad(inner.sum(), self.weight, retain_graph=True)
            return inner.sum() + slope.detach().sum()

    for config in (CONFIG, {"min_bytes": "1KiB"}, {"min_bytes": "1KiB", "prefetch_bytes": 0}):
        for model in (Twice(64, 64), Penalty()):
            plan = eo.plan(model, torch.randn(64, 64), device=slow(), policy="max", config=config)
            assert plan.peak_bytes > 0
            eo.Offload(plan=plan).close()


class Penalty(nn.Module):
    """A backward inside of forward, whose gradients are differentiated."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        y = x = x.clone().requires_grad_()
        for layer in self.layers:
            y = y + layer(y)
        (slope,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        return y.sum() + slope.square().sum()
