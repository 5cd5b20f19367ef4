"""A budget of the tier: what finds no room there stays, in the decision, in the rehearsal and in training."""

from __future__ import annotations

import itertools
import warnings
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import eager_offload as eo
from eager_offload.planning.command import main
from eager_offload.planning.predict import Problem
from eager_offload.planning.solve import Solver
from tests.hazards.programs import assert_identical
from tests.planning.programs import CONFIG, chain, followed, gradients, planned, problems, slow, wide
from tests.simulation.stage import Stage

pytestmark = pytest.mark.usefixtures("one_thread")

KIB = 1 << 10


def scaled(problem: Problem) -> Problem:
    """``problem`` with pages in place of bytes, and storages that leave as a whole."""
    page, program = 4096, problem.program
    storages = tuple(one._replace(nbytes=one.nbytes * page, moved_bytes=one.nbytes * page) for one in program.storages)
    other = tuple(nbytes * page for nbytes in program.other_bytes)
    return replace(
        problem,
        program=replace(program, storages=storages, other_bytes=other),
        out=problem.out * page,
        back=problem.back * page,
        window=problem.window * page,
        ahead=problem.ahead * page,
    )


@settings(max_examples=25, derandomize=True, deadline=None, database=None)
@given(problems(6), st.floats(0, 1))
def test_a_decision_keeps_to_it_and_is_near_the_best_of_all_that_do(problem: Problem, part: float) -> None:
    problem = scaled(problem)
    count = len(problem.program.storages)
    problem = replace(problem, room=int(part * problem.tier_bytes((True,) * count)))
    assert problem.room is not None
    decisions = itertools.product((False, True), repeat=count)
    every = [problem.predict(moves) for moves in decisions if problem.tier_bytes(moves) <= problem.room]
    solver = Solver(problem)
    least, most = min(one.peak_bytes for one in every), max(one.peak_bytes for one in every)
    assert solver.least.prediction.peak_bytes <= 1.02 * least
    for decision in (solver.least, solver.all(), solver.free(), solver.within(0)):
        assert problem.tier_bytes(decision.moves) <= problem.room
    for budget in (least + (most - least) // 2, most):
        decision = solver.within(budget)
        assert problem.tier_bytes(decision.moves) <= problem.room
        if decision.prediction.peak_bytes <= budget:
            best = min(one.step_seconds for one in every if one.peak_bytes <= budget)
            assert decision.prediction.step_seconds <= 1.02 * best
        else:
            assert decision.prediction == solver.least.prediction


def test_what_finds_no_room_stays_and_training_keeps_to_it_on_the_simulated_device() -> None:
    model, x = wide()
    free = planned(policy="max")
    assert (free.host_budget, free.problem.room) == (None, None)
    assert planned(policy="max", host_budget="auto").host_budget is None
    with pytest.raises(eo.ConfigError, match="host_budget=0 is not accepted"):
        planned(policy="max", host_budget=0)
    budget = free.host_bytes // 2
    plan = planned(policy="max", host_budget=budget)
    assert 0.7 * budget < plan.host_bytes <= budget == plan.host_budget == plan.config.host_budget
    assert plan.moved_bytes < free.moved_bytes
    assert plan.moved_bytes + plan.kept_bytes == free.moved_bytes + free.kept_bytes
    assert plan.least_budget > free.least_budget, "what has no room in the tier has to have it on the device"
    assert plan.peak_bytes > free.peak_bytes
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # of what finds no room
        steps, stats = followed(Stage(slow()), plan, model, x, 3)
    for step in steps[1:]:
        assert plan.peak_bytes == pytest.approx(step.peak_bytes, rel=0.02)
    assert 0 < stats.host_bytes_peak <= budget


def test_gradients_are_exact_within_it(tmp_path: Path) -> None:
    model, x = wide()
    plan = planned(policy="max", host_budget="512KiB")
    expected = gradients(model, lambda: model(x))
    offload = eo.Offload(plan=plan, tier="disk", disk_path=tmp_path)
    assert_identical(expected, gradients(model, lambda: model(x), offload))
    stats = offload.stats(synchronize=True)
    assert stats.followed_forwards == 1
    assert 0 < stats.bytes_out == stats.disk_bytes_peak <= 512 * KIB
    offload.close()


def test_what_is_saved_in_parts_has_its_room_in_any_case() -> None:
    """Each step decides anew about these."""
    problem = scaled(chain([3, 1, 2]))
    first, *others = problem.program.storages
    part = first._replace(moved_bytes=4096)
    problem = replace(problem, program=replace(problem.program, storages=(part, *others)), room=3 * 4096)
    assert problem.tier_bytes((False,) * 3) == 4096
    assert problem.within_room((True, True, True)) == (True, True, False), "the newest stays"
    assert problem.within_room((False, True, True)) == (False, True, False)
    assert problem.within_room((True, False, True)) == (True, False, True)
    assert replace(problem, room=0).within_room((True, True, True)) == (True, False, False)


def test_modules_that_are_computed_again_make_room() -> None:
    model, x = wide()
    free = planned()
    budget = free.least_budget + (free.peak_bytes - free.least_budget) // 8
    given = {"device": slow(), "device_budget": budget, "config": CONFIG, "recompute": True}
    plan = eo.plan(model, x, host_budget="64KiB", **given)  # type: ignore[arg-type]
    assert plan.host_bytes <= 64 * KIB
    assert plan.again


def test_it_is_among_the_settings_and_said(capsys: pytest.CaptureFixture[str]) -> None:
    model, x = wide()
    plan = eo.plan(model, x, device=slow(), policy="max", config={**CONFIG, "host_budget": "512KiB"})
    assert plan.host_budget == 512 * KIB
    assert f"in the tier: {plan.host_bytes / KIB:.1f} KiB, where 512.0 KiB may rest" in str(plan)
    given = eo.plan(model, x, device=slow(), host_budget="1MiB", config={**CONFIG, "host_budget": "512KiB"})
    assert given.host_budget == 1 << 20, "what is given here comes first"
    for offload in (eo.Offload(plan=plan), eo.Offload(plan=plan, config={"verify": True})):
        assert offload.config.host_budget == 512 * KIB
    model_of = "tests.planning.models_of_a_user:two_blocks"
    assert main([model_of, "--device", "a100", "--policy", "max", "--host-budget", "1GiB"]) == 0
    assert "where 1.0 GiB may rest" in capsys.readouterr().out
    assert "in the tier" not in str(planned())
