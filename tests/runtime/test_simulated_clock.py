"""The simulated runtime's clock: how long things take, what stalls and what overlaps."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from eager_offload.runtime.base import Direction
from eager_offload.simulation.simulated import SimulatedRuntime
from eager_offload.simulation.timeline import Span, Timeline
from tests.runtime.simulated_rig import CPU, Rig, flat


@pytest.fixture
def rig() -> Rig:
    return Rig(SimulatedRuntime())


def test_a_copy_takes_its_bytes_over_the_bandwidth_of_its_direction() -> None:
    runtime = SimulatedRuntime(out_bandwidth=1024.0, in_bandwidth=2048.0, launch_seconds=0.0)
    rig = Rig(runtime)
    slot, source = rig.slot(1024), torch.zeros(256)
    runtime.copy(slot, flat(source), rig.out)
    out = runtime.record(rig.out)
    runtime.copy(target := rig.target(1024), slot, rig.inward)
    inward = runtime.record(rig.inward)
    assert (out.time, inward.time) == (1.0, 0.5)
    assert not runtime.query(out)
    runtime.synchronize(inward)
    assert (runtime.now, runtime.query(out), runtime.query(inward)) == (0.5, False, True)
    runtime.synchronize(out)
    assert (runtime.now, runtime.query(out), runtime.timeline.host_wait_seconds) == (1.0, True, 1.0)
    assert runtime.bandwidth(CPU, Direction.IN) == 2048.0
    assert target.numel() == 1024


def test_a_query_costs_a_launch_so_that_polling_ends(rig: Rig) -> None:
    source = torch.zeros(1024)
    rig.runtime.copy(rig.slot(4096), flat(source), rig.out)
    event = rig.runtime.record(rig.out)
    polls = 0
    while not rig.runtime.query(event):
        polls += 1
    assert 0 < polls < 100


def test_compute_stalls_for_as_long_as_its_work_waits() -> None:
    runtime = SimulatedRuntime(launch_seconds=0.0, in_bandwidth=1024.0)
    rig = Rig(runtime)
    runtime.advance(rig.main, 0.25, "first")
    target = rig.target(1024)
    runtime.copy(target, rig.slot(1024), rig.inward)
    runtime.wait(rig.main, runtime.record(rig.inward))
    assert runtime.timeline.stall_seconds == 0.0, "no work waits yet"
    runtime.advance(rig.main, 0.5, "second")
    assert runtime.timeline.spans == [
        Span(rig.main, 0.0, 0.25, "first", 0, False),
        Span(rig.inward, 0.0, 1.0, "reload", 1024, True),
        Span(rig.main, 0.25, 1.0, "stall", 0, False),
        Span(rig.main, 1.0, 1.5, "second", 0, False),
    ]
    assert (runtime.timeline.stall_seconds, runtime.timeline.overlap_seconds, runtime.timeline.end) == (0.75, 0.25, 1.5)


def test_a_transfer_that_waits_for_compute_is_no_stall() -> None:
    runtime = SimulatedRuntime(launch_seconds=0.0, out_bandwidth=1024.0)
    rig = Rig(runtime)
    source = torch.zeros(256)
    runtime.advance(rig.main, 2.0)
    runtime.wait(rig.out, runtime.record(rig.main))
    runtime.copy(rig.slot(1024), flat(source), rig.out)
    assert runtime.record(rig.out).time == 3.0
    assert runtime.timeline.stall_seconds == 0.0


def test_an_event_on_an_idle_stream_is_over_when_it_is_recorded(rig: Rig) -> None:
    event = rig.runtime.record(rig.main)
    assert event.time == rig.runtime.now
    assert rig.runtime.query(event)


def test_an_event_after_a_wait_is_not_over_before_what_was_waited_for(rig: Rig) -> None:
    rig.runtime.advance(rig.main, 1.0)
    rig.runtime.wait(rig.out, rig.runtime.record(rig.main))
    assert rig.runtime.record(rig.out).time >= 1.0


def test_operators_take_the_bytes_they_touch_over_the_compute_rate() -> None:
    runtime = SimulatedRuntime(compute_rate=1024.0, launch_seconds=0.0)
    a, b = torch.zeros(256), torch.zeros(256)
    with runtime.checked():
        a + b
    (span,) = runtime.timeline.spans
    assert (span.what, span.seconds, span.nbytes) == ("aten.add.Tensor", 3.0, 3072)


def test_jitter_changes_times_by_the_seed_alone() -> None:
    def spans(jitter: float, seed: int) -> list[float]:
        runtime = SimulatedRuntime(compute_rate=1024.0, jitter=jitter, seed=seed)
        with runtime.checked():
            for _ in range(20):
                torch.zeros(256)
        return [span.seconds for span in runtime.timeline.spans]

    assert spans(0.3, 1) == spans(0.3, 1) != spans(0.3, 2)
    assert all(0.7 <= seconds <= 1.3 for seconds in spans(0.3, 1))
    assert max(spans(0.3, 1)) - min(spans(0.3, 1)) > 0.1


intervals = st.tuples(st.integers(0, 20), st.integers(0, 8), st.booleans())


@settings(max_examples=200, deadline=None)
@given(st.lists(intervals, max_size=12))
def test_overlap_is_the_time_in_which_both_kinds_run(drawn: list[tuple[int, int, bool]]) -> None:
    timeline = Timeline([Span("s", start, start + length, "x", 0, transfer) for start, length, transfer in drawn])
    busy = [{kind for start, length, kind in drawn if start <= tick < start + length} for tick in range(30)]
    assert timeline.overlap_seconds == sum(kinds == {True, False} for kinds in busy)
