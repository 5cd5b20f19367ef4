"""A plan learns from training: what operators take, and how fast the link is."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import eager_offload as eo
from eager_offload.computed_plan import Stretch, Timing
from eager_offload.machine import Machine
from eager_offload.planning.draft import timed
from tests.hazards.programs import assert_identical
from tests.planning.programs import gradients, planned, wide
from tests.planning.test_adapt import MACHINE, half
from tests.simulation.stage import Stage

pytestmark = pytest.mark.usefixtures("one_thread")

__all__ = ["half"]


def other(compute: float, out: float = 1.0, back: float = 1.0) -> Machine:
    """As fast as that, where the planner believes in 1."""
    return replace(
        MACHINE,
        flops=MACHINE.flops * compute,
        single_flops=MACHINE.single_flops * compute,
        memory=MACHINE.memory * compute,
        out=MACHINE.out * out,
        back=MACHINE.back * back,
    )


def plan_for(machine: Machine, budget: int, policy: str = "least") -> eo.Plan:
    return planned(device=machine, device_budget=budget, policy=policy)


@pytest.mark.sampled(5, quick=True)
@pytest.mark.parametrize(
    ("policy", "real"),
    [
        ("least", other(0.7)),
        ("least", other(1.3, 0.8, 1.2)),
        ("least", other(1.0, 0.2, 0.4)),
        ("free", other(0.7)),
        ("free", other(1.3)),
    ],
    ids=str,
)
def test_after_16_forwards_the_plan_is_that_of_the_machine_that_is_there(
    half: eo.Plan, policy: str, real: Machine
) -> None:
    believed, known = (plan_for(one, half.device_budget, policy) for one in (MACHINE, real))
    model, x = wide()
    stage = Stage(real, jitter=0.1)
    offload, expected = stage.offload(plan=believed), gradients(model, lambda: model(x))
    steps = []
    for _ in range(24):
        steps.append(stage.step(offload, model, x, lambda: model(x)))
        assert_identical(expected[1:], [one.grad for one in model.parameters() if one.grad is not None])
    stats = offload.stats(synchronize=True)
    assert (stats.followed_forwards, stats.plan_misses) == (24, {})
    assert stats.bytes_out > 0
    assert stats.plan is not None
    before, after = ([one.seconds for one in steps[part]] for part in (slice(8, 16), slice(16, 24)))
    mean, mean_before = sum(after) / 8, sum(before) / 8
    assert abs(believed.step_seconds / mean_before - 1) > 0.05, "what was believed is wrong"
    assert stats.plan.predicted_step_seconds == pytest.approx(mean, rel=0.03)
    assert mean <= 1.03 * known.step_seconds, "as good as the plan that knows"
    assert mean <= 1.03 * mean_before
    if policy == "least":
        assert max(one.peak_bytes for one in steps[16:]) <= half.device_budget
    else:
        now, (wanted,) = offload.step_plan(), known.step_plans
        assert now is not None
        assert sum(now.slots) == sum(wanted.slots)
    offload.close()


def test_where_no_other_storages_would_do_better_the_same_move_and_more_is_expected(half: eo.Plan) -> None:
    problem = half.problem
    (step,) = half.step_plans
    asks = [one.save for one in step.asks]
    program = problem.program
    first = next(ask.op for ask in program.asks if ask.save == asks[0])
    timing = Timing((Stretch(0, False, 0.0), Stretch(asks[0], True, 2 * problem.begins[first])), 0.0, None, None)
    found = timed(problem, (False,) * len(problem.program.storages), timing)
    assert found.op_seconds == pytest.approx([2 * one for one in problem.op_seconds])
    assert (found.out, found.back) == (problem.out, problem.back)
    nothing = plan_for(MACHINE, 1 << 40)
    assert nothing.moved_bytes == 0
    adapted = nothing.adapted(0, timing)
    assert adapted is not None
    assert not adapted.is_other
    assert adapted.plan.step_plans == nothing.step_plans
    assert adapted.plan.step_seconds == pytest.approx(2 * nothing.step_seconds)
    assert nothing.adapted(0) is None


def test_a_step_that_another_forward_comes_between_is_not_measured(half: eo.Plan) -> None:
    """Two forwards, then two backwards: the library cannot tell whose time it was."""
    model, x = wide()
    stage = Stage(other(0.5))
    everything = plan_for(MACHINE, half.device_budget, "max")
    offload = stage.offload(plan=everything)
    expected = gradients(model, lambda: model(x))
    for _ in range(12):
        losses = []
        for _ in range(2):
            with offload:
                losses.append(model(x))
        for loss in losses:
            assert_identical(expected[1:], [*torch.autograd.grad(loss, list(model.parameters()))])
    stats = offload.stats(synchronize=True)
    assert stats.bytes_out > 0
    assert stats.plan is not None
    assert stats.followed_forwards > 16
    assert stats.plan.predicted_step_seconds == everything.step_seconds
    offload.close()
