"""The replay of a step on numbers, beside the library that runs that step on the simulated device."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import eager_offload as eo
from benchmarks.common import GIB
from benchmarks.peers import checkpointed
from eager_offload.core.budget import hidden, least_windows
from eager_offload.core.step_table import Fate, StepTable
from eager_offload.planning.simulate import StepSimulator
from tests.hazards.programs import assert_identical
from tests.planning.programs import CONFIG, Made, Stack, budget_of, gradients, planned, shared, slow, small, wide
from tests.planning.test_card import link
from tests.planning.test_card import planned as card_plan
from tests.simulation.stage import Stage

pytestmark = pytest.mark.usefixtures("one_thread")

#: By how much a replay may be off, of a step's time, and of its peak: one source more or less of these small models.
OFF, OFF_PEAK = 0.005, 0.01


class Convolutions(nn.Sequential):
    """With BatchNorm, which writes to the statistics that it has saved; (batch, 8, 16, 16) to a number."""

    def forward(self, x: Tensor) -> Any:
        return super().forward(x).square().mean()


def convolutions() -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    kinds = [(nn.Conv2d(8, 8, 3, 1, 1, bias=False), nn.BatchNorm2d(8), nn.ReLU(inplace=True)) for _ in range(6)]
    return Convolutions(*(layer for three in kinds for layer in three)), torch.randn(4, 8, 16, 16)


#: Each makes a model and what that is called with.
MODELS: dict[str, Callable[[], tuple[nn.Module, Any]]] = {
    "stack": wide,
    "long stack": lambda: (Stack(4, 32, 4, 2, 64), wide()[1].repeat(2, 1)),
    "shared": shared,
    "convolutions": convolutions,
}


def moved_by(table: StepTable, plan: eo.Plan) -> tuple[bool, ...]:
    """Of each storage of ``plan``, whether a step has moved it that went by ``table``."""
    program = plan.problem.program
    saves = [save for save in program.saves if save.reason is None]
    assert [row.nbytes for row in table.rows] == [save.nbytes for save in saves], "what is saved was foreseen"
    first = {save.storage: row.fate for save, row in reversed([*zip(saves, table.rows, strict=True)])}
    return tuple(first[number] is Fate.MOVE for number in range(len(program.storages)))


@pytest.mark.parametrize(
    ("name", "launch", "rate"),
    [
        *((name, 0.0, 5e7) for name in MODELS),  # a host that computes itself, behind a slow link
        *(pytest.param(name, 1e-5, 1e9, marks=pytest.mark.long) for name in MODELS),  # one that runs ahead
    ],
)
def test_a_replay_takes_the_time_and_the_memory_of_the_library(name: str, launch: float, rate: float) -> None:
    machine = slow(out=rate, back=rate, launch_seconds=launch)
    planned = partial(eo.plan, *MODELS[name](), device=machine, config={"min_bytes": "1KiB"})
    least, most = planned(device_budget=1).least_budget, planned().peak_bytes
    # What a trace has not seen of the model's own: tested where traces are.
    model, inputs = MODELS[name]()
    given = inputs if isinstance(inputs, tuple) else (inputs,)
    unseen = Stage(machine).step(eo.Offload(enabled=False), model, inputs, partial(model, *given)).peak_bytes - most
    moved = 0
    for part in (0.1, 0.5):
        plan = planned(device_budget=int(least + part * (most - least)))
        model, stage = MODELS[name]()[0], Stage(machine)
        offload = stage.offload(plan=plan)
        for _ in range(4):
            step = stage.step(offload, model, inputs, partial(model, *given))
        table = offload.step_table()
        offload.close()
        assert (offload.stats(synchronize=True).bytes_out > 0) == (plan.moved_bytes > 0)
        assert table is not None
        found = StepSimulator(plan.problem).run(moved_by(table, plan))
        assert step.seconds == pytest.approx(found.step_seconds, rel=OFF)
        assert step.peak_bytes == pytest.approx(found.peak_bytes + unseen, rel=OFF_PEAK)
        moved += plan.moved_bytes
    assert moved > 0


def test_so_it_does_where_modules_are_computed_again() -> None:
    machine = slow(out=3e7, back=3e7, launch_seconds=1e-5)
    plan = planned(device=machine, device_budget=budget_of(machine, wide, 0.3), recompute=True)
    assert plan.again
    assert plan.moved_bytes > 0
    assert any(plan.kept)
    (model, x), stage = wide(), Stage(machine)
    expected = gradients(model, lambda: model(x))[1:]
    with plan.apply(model):
        offload = stage.offload(plan=plan)
        for _ in range(6):
            step = stage.step(offload, model, x, lambda: model(x))
            assert_identical(expected, [one.grad for one in model.parameters()])
        table = offload.step_table()
        offload.close()
    assert table is not None
    found = StepSimulator(plan.problem).run(moved_by(table, plan))
    assert found.moved_bytes > 0
    # By more than one storage, of 65,536 bytes, the controller and the plan do not differ.
    for outcome, peak, seconds in ((found, OFF_PEAK, OFF), (plan, 0.08, 0.05)):
        assert step.peak_bytes == pytest.approx(outcome.peak_bytes, rel=peak)
        assert step.seconds == pytest.approx(outcome.step_seconds, rel=seconds)


@pytest.mark.parametrize("made", [small, wide, shared])
def test_the_peak_where_nothing_moves_is_the_most_bytes_that_live_in_a_real_step(made: Made) -> None:
    model, x = made()
    plan = eo.plan(model, x, device=slow(), config={"min_bytes": "1KiB"}, optimizer=None)
    step = Stage(slow()).step(eo.Offload(enabled=False), model, x, lambda: model(x))
    assert plan.moved_bytes == 0
    assert step.peak_bytes == plan.peak_bytes
    assert plan.step_seconds == pytest.approx(step.seconds)


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


def test_a_step_that_no_plan_can_say_has_a_peak_all_the_same() -> None:
    class Twice(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            inner = super().forward(x).exp()
            (slope,) = torch.autograd.grad(inner.sum(), self.weight, retain_graph=True)
            return inner.sum() + slope.detach().sum()

    for config in (CONFIG, {"min_bytes": "1KiB", "prefetch_bytes": 0}):
        for model in (Twice(64, 64), Penalty()):
            plan = eo.plan(model, torch.randn(64, 64), device=slow(), policy="max", config=config)
            assert plan.peak_bytes > 0
            eo.Offload(plan=plan).close()


@pytest.mark.parametrize("name", [name for name in MODELS if name != "shared"])
def test_what_a_link_hides_costs_a_step_next_to_nothing(name: str) -> None:
    for rate in (3e7, 2e8, 1e9):
        machine = slow(out=rate, back=rate, launch_seconds=0.0)
        problem = eo.plan(*MODELS[name](), device=machine, policy="max", config={"min_bytes": "1KiB"}).problem
        found, most = (
            StepSimulator(problem).run(tuple(hidden(problem.timeline))),
            (True,) * len(problem.program.storages),
        )
        assert found.step_seconds <= 1.03 * problem.compute_seconds
        assert found.moved_bytes > 0 or StepSimulator(problem).run(most).step_seconds > 1.03 * problem.compute_seconds


@pytest.mark.long
def test_inputs_of_checkpointed_blocks_leave_in_the_least_windows() -> None:
    out, back = link(1)
    row = {"length": 32_768, "stats": {"max_inflight_bytes": 512 << 20, "prefetch_bytes": 512 << 20}}
    machine = replace(eo.plan(nn.Linear(1, 1), torch.ones(1, 1), device="h100").machine, out=out, back=back)
    problem = card_plan(checkpointed, machine, row).problem
    least = least_windows(problem.timeline)
    assert least is not None
    assert len(least.exempt) == 1  # the logits
    replay = StepSimulator(problem)
    moves = tuple(number not in least.exempt for number in range(len(problem.program.storages)))
    large, small = replay.part(1.0), replay.run(moves, replace(problem, window=least.window, ahead=least.ahead))
    assert large.peak_bytes > 13.2 * GIB
    assert small.peak_bytes <= 12.3 * GIB
    assert small.step_seconds <= large.step_seconds
    assert small.moved_bytes == 16 * 128 << 20
