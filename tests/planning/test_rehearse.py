"""What a plan predicts is what comes of it: the same step plan, the same peak and the same time as in training."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import eager_offload as eo
from eager_offload.planning.draft import draft
from eager_offload.planning.program import ProgramAsk, ProgramSave
from eager_offload.planning.rehearse import rehearse
from eager_offload.step_plan import Fate
from tests.planning.programs import CONFIG, budget_of, chain, followed, planned, problems, slow, wide
from tests.simulation.stage import Stage

pytestmark = pytest.mark.usefixtures("one_thread")

#: A device whose host computes itself, and one whose host runs ahead.
HOSTS = pytest.mark.parametrize("launch", [0.0, 1e-5], ids=["together", "ahead"])


class Shared(nn.Module):
    """Saves one mask in every layer, parts of storages, what is alive, integers and what is small."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(32, 64)
        self.layers = nn.ModuleList(nn.Linear(64, 192) for _ in range(3))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.words(tokens)
        mask = x.detach().abs().sqrt()
        for layer in self.layers:
            a, b, c = layer(x).chunk(3, -1)
            x = (a.sigmoid() * b.tanh() + c) * mask + x[:1].square().sum()
        return torch.nn.functional.cross_entropy(x.flatten(0, 1), tokens.flatten() + 0)


def shared() -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    return Shared(), torch.arange(256).remainder(32).view(4, 64)


MODELS = pytest.mark.parametrize("made", [wide, shared])


# -- rehearsal against the run ---------------------------------------------------------------------------------------


@pytest.mark.sampled(3, quick=True)
@MODELS
@HOSTS
@pytest.mark.parametrize("rate", [1e8, 1e10])
def test_the_step_plan_of_a_plan_is_that_of_training(
    made: Callable[[], tuple[nn.Module, Tensor]], launch: float, rate: float
) -> None:
    machine = slow(out=rate, back=rate, launch_seconds=launch)
    model, x = made()
    # What is saved again later waits until then where the window has room for that.
    fields = {**CONFIG, "max_inflight_bytes": "1MiB"}
    (planned,) = eo.plan(model, x, device=machine, policy="max", config=fields).step_plans
    stage = Stage(machine)
    offload = stage.offload(**fields, keep_last_bytes=0)
    for _ in range(4):
        stage.step(offload, model, x, lambda: model(x))
    trained = offload.step_plan()
    assert trained is not None
    assert trained == planned, "every number but when sources were seen to have gone"
    assert planned.totals.offloaded > 0
    assert {Fate.OFFLOAD, Fate.KEEP, Fate.SHARE} <= {save.fate for save in planned.saves}


@pytest.mark.parametrize("name", ["Llama", *(pytest.param(one, marks=pytest.mark.long) for one in ("GPT-2",))])
def test_the_step_plan_of_a_real_architecture_is_that_of_training(name: str) -> None:
    pytest.importorskip("transformers", reason="transformers is not installed")
    pytest.importorskip("peft", reason="peft is not installed")
    from tests.real_models.models import ARCHITECTURES

    torch.manual_seed(0)
    model, batch = ARCHITECTURES[name].build().train(), ARCHITECTURES[name].batch()
    fields = {"min_bytes": "1KiB", "max_inflight_bytes": "16MiB", "prefetch_bytes": "256KiB"}
    machine = slow(out=1e10, back=1e10)  # what is alive is seen to be once its copy is over
    plan = eo.plan(model, batch, device=machine, policy="max", config=fields)
    stage = Stage(machine)
    offload = stage.offload(**fields, keep_last_bytes=0)
    for _ in range(4):
        step = stage.step(offload, model, list(batch.values()), lambda: model(**batch).loss)
    trained = offload.step_plan()
    assert trained is not None
    assert (trained,) == plan.step_plans
    assert plan.peak_bytes == pytest.approx(step.peak_bytes, rel=0.02)
    assert plan.step_seconds == pytest.approx(step.seconds, rel=0.03)


@pytest.mark.sampled(5, quick=True)
@MODELS
@HOSTS
@pytest.mark.parametrize("part", [0.0, 0.3, 0.7])
def test_predicted_peak_and_step_are_those_of_the_run(
    made: Callable[[], tuple[nn.Module, Tensor]], launch: float, part: float
) -> None:
    machine = slow(out=1e8, back=1e8, launch_seconds=launch)
    model, x = made()
    plan = eo.plan(model, x, device=machine, device_budget=budget_of(machine, made, part), config=CONFIG)
    steps, stats = followed(Stage(machine), plan, model, x, 3)
    for step in steps:
        assert step.peak_bytes <= plan.device_budget
        assert plan.peak_bytes == pytest.approx(step.peak_bytes, rel=0.02)
        assert plan.step_seconds == pytest.approx(step.seconds, rel=0.03)
    assert stats.bytes_out == 3 * sum(plan.step_plans[0].slots)
    assert stats.plan is not None
    assert stats.plan.step_seconds is not None
    assert 0.75 * plan.step_seconds < stats.plan.step_seconds <= step.seconds, "less what comes after the last ask"


