"""A prediction that training shows to be wrong is mended: the budget is held, and steps are no longer than they must.

The peak and the times are those of a simulated device that has other bytes, or other rates, than its plan believes.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import eager_offload as eo
from eager_offload.runtime.base import DeviceMemory
from eager_offload.stats import PlanOutcome
from tests.hazards.programs import assert_identical
from tests.planning.programs import budget_of, gradients, planned, slow, wide
from tests.simulation.stage import Stage, Step

pytestmark = pytest.mark.usefixtures("one_thread")

MACHINE = slow(out=1e8, back=1e8)


@pytest.fixture(scope="module")
def half() -> eo.Plan:
    return planned(device=MACHINE, device_budget=budget_of(MACHINE, wide, 0.5))


def plan_for(machine: eo.Machine, budget: int, policy: str = "least") -> eo.Plan:
    return planned(device=machine, device_budget=budget, policy=policy)


class Training:
    """Training by a plan on a simulated device.

    Args:
        memory: what there is: ``"remembered"``: the device remembers the most that was in use, as an allocator does;
            ``"used before"``: so it does, and more was in use before; ``"process"``: its memory is that of a process,
            which has much besides; ``""``: nobody knows.
        others: bytes that no planner knows of; of a process: those by which a step grows it.
    """

    def __init__(
        self, plan: eo.Plan, memory: str = "", others: int = 0, machine: eo.Machine = MACHINE, jitter: float = 0.0
    ) -> None:
        self.model, self.x = wide()
        self.stage, self.steps = Stage(machine, jitter), list[Step]()
        self._memory, self._others, self._observer = memory, others, None
        if memory:
            self._attach = self.stage.runtime.attach
            self.stage.runtime.attach = self._observed  # type: ignore[method-assign]
            self.stage.runtime.memory = self._used  # type: ignore[method-assign]
        self.offload = self.stage.offload(plan=plan)
        self._expected = gradients(self.model, lambda: self.model(self.x))[1:]

    def _observed(self, log: Any, observer: Any) -> None:
        self._observer = observer
        self._attach(log, observer)

    def _used(self, device: torch.device) -> DeviceMemory:
        resident, peak = 0, 0
        if self._observer is not None:
            resident, peak = self._observer.resident_bytes, self._observer.peak_resident_bytes
        if self._memory == "process":
            return DeviceMemory((1 << 40) + resident + (self._others if resident else 0))
        there = self._others + sum(one.nbytes for one in (*self.model.parameters(), self.x))
        return DeviceMemory(resident + there, 1 << 40 if self._memory == "used before" else peak + there)

    def train(self, steps: int) -> list[Step]:
        """So many steps, each of which has the gradients that there are without offload."""
        for _ in range(steps):
            step = self.stage.step(self.offload, self.model, self.x, lambda: self.model(self.x))
            assert_identical(self._expected, [one.grad for one in self.model.parameters()])
            self.steps.append(step._replace(peak_bytes=step.peak_bytes + self._others))
        return self.steps[-steps:]

    def stats(self) -> tuple[eo.OffloadStats, PlanOutcome]:
        """What was counted, of which all steps follow a plan, and what came of that."""
        stats = self.offload.stats(synchronize=True)
        assert (stats.followed_forwards, stats.plan_misses) == (len(self.steps), {})
        assert stats.bytes_out > 0
        assert stats.plan is not None
        return stats, stats.plan


# -- the peak ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("memory", ["remembered", pytest.param("used before", marks=pytest.mark.long)])
def test_above_the_budget_less_stays_from_the_seventeenth_forward_on(half: eo.Plan, memory: str) -> None:
    training = Training(half, memory, (half.device_budget - half.least_budget) // 2)
    assert min(step.peak_bytes for step in training.train(16)) > half.device_budget
    assert training.offload.step_plan() == half.step_plans[0]
    stats, outcome = training.stats()
    assert (outcome.peak_bytes is None) == (memory == "used before"), "the record says nothing"
    moved = stats.bytes_out // 16
    peak = max(step.peak_bytes for step in training.train(20))
    assert peak <= half.device_budget
    stats, outcome = training.stats()
    assert stats.demotions == {"over_budget": 1}
    assert (stats.bytes_out - 16 * moved) // 20 > moved
    assert outcome.predicted_peak_bytes == pytest.approx(peak, rel=0.02), "of the plan that is followed now"
    assert outcome.predicted_step_seconds > half.step_seconds
    training.offload.close()


def test_where_less_is_in_use_than_was_predicted_more_stays_if_the_step_gets_shorter(half: eo.Plan) -> None:
    pessimist = planned(device=MACHINE, device_budget=half.device_budget, optimizer_bytes=256 << 10)
    assert pessimist.moved_bytes > half.moved_bytes
    training = Training(pessimist, "remembered")
    before, after = training.train(16)[-1], training.train(4)
    assert after[-1].seconds < 0.98 * before.seconds
    assert max(step.peak_bytes for step in after) <= half.device_budget
    stats, outcome = training.stats()
    assert stats.demotions == {}
    assert outcome.predicted_step_seconds == pytest.approx(half.step_seconds, rel=0.02)
    training.offload.close()


def test_on_a_cpu_it_is_held_to_its_budget_by_what_the_process_grows_by(half: eo.Plan) -> None:
    others = 256 << 20
    training = Training(half, "process", others)
    training.train(17)
    stats, outcome = training.stats()
    assert stats.demotions == {"over_budget": 1}
    assert outcome.predicted_peak_bytes == pytest.approx(half.least_budget + others, rel=0.02), "made anew: all moves"
    moved = stats.bytes_out
    training.train(14)
    assert training.stats()[0].bytes_out - moved > moved * 14 // 17, "more than before"
    training.offload.close()


def test_on_a_cpu_what_a_process_takes_for_itself_changes_nothing(half: eo.Plan) -> None:
    training = Training(half, "process", others := 32 << 20)
    training.train(18)
    stats, outcome = training.stats()
    assert stats.demotions == {}
    assert outcome.predicted_peak_bytes == half.peak_bytes
    assert outcome.peak_bytes == pytest.approx(half.peak_bytes + others, rel=0.02)
    training.offload.close()


# -- times ------------------------------------------------------------------------------------------------------------


def other(compute: float, out: float = 1.0, back: float = 1.0) -> eo.Machine:
    """As fast as that, where the planner believes in 1."""
    rates = {name: getattr(MACHINE, name) * compute for name in ("flops", "single_flops", "memory")}
    return replace(MACHINE, out=MACHINE.out * out, back=MACHINE.back * back, **rates)


@pytest.mark.sampled(3, quick=True)
@pytest.mark.parametrize(
    ("policy", "real"),
    [("least", other(1.3, 0.8, 1.2)), ("least", other(1.0, 0.2, 0.4)), ("free", other(0.7))],
    ids=str,
)
def test_after_16_forwards_the_plan_is_that_of_the_machine_that_is_there(
    half: eo.Plan, policy: str, real: eo.Machine
) -> None:
    believed, known = (plan_for(one, half.device_budget, policy) for one in (MACHINE, real))
    training = Training(believed, machine=real, jitter=0.1)
    steps = training.train(24)
    _, outcome = training.stats()
    before, after = (sum(one.seconds for one in part) / 8 for part in (steps[8:16], steps[16:]))
    assert abs(believed.step_seconds / before - 1) > 0.05, "what was believed is wrong"
    assert outcome.predicted_step_seconds == pytest.approx(after, rel=0.03)
    assert after <= 1.03 * known.step_seconds, "as good as the plan that knows"
    assert after <= 1.03 * before
    if policy == "least":
        assert max(one.peak_bytes for one in steps[16:]) <= half.device_budget
    else:
        now = training.offload.step_plan()
        assert now is not None
        assert sum(now.slots) == sum(known.step_plans[0].slots)
    training.offload.close()
