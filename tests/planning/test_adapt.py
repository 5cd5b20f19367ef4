"""A computed plan that is followed adapts to measured peaks: it keeps less, or what makes steps shorter."""

from __future__ import annotations

import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import eager_offload as eo
from eager_offload.planning.decide import RehearsedSolver
from eager_offload.runtime.base import DeviceMemory
from eager_offload.runtime.host import host_runtime
from tests.hazards.programs import assert_identical
from tests.planning.programs import budget_of, gradients, planned, slow, wide
from tests.planning.test_peaks import storages
from tests.simulation.stage import Stage, Step

pytestmark = pytest.mark.usefixtures("one_thread")

MACHINE = slow(out=1e8, back=1e8)


@pytest.fixture(scope="module")
def half() -> eo.Plan:
    return planned(device=MACHINE, device_budget=budget_of(MACHINE, wide, 0.5))


class Remembering:
    """A simulated device that remembers the most that was in use, as the allocator of an accelerator does."""

    def __init__(self, plan: eo.Plan, others: int = 0) -> None:
        self.model, self.x = wide()
        #: Bytes that no planner knows of.
        self.others = others
        self.stage = Stage(MACHINE)
        self.observer: Any = None
        self._attach = self.stage.runtime.attach
        self.stage.runtime.attach = self.attach  # type: ignore[method-assign]
        self.stage.runtime.memory = self.memory  # type: ignore[method-assign]
        self.offload = self.stage.offload(plan=plan)
        self.steps: list[Step] = []
        self._expected = gradients(self.model, lambda: self.model(self.x))[1:]

    def attach(self, log: Any, observer: Any) -> None:
        self.observer = observer
        self._attach(log, observer)

    def memory(self, device: torch.device) -> DeviceMemory:
        there = sum(one.nbytes() for one in storages([*self.model.parameters(), self.x]).values()) + self.others
        if self.observer is None:
            return DeviceMemory(there, there)
        return DeviceMemory(self.observer.resident_bytes + there, self.observer.peak_resident_bytes + there)

    def train(self, steps: int) -> list[int]:
        """The peaks of so many steps, each of which has the gradients that there are without offload."""
        for _ in range(steps):
            step = self.stage.step(self.offload, self.model, self.x, lambda: self.model(self.x))
            assert_identical(self._expected, [one.grad for one in self.model.parameters() if one.grad is not None])
            self.steps.append(step._replace(peak_bytes=step.peak_bytes + self.others))
        return [step.peak_bytes for step in self.steps[-steps:]]

    @property
    def seconds(self) -> float:
        """Of the last step."""
        return self.steps[-1].seconds


class UsedMoreBefore(Remembering):
    """The user has used more of it before, so that its record does not grow."""

    def memory(self, device: torch.device) -> DeviceMemory:
        return DeviceMemory(super().memory(device).used, 1 << 40)


@pytest.mark.parametrize("kind", [Remembering, pytest.param(UsedMoreBefore, marks=pytest.mark.long)])
def test_above_the_budget_less_stays_from_the_seventeenth_forward_on(half: eo.Plan, kind: type[Remembering]) -> None:
    others = (half.device_budget - half.least_budget) // 2
    device = kind(half, others)
    before = device.train(16)
    assert min(before) > half.device_budget
    assert device.offload.step_plan() == half.step_plans[0]
    stats = device.offload.stats()
    assert stats.demotions == {"over_budget": 1}
    assert stats.plan is not None
    assert (stats.plan.peak_bytes is None) == (kind is UsedMoreBefore), "the record says nothing"
    moved = device.offload.stats(synchronize=True).bytes_out // 16
    after = device.train(20)
    assert max(after) <= half.device_budget
    stats = device.offload.stats(synchronize=True)
    assert (stats.followed_forwards, stats.plan_misses) == (36, {}), "from the next step on"
    assert stats.demotions == {"over_budget": 1}
    assert (stats.bytes_out - 16 * moved) // 20 > moved > 0
    assert stats.plan is not None
    assert stats.plan.predicted_peak_bytes == pytest.approx(max(after), rel=0.02), "of the plan that is followed now"
    assert stats.plan.predicted_step_seconds > half.step_seconds
    device.offload.close()


def test_where_less_is_in_use_than_was_predicted_more_stays_if_the_step_gets_shorter(half: eo.Plan) -> None:
    unknown = 128 << 10
    budget = half.device_budget
    pessimist = planned(device=MACHINE, device_budget=budget, optimizer_bytes=unknown)
    assert pessimist.moved_bytes > half.moved_bytes
    device = Remembering(pessimist)
    device.train(16)
    before = device.seconds
    peaks = device.train(4)
    assert device.seconds < 0.98 * before
    assert max(peaks) <= budget
    stats = device.offload.stats(synchronize=True)
    assert (stats.followed_forwards, stats.demotions) == (20, {})
    assert stats.plan is not None
    assert stats.plan.predicted_step_seconds == pytest.approx(half.step_seconds, rel=0.02)
    device.offload.close()


