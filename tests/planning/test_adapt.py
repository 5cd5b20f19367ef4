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
        others: bytes that no planner knows of, on a device that remembers the most that was in use, as an allocator
            does; without them nobody knows.
    """

    def __init__(self, plan: eo.Plan, others: int = 0, machine: eo.Machine = MACHINE, jitter: float = 0.0) -> None:
        self.model, self.x = wide()
        self.stage, self.steps = Stage(machine, jitter), list[Step]()
        self._others, self._observer = others, None
        if others:
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
        there = self._others + sum(one.nbytes for one in (*self.model.parameters(), self.x))
        return DeviceMemory(resident + there, peak + there)

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


def test_above_the_budget_less_stays_from_the_seventeenth_forward_on(half: eo.Plan) -> None:
    training = Training(half, (half.device_budget - half.least_budget) // 2)
    assert min(step.peak_bytes for step in training.train(16)) > half.device_budget
    assert training.offload.step_plan() == half.step_plans[0]
    stats, outcome = training.stats()
    assert outcome.peak_bytes is not None
    moved = stats.bytes_out // 16
    peak = max(step.peak_bytes for step in training.train(20))
    assert peak <= half.device_budget
    stats, outcome = training.stats()
    assert stats.demotions == {"over_budget": 1}
    assert (stats.bytes_out - 16 * moved) // 20 > moved
    assert outcome.predicted_peak_bytes == pytest.approx(peak, rel=0.02), "of the plan that is followed now"
    assert outcome.predicted_step_seconds > half.step_seconds
    training.offload.close()


# -- times ------------------------------------------------------------------------------------------------------------


def other(compute: float, out: float = 1.0, back: float = 1.0) -> eo.Machine:
    """As fast as that, where the planner believes in 1."""
    rates = {name: getattr(MACHINE, name) * compute for name in ("flops", "single_flops", "memory")}
    return replace(MACHINE, out=MACHINE.out * out, back=MACHINE.back * back, **rates)


@pytest.mark.long
@pytest.mark.parametrize(
    ("policy", "real"),
    [("least", other(1.3, 0.8, 1.2)), ("free", other(0.7))],
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
