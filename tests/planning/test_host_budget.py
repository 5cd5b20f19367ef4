"""A budget of the tier: what finds no room there stays, in the plan and in training."""

from __future__ import annotations

import pytest

import eager_offload as eo
from eager_offload.__main__ import main
from tests.planning.programs import CONFIG, budget_of, planned, simulated, slow, wide
from tests.simulation.stage import Stage

pytestmark = pytest.mark.usefixtures("one_thread")

KIB = 1 << 10


def test_what_finds_no_room_stays_and_training_keeps_to_it() -> None:
    free = planned(policy="max")
    assert free.host_budget is None
    assert planned(policy="max", host_budget="auto").host_budget is None
    budget = free.host_bytes // 2
    plan = planned(policy="max", host_budget=budget)
    assert 0.7 * budget < plan.host_bytes <= budget == plan.host_budget == plan.config.host_budget
    assert plan.moved_bytes < free.moved_bytes
    assert plan.moved_bytes + plan.kept_bytes == free.moved_bytes + free.kept_bytes
    assert plan.least_budget > free.least_budget, "what has no room in the tier has to have it on the device"
    assert plan.peak_bytes > free.peak_bytes
    with pytest.warns(RuntimeWarning, match="no room for"):
        steps, stats = simulated(Stage(slow()), plan, *wide(), 3)
    for step in steps[1:]:
        assert plan.peak_bytes == pytest.approx(step.peak_bytes, rel=0.05)
    assert 0 < stats.host_bytes_peak <= budget


def test_modules_that_are_computed_again_make_room() -> None:
    plan = planned(device_budget=budget_of(slow(), wide, 1 / 8), recompute=True, host_budget="64KiB")
    assert plan.host_bytes <= 64 * KIB
    assert plan.again


def test_it_is_among_the_settings_and_said(capsys: pytest.CaptureFixture[str]) -> None:
    config = {**CONFIG, "host_budget": "512KiB"}
    plan = planned(policy="max", config=config)
    assert plan.host_budget == 512 * KIB
    assert f"in the tier: {plan.host_bytes / KIB:.1f} KiB of at most 512.0 KiB" in str(plan)
    assert planned(host_budget="1MiB", config=config).host_budget == 1 << 20, "what is given here comes first"
    for offload in (eo.Offload(plan=plan), eo.Offload(plan=plan, config={"verify": True})):
        assert offload.config.host_budget == 512 * KIB
    model_of = "tests.planning.models_of_a_user:two_blocks"
    assert main(["plan", model_of, "--device", "a100", "--policy", "max", "--host-budget", "1GiB"]) == 0
    assert "of at most 1.0 GiB" in capsys.readouterr().out
    assert "in the tier" not in str(planned())