def solved(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The budgets that are solved for from here on."""
    found: list[int] = []
    within = RehearsedSolver.within

    def noted(solver: RehearsedSolver, budget: int) -> object:
        found.append(budget)
        return within(solver, budget)

    monkeypatch.setattr(RehearsedSolver, "within", noted)
    return found


@pytest.mark.long
@pytest.mark.parametrize("kind", [Remembering, UsedMoreBefore])
def test_a_plan_of_the_right_times_and_peak_is_not_made_anew(
    half: eo.Plan, kind: type[Remembering], monkeypatch: pytest.MonkeyPatch
) -> None:
    device, made = kind(half), solved(monkeypatch)
    device.train(34)
    assert made == []
    assert device.offload.step_plan() == half.step_plans[0]
    assert device.offload.stats().demotions == {}
    assert device.offload.stats(synchronize=True).bytes_out > 0
    device.offload.close()


@pytest.mark.long
def test_where_nothing_takes_less_training_goes_on(half: eo.Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = planned(device=MACHINE, device_budget=half.least_budget)
    device = Remembering(plan, 64 << 10)
    made = solved(monkeypatch)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        device.train(33)
    assert len(made) == 1, "and not after the second look, since that was in vain"
    stats = device.offload.stats(synchronize=True)
    assert stats.demotions == {"over_budget": 2}
    assert stats.followed_forwards == 33
    assert stats.bytes_out > 0
    device.offload.close()


def test_an_error_of_the_planner_changes_nothing(half: eo.Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise MemoryError

    device = Remembering(half, half.device_budget // 8)
    monkeypatch.setattr(RehearsedSolver, "within", fail)
    device.train(20)
    assert device.offload.stats().followed_forwards == 20
    assert device.offload.step_plan() == half.step_plans[0]
    assert device.offload.stats().demotions == {"over_budget": 1}
    device.offload.close()


def test_a_plan_with_checkpoints_keeps_them(half: eo.Plan) -> None:
    budget = half.least_budget + (half.device_budget - half.least_budget) // 4
    plan = planned(device=MACHINE, device_budget=budget, recompute=True)
    assert plan.again
    adapted = plan.adapted(16 << 10)
    assert adapted is not None
    assert adapted.plan.again == plan.again
    assert adapted.plan.peak_bytes < plan.peak_bytes + (16 << 10)
    assert adapted.plan.least_budget == plan.least_budget + (16 << 10)


class Process(Remembering):
    """A device whose memory is that of a process: it has much besides, and in a step so many ``others`` more."""

    def memory(self, device: torch.device) -> DeviceMemory:
        resident = 0 if self.observer is None else self.observer.resident_bytes
        return DeviceMemory((1 << 40) + resident + (self.others if resident else 0))


def test_on_a_cpu_it_is_held_to_its_budget_by_what_the_process_grows_by(half: eo.Plan) -> None:
    others = 256 << 20
    device = Process(half, others)
    device.train(17)
    stats = device.offload.stats(synchronize=True)
    assert stats.demotions == {"over_budget": 1}
    assert stats.plan is not None
    assert stats.plan.predicted_peak_bytes == pytest.approx(half.least_budget + others, rel=0.02), (
        "made anew: all moves"
    )
    moved = stats.bytes_out
    device.train(14)
    after = device.offload.stats(synchronize=True)
    assert after.bytes_out - moved > moved * 14 // 17, "more than before"
    assert (after.followed_forwards, after.plan_misses) == (31, {})
    device.offload.close()


def test_on_a_cpu_what_a_process_takes_for_itself_changes_nothing(half: eo.Plan) -> None:
    others = 32 << 20
    device = Process(half, others)
    device.train(18)
    stats = device.offload.stats(synchronize=True)
    assert (stats.followed_forwards, stats.demotions) == (18, {})
    assert stats.bytes_out > 0
    assert stats.plan is not None
    assert stats.plan.predicted_peak_bytes == half.peak_bytes
    assert stats.plan.peak_bytes is not None
    assert stats.plan.peak_bytes == pytest.approx(half.peak_bytes + others, rel=0.02)
    device.offload.close()


def test_threads_adapt_it_once(half: eo.Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = wide()
    offload, made = eo.Offload(plan=half, tier="disk", disk_path=tmp_path), solved(monkeypatch)
    expected = gradients(model, lambda: model(x))
    used = iter(range(1 << 30, 1 << 40))
    runtime = host_runtime()
    monkeypatch.setattr(runtime, "memory", lambda device: DeviceMemory(0, next(used)))

    def train(_: int) -> None:
        torch.set_num_threads(1)
        for _ in range(12):
            assert_identical(expected, gradients_apart(model, x, offload))

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(train, range(2)))
    stats = offload.stats(synchronize=True)
    assert stats.demotions["over_budget"] == 1
    assert len(made) <= 5, "one request, and what it revises"
    assert stats.bytes_out > 0
    offload.close()


def gradients_apart(model: nn.Module, x: Tensor, offload: eo.Offload) -> list[Tensor]:
    """Gradients that no other thread adds to."""
    with offload:
        loss = model(x)
    return [loss.detach(), *torch.autograd.grad(loss, list(model.parameters()))]
