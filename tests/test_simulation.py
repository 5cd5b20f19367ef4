"""What the simulation is judged by: the floor, the schedule that knows all times, and how long operators take."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import eager_offload as eo
from eager_offload.machine import Machine
from eager_offload.planning.predict import floor_seconds
from tests.simulation.large import H200, LARGE, SQUARE, Small, large
from tests.simulation.oracle import Program, best_step
from tests.simulation.simulated import SimulatedRuntime
from tests.simulation.stage import Clock, Stage


def chain(nbytes: list[int]) -> Program:
    """One operator saves one storage, and backward asks for them in reverse."""
    count = len(nbytes)
    asked = [2 * count - 1 - number for number in range(count)]
    return Program(nbytes, list(range(1, count + 1)), asked, asked)


def link(out: float, back: float) -> Machine:
    """A device of which the link alone counts."""
    return Machine("link", 1.0, 1.0, 1.0, out, back)


def test_the_floor_is_compute_or_transfers_whichever_is_longer_in_each_half() -> None:
    assert floor_seconds(1.0, 2.0, 100, out=10.0, back=5.0) == 10.0 + 20.0
    assert floor_seconds(100.0, 2.0, 100, out=10.0, back=5.0) == 100.0 + 20.0
    assert floor_seconds(100.0, 200.0, 100, out=10.0, back=5.0) == 300.0


def test_where_everything_fits_nothing_moves() -> None:
    assert best_step(chain([10, 10, 10]), [1.0] * 6, 3, link(1e-9, 1e-9), room=30) == 6.0


def test_a_link_that_is_fast_enough_costs_nothing() -> None:
    assert best_step(chain([10] * 8), [1.0] * 16, 8, link(100.0, 100.0), room=30) == 16.0


def test_a_slow_link_is_waited_for_once_the_room_is_full() -> None:
    # Two of four storages stay; the others leave in 2 s each, from 1 s on, and come back in 2 s each.
    step = best_step(chain([10] * 4), [1.0] * 8, 4, link(5.0, 5.0), room=20)
    # Forward has room for a third storage when the first has left, at 3 s, and for the fourth at 5 s. Backward begins
    # at 5 s with the newest two; each operator that ends makes room for one that comes back.
    assert step == pytest.approx(5.0 + 1.0 + 2.0 + 2.0 + 1.0)


sizes = st.lists(st.integers(1, 50), min_size=1, max_size=12)


@settings(max_examples=200)
@given(sizes, st.floats(0.5, 50), st.floats(0.5, 50), st.integers(1, 300), st.randoms(use_true_random=False))
def test_no_schedule_is_faster_than_its_compute_nor_made_slower_by_more_room(
    nbytes: list[int], out: float, back: float, room: int, random: object
) -> None:
    seconds = [random.uniform(0.1, 2.0) for _ in range(2 * len(nbytes))]  # type: ignore[attr-defined]
    behind, program = link(out, back), chain(nbytes)
    step = best_step(program, seconds, len(nbytes), behind, room)
    assert step >= sum(seconds) - 1e-9
    assert best_step(program, seconds, len(nbytes), behind, 2 * room + 50) <= step + 1e-9
    moved = max(0, sum(nbytes) - max(room, max(nbytes)))
    assert step >= moved / out - 1e-9
    assert step >= moved / back - 1e-9


def test_the_small_model_takes_the_time_of_the_large_one_that_it_stands_for() -> None:
    small = Small(8 << 10, layers=1)
    model, x = large(replace(LARGE, layers=1), 8 << 10)
    plan = eo.plan(model, x, loss=lambda out: out.float().square().mean(), device=H200, device_budget=1 << 50)
    assert SQUARE * small.plain.compute_seconds == pytest.approx(plan.compute_seconds, rel=0.01)
    assert SQUARE * small.plain.peak_bytes == pytest.approx(plan.peak_bytes, rel=0.01)
    step = Stage(small.machine).step(eo.Offload(enabled=False), small.model, small.x, small.loss)
    assert step.seconds == pytest.approx(sum(step.op_seconds), rel=0.001)
    assert step.seconds == pytest.approx(small.plain.compute_seconds, rel=0.001)
    assert len(step.op_seconds) >= max(small.program.last_asked_at) > step.forward_ops > max(small.program.saved_at)
    assert SQUARE * sum(small.program.nbytes) == pytest.approx(plan.problem.program.movable_bytes, rel=0.01)
    assert small.has_same_bits()


def test_operator_times_vary_by_the_seed_alone() -> None:
    def seconds(seed: int) -> list[float]:
        with Clock(SimulatedRuntime(), machine, jitter=0.3, seed=seed) as clock:
            for _ in range(50):
                x.sin()
        return clock.seconds

    machine, x = link(1.0, 1.0), torch.ones(64)
    first = seconds(1)
    assert first == seconds(1) != seconds(2)
    assert 0.7 * 512 <= min(first) <= max(first) <= 1.3 * 512
