"""A plan that knows nothing of the optimizer: once its states show in the allocator's peak, less stays."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor

import eager_offload as eo
from tests.virtual_device import NAME
from tests.virtual_device.on_device.test_device_budget import MIB, ROWS, WIDTH, WINDOW, Training

pytestmark = pytest.mark.usefixtures("one_thread")

CONFIG = {"tier": "host", "min_bytes": MIB // 8, "max_inflight_bytes": WINDOW, "prefetch_bytes": WINDOW}
MACHINE = eo.Machine("virtual", 1e12, 1e12, 1e12, 1e10, 1e10, 1 << 40, 5e-6)


def planned(training: Training, budget: int | None) -> eo.Plan:
    batch = torch.randn(ROWS, WIDTH)
    loss = Tensor.square
    return eo.plan(
        training.model, batch, loss=lambda y: loss(y).mean(), device=MACHINE, device_budget=budget, config=CONFIG
    )


class after_an_evaluation:
    """Uses more of the device before each forward, so that the record of the allocator does not grow."""

    def __init__(self, offload: eo.Offload) -> None:
        self._offload = offload

    def __enter__(self) -> None:
        torch.empty(256 * MIB, dtype=torch.uint8, device=NAME)
        self._offload.__enter__()

    def __exit__(self, *error: Any) -> None:
        self._offload.__exit__(*error)


@pytest.mark.parametrize("used_more_before", [False, True])
def test_the_states_of_an_optimizer_that_was_not_named_make_less_stay(used_more_before: bool) -> None:
    expected = Training().steps(24, nullcontext())
    training = Training()
    free = planned(training, None)
    plan = planned(training, (free.least_budget + free.peak_bytes) // 2)
    assert next(training.model.parameters()).device.type == NAME
    with eo.Offload(plan=plan, host_budget="1GiB") as offload:
        pass
    found = training.steps(24, after_an_evaluation(offload) if used_more_before else offload)
    assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))
    if not used_more_before:
        assert training.peaks[0] <= plan.device_budget, "there are no states yet"
        assert min(training.peaks[1:16]) > plan.device_budget
        assert max(training.peaks[17:]) <= plan.device_budget
    stats = offload.stats(synchronize=True)
    assert (stats.followed_forwards, stats.plan_misses) == (24, {})
    assert stats.demotions == {"over_budget": 1}
    assert stats.bytes_out > 24 * sum(plan.step_plans[0].slots) > 0
    offload.close()
