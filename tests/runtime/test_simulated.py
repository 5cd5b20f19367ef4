"""The simulated runtime: the way of a saved tensor with every edge in turn, streams, memory, order and the clock."""

from __future__ import annotations

import pytest
import torch

from eager_offload.errors import TransferError
from tests.runtime.simulated_rig import DistantSlot, Rig, flat
from tests.simulation.checker import Checker, OrderingError
from tests.simulation.log import WrittenLog
from tests.simulation.simulated import SimulatedRuntime, SimulatedStream
from tests.simulation.timeline import StreamSpan


@pytest.fixture
def rig() -> Rig:
    return Rig(SimulatedRuntime())


# -- the way of one saved tensor --------------------------------------------------------------------------------------


def way_of_a_saved_tensor(rig: Rig) -> None:
    """Offloads one tensor and reloads it, where others use the same block and the same slot before and after."""
    runtime, main, out, inward = rig.runtime, rig.main, rig.out, rig.inward
    saved = torch.randn(1024) * 2
    want = saved.clone()
    runtime.wait(out, runtime.record(main))  # the offload waits for the producer
    slot = rig.slot(4096)
    runtime.copy(slot, flat(saved), out)
    runtime.wait(main, runtime.record(out))  # the source goes after its copy
    del saved
    scratch = torch.full((1024,), 7.0)  # takes the block
    del scratch
    target = rig.target(4096)  # takes it again
    runtime.wait(inward, runtime.record(main))  # the reload waits for the block's last owner
    runtime.copy(target, slot, inward)
    reloaded = runtime.record(inward)
    other = torch.ones(1024)
    produced = runtime.record(main)
    runtime.wait(out, reloaded)  # the slot's next writer waits for its last reader
    runtime.wait(out, produced)  # the next offload waits for its producer
    runtime.copy(slot, flat(other), out)
    offloaded = runtime.record(out)
    runtime.wait(main, reloaded)  # compute waits for the reload
    got = target.view(torch.float32) + 0.0
    runtime.synchronize(offloaded)  # lets the second source go
    assert torch.equal(slot.tensor, flat(other))
    assert torch.equal(got, want)


@pytest.mark.parametrize("at_once", [False, True])
def test_the_full_way_is_exact_and_lacks_each_of_its_edges_in_turn(at_once: bool) -> None:
    rig, recording = Rig(SimulatedRuntime(at_once=at_once)), WrittenLog()
    with rig.runtime.checked(recording) as checker:
        way_of_a_saved_tensor(rig)
    checker.assert_clean()
    assert [span.nbytes for span in rig.runtime.timeline.spans if span.is_transfer] == [4096, 4096, 4096]
    assert rig.runtime.faults == []
    assert len(recording.entries) == checker.entries
    recording.replay(again := WrittenLog())
    assert recording.entries == again.entries
    assert len(recording.edges) == 7
    for index in recording.edges:
        recording.replay(lacking := Checker(), without=index)
        with pytest.raises(OrderingError, match="nothing orders"):
            lacking.assert_clean()
        assert all(race.earlier.number < index <= race.later.number for race in lacking.violations)


# -- the end of a transfer --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["wait", "synchronize"])
def test_h27_a_failed_transfer_is_raised_where_it_is_waited_for(rig: Rig, how: str) -> None:
    source, slot = torch.randn(16), DistantSlot(64)
    slot.failing = True
    before = rig.runtime.record(rig.out)
    failed = rig.runtime.copy(slot, flat(source), rig.out)
    after = rig.runtime.record(rig.out)
    rig.runtime.synchronize(before)
    for _ in range(2):
        with pytest.raises(TransferError):
            rig.runtime.synchronize(failed) if how == "synchronize" else rig.runtime.wait(rig.main, failed)
    assert rig.runtime.query(failed)
    rig.runtime.synchronize(after)


# -- copies run as late as the ordering allows, so a missing edge gives wrong bytes -----------------------------------