@pytest.mark.sampled(4, quick=True)
@pytest.mark.parametrize("link", [0.8, 1.0, 1.2])
@pytest.mark.parametrize("part", [0.0, 0.1, 0.5])
def test_budgets_hold_where_operators_and_links_take_other_times(link: float, part: float) -> None:
    machine = slow(out=1e8, back=1e8, launch_seconds=1e-5)
    model, x = wide()
    plan = planned(device=machine, device_budget=budget_of(machine, wide, part))
    assert plan.fits
    real = replace(machine, out=machine.out * link, back=machine.back * link)
    steps, _ = followed(Stage(real, 0.3), plan, model, x, 8)
    assert max(step.peak_bytes for step in steps) <= plan.device_budget
    if link == 1:
        assert sum(step.seconds for step in steps) / 8 == pytest.approx(plan.step_seconds, rel=0.03)
    else:  # no more than if compute waited for all that is slower, no less than if it never waited
        moved = 2 * plan.moved_bytes / machine.out
        assert plan.compute_seconds * 0.97 <= min(step.seconds for step in steps)
        assert max(step.seconds for step in steps) <= (plan.step_seconds + max(1 / link - 1, 0) * moved) * 1.1


# -- the rehearsal by itself ------------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=40)
@given(st.lists(st.integers(1, 1 << 16), min_size=2, max_size=8), st.data())
def test_a_chain_takes_what_it_keeps_and_no_less_than_its_compute(nbytes: list[int], data: st.DataObject) -> None:
    problem = saving(nbytes)
    moves = tuple(data.draw(st.booleans()) for _ in nbytes)
    plan = draft(problem, moves)
    assert plan is not None
    assert [save.fate for save in plan.saves] == [Fate.OFFLOAD if one else Fate.KEEP for one in moves]
    assert list(plan.slots) == [size for size, one in zip(nbytes, moves, strict=True) if one]
    found = rehearse(problem, plan)
    assert found is not None
    assert found.step_seconds >= problem.compute_seconds * (1 - 1e-9)
    kept = sum(size for size, one in zip(nbytes, moves, strict=True) if not one)
    assert kept <= found.peak_bytes <= sum(nbytes)
    assert {number for number, one in enumerate(moves) if one} >= {*found.returning}
    if not any(moves):
        assert (found.step_seconds, found.peak_bytes) == (pytest.approx(problem.compute_seconds), sum(nbytes))


def saving(nbytes: list[int], link: float = 1e5) -> Any:
    """A chain whose saves and asks are those of its storages."""
    problem = chain(nbytes, link=link)
    storages = problem.program.storages
    saves = tuple(
        ProgramSave(one.nbytes, True, None, number, one.nbytes, one.saved, number)
        for number, one in enumerate(storages)
    )
    asks = sorted((ProgramAsk(number, one.asked) for number, one in enumerate(storages)), key=lambda ask: ask.op)
    return replace(problem, program=replace(problem.program, saves=saves, asks=tuple(asks)))


def test_a_large_step_is_rehearsed_with_small_stand_ins() -> None:
    """By one factor: peak and time are those of the small one."""
    nbytes = [3 << 20, 1 << 20, 2 << 20, 4 << 20]
    small, large = saving(nbytes, 4e6), saving([one * 1024 for one in nbytes], 4e6)
    factor = 1024
    large = replace(
        large,
        out=small.out * factor,
        back=small.back * factor,
        window=small.window * factor,
        ahead=small.ahead * factor,
    )
    moves = (True, True, False, True)
    found = []
    for problem in (small, large):
        plan = draft(problem, moves)
        assert plan is not None
        rehearsed = rehearse(problem, plan)
        assert rehearsed is not None
        found.append(rehearsed)
    assert found[1].peak_bytes == pytest.approx(found[0].peak_bytes * factor, rel=1e-3)
    assert found[1].step_seconds == pytest.approx(found[0].step_seconds, rel=1e-3)
    assert found[1].returning == found[0].returning != ()


def test_a_rehearsal_leaves_nothing_behind_and_heeds_nothing_of_its_caller() -> None:
    model, x = wide()
    expected = eo.plan(model, x, device=slow(), policy="max", config=CONFIG)
    state, generator = torch.get_rng_state(), random.getstate()
    with torch.no_grad(), torch.device("meta"), torch.inference_mode():
        found = eo.plan(model, x, device=slow(), policy="max", config=CONFIG)
    assert found.problem.program == expected.problem.program, "nor does its trace"
    assert found.course == expected.course
    assert found.course.released is not None
    assert torch.equal(state, torch.get_rng_state())
    assert generator == random.getstate()
    assert all(parameter.grad is None for parameter in model.parameters())


def test_where_no_step_plan_can_say_it_there_is_none() -> None:
    class Twice(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            inner = super().forward(x).exp()
            (slope,) = torch.autograd.grad(inner.sum(), self.weight, retain_graph=True)
            return inner.sum() + slope.detach().sum()

    plan = eo.plan(Twice(64, 64), torch.randn(64, 64), device=slow(), policy="max", config=CONFIG)
    assert (plan.step_plans, plan.course.released) == ((), None)
    assert plan.peak_bytes > 0
    with pytest.warns(RuntimeWarning, match="has no step plan"):
        eo.Offload(plan=plan)


def test_a_mark_on_a_tensor_of_another_program_changes_no_plan() -> None:
    unmarked = planned(policy="max")
    marked = eo.keep(torch.ones(4))
    plan = planned(policy="max")
    assert plan.step_plans == unmarked.step_plans != ()
    del marked


@settings(deadline=None, max_examples=25)
@given(problems())
def test_programs_whose_saves_are_not_known_are_rehearsed_or_refused(problem: Any) -> None:
    assert draft(problem, (True,) * len(problem.program.storages)) is None, "nothing is asked for"
