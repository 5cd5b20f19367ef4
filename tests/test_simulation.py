"""Transfers hide behind compute on a large accelerator, by the clock of a simulated one that stands for it."""

from __future__ import annotations

from dataclasses import replace

import pytest

import eager_offload as eo
from eager_offload.planning.predict import floor_seconds
from tests.simulation.large import H200, LARGE, SEQUENCES, SQUARE, Small, large
from tests.simulation.stage import Stage


@pytest.mark.parametrize("tokens", ["8k", "128k"])
def test_a_step_takes_what_its_compute_or_its_link_takes_whatever_operators_take(tokens: str) -> None:
    """The link is the bottleneck at 8k tokens, compute is at 128k."""
    small = Small(SEQUENCES[tokens], layers=2)
    moving = small.plain.problem.program.movable_bytes - small.config["prefetch_bytes"]
    for speed in (0.5, 1, 2):
        stage = Stage(machine := small.linked(speed), jitter=0.3)
        offload = stage.offload(**small.config)
        for _ in range(2):
            offload.reset_stats()
            step = stage.step(offload, small.model, small.x, small.loss)
            halves = sum(step.op_seconds[: step.forward_ops]), sum(step.op_seconds[step.forward_ops :])
            assert step.seconds < 1.03 * floor_seconds(*halves, moving, machine.out, machine.back)
            assert small.has_same_bits()
            assert offload.stats().bytes_out >= moving
        offload.close()


def test_the_small_model_takes_the_time_of_the_large_one_that_it_stands_for() -> None:
    small = Small(8 << 10, layers=1)
    model, x = large(replace(LARGE, layers=1), 8 << 10)
    plan = eo.plan(model, x, loss=lambda out: out.float().square().mean(), device=H200, device_budget=1 << 50)
    assert SQUARE * small.plain.compute_seconds == pytest.approx(plan.compute_seconds, rel=0.01)
    assert SQUARE * small.plain.peak_bytes == pytest.approx(plan.peak_bytes, rel=0.01)
    movable = small.plain.problem.program.movable_bytes
    assert SQUARE * movable == pytest.approx(plan.problem.program.movable_bytes, rel=0.01)
    step = Stage(small.machine).step(eo.Offload(enabled=False), small.model, small.x, small.loss)
    assert step.seconds == pytest.approx(sum(step.op_seconds), rel=0.001)
    assert step.seconds == pytest.approx(small.plain.compute_seconds, rel=0.001)
    assert small.has_same_bits()