def test_h16_h19_what_is_dropped_before_its_copy_ran_is_a_fault_and_leaves_garbage(rig: Rig) -> None:
    source, target, slot = torch.randn(64), rig.target(256), rig.slot(256)
    rig.runtime.copy(slot, flat(source), rig.out)
    rig.runtime.copy(target, rig.slot(256, 256), rig.inward)
    del source, target
    rig.runtime.synchronize_all()
    assert slot.tensor.eq(0xFF).all()
    for end, fault in zip(("source", "target"), rig.runtime.faults, strict=True):
        assert f"the {end} was freed before the copy ran" in str(fault)


@pytest.mark.parametrize("ordered", [False, True])
def test_h17_h18_copies_run_as_late_as_the_order_allows(ordered: bool, rig: Rig) -> None:
    runtime, slot, source = rig.runtime, rig.slot(256), torch.ones(64)
    slot.tensor.fill_(9)
    first, second, early = rig.target(256), rig.target(256), rig.target(256)
    runtime.copy(first, slot, rig.inward)
    reloaded = runtime.record(rig.inward)
    if ordered:
        runtime.wait(rig.out, reloaded)  # the slot's next writer after its last reader
    runtime.copy(slot, flat(source), rig.out)
    offloaded = runtime.record(rig.out)
    other = SimulatedStream("another way in")
    if ordered:
        runtime.wait(other, offloaded)  # a reload after the offload of the same bytes
    runtime.copy(second, slot, other)
    runtime.wait(rig.main, runtime.record(other))
    assert bool(second.eq(flat(source)).all()) == ordered
    runtime.wait(rig.main, offloaded)
    runtime.wait(rig.main, reloaded)
    assert bool(first.eq(9).all()) == ordered
    slot.tensor.fill_(9)
    runtime.copy(early, slot, rig.inward)
    if ordered:
        runtime.wait(rig.main, runtime.record(rig.inward))  # compute after the reload
    assert bool(early.clone().eq(9).all()) == ordered


# -- the clock: how long things take, what stalls and what overlaps ---------------------------------------------------


def test_work_takes_its_bytes_over_their_rate_and_compute_stalls_for_as_long_as_it_waits() -> None:
    runtime = SimulatedRuntime(out_bandwidth=1024.0, in_bandwidth=2048.0, compute_rate=1024.0, launch_seconds=0.0)
    rig = Rig(runtime)
    slot, source, target = rig.slot(1024), torch.zeros(256), rig.target(1024)
    runtime.advance(rig.main, 0.25, "first")
    runtime.wait(rig.out, runtime.record(rig.main))
    runtime.copy(slot, flat(source), rig.out)
    out = runtime.record(rig.out)
    runtime.copy(target, slot, rig.inward)
    inward = runtime.record(rig.inward)
    assert (out.time, inward.time) == (1.25, 0.5)
    assert not runtime.query(out)
    runtime.synchronize(inward)
    assert (runtime.now, runtime.query(out), runtime.query(inward)) == (0.5, False, True)
    runtime.wait(rig.main, out)
    assert runtime.timeline.stall_seconds == 0.0, "no work waits yet"
    runtime.advance(rig.main, 0.5, "second")
    assert runtime.timeline.spans == [
        StreamSpan(rig.main, 0.0, 0.25, "first", 0, False),
        StreamSpan(rig.out, 0.25, 1.25, "offload", 1024, True),
        StreamSpan(rig.inward, 0.0, 0.5, "reload", 1024, True),
        StreamSpan(rig.main, 0.5, 1.25, "stall", 0, False),
        StreamSpan(rig.main, 1.25, 1.75, "second", 0, False),
    ]
    assert (runtime.timeline.stall_seconds, runtime.timeline.host_wait_seconds) == (0.75, 0.5)
    with runtime.checked():
        source + source
    assert (runtime.timeline.spans[-1].what, runtime.timeline.spans[-1].seconds) == ("aten.add.Tensor", 3.0)
