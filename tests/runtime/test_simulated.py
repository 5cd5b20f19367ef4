"""The simulated runtime: the way of a saved tensor with every edge in turn, streams, memory, order and the clock."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from eager_offload.errors import TransferError
from eager_offload.runtime.base import Event
from tests.runtime.simulated_rig import CPU, DistantSlot, Rig, flat
from tests.simulation.checker import Checker, OrderingError
from tests.simulation.log import WrittenLog
from tests.simulation.simulated import SimulatedRuntime, SimulatedStream
from tests.simulation.timeline import StreamSpan
from tests.threads import on_a_thread


@pytest.fixture
def rig() -> Rig:
    return Rig(SimulatedRuntime())


# -- the way of one saved tensor, with every edge by name -------------------------------------------------------------

EDGES = [
    "the offload waits for the producer",
    "the source goes after its copy",
    "the reload waits for the block's last owner",
    "the slot's next writer waits for its last reader",
    "the next offload waits for its producer",
    "compute waits for the reload",
]


class Waits:
    """Lets streams wait, except where the edge of that name is to be missing."""

    def __init__(self, rig: Rig, missing: str | None) -> None:
        self.names: list[str] = []
        self._rig = rig
        self._missing = missing

    def __call__(self, name: str, stream: SimulatedStream, event: Event) -> None:
        self.names.append(name)
        if name != self._missing:
            self._rig.runtime.wait(stream, event)


@dataclass(frozen=True)
class Outcome:
    """What came back, what should have, and what else was offloaded over it."""

    got: Tensor
    want: Tensor
    names: list[str]


def way_of_a_saved_tensor(rig: Rig, missing: str | None = None) -> Outcome:
    """Offloads one tensor and reloads it, where others use the same block and the same slot before and after."""
    runtime, main, out, inward = rig.runtime, rig.main, rig.out, rig.inward
    waits = Waits(rig, missing)
    saved = torch.randn(1024) * 2
    want = saved.clone()
    waits("the offload waits for the producer", out, runtime.record(main))
    slot = rig.slot(4096)
    runtime.copy(slot, flat(saved), out)
    waits("the source goes after its copy", main, runtime.record(out))
    del saved
    scratch = torch.full((1024,), 7.0)  # takes the block
    del scratch
    target = rig.target(4096)  # takes it again
    waits("the reload waits for the block's last owner", inward, runtime.record(main))
    runtime.copy(target, slot, inward)
    reloaded = runtime.record(inward)
    other = torch.ones(1024)
    produced = runtime.record(main)
    waits("the slot's next writer waits for its last reader", out, reloaded)
    waits("the next offload waits for its producer", out, produced)
    runtime.copy(slot, flat(other), out)
    offloaded = runtime.record(out)
    waits("compute waits for the reload", main, reloaded)
    got = target.view(torch.float32) + 0.0
    runtime.synchronize(offloaded)
    assert torch.equal(slot.tensor, flat(other)) or missing is not None
    return Outcome(got, want, waits.names)


@pytest.mark.parametrize("at_once", [False, True])
def test_the_full_way_is_exact_and_in_order(at_once: bool) -> None:
    rig = Rig(SimulatedRuntime(at_once=at_once))
    with rig.runtime.checked() as checker:
        outcome = way_of_a_saved_tensor(rig)
    checker.assert_clean()
    assert torch.equal(outcome.got, outcome.want)
    assert outcome.names == EDGES
    assert [span.nbytes for span in rig.runtime.timeline.spans if span.is_transfer] == [4096, 4096, 4096]
    assert rig.runtime.faults == []


@pytest.mark.parametrize("missing", EDGES)
def test_every_edge_that_is_missing_is_reported(rig: Rig, missing: str) -> None:
    with rig.runtime.checked() as checker:
        way_of_a_saved_tensor(rig, missing)
    with pytest.raises(OrderingError, match="nothing orders"):
        checker.assert_clean()


@pytest.mark.parametrize("missing", ["the source goes after its copy", "compute waits for the reload"])
def test_a_missing_edge_between_compute_and_a_copy_brings_wrong_bytes(rig: Rig, missing: str) -> None:
    outcome = way_of_a_saved_tensor(rig, missing)
    assert not torch.equal(outcome.got, outcome.want)


def test_a_recorded_run_lacks_each_of_its_edges_in_turn(rig: Rig) -> None:
    recording = WrittenLog()
    with rig.runtime.checked(recording) as checker:
        way_of_a_saved_tensor(rig)
    checker.assert_clean()
    assert len(recording.entries) == checker.entries
    needed = []
    for index in recording.edges:
        recording.replay(lacking := Checker(), without=index)
        needed.append(bool(lacking.violations))
    # The last one is the host's: it lets the second source go.
    assert needed == [True] * (len(EDGES) + 1)


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


# -- streams ----------------------------------------------------------------------------------------------------------


def test_h14_the_current_stream_belongs_to_the_thread(rig: Rig) -> None:
    side = SimulatedStream("side")
    seen: list[object] = []
    with rig.runtime.stream(side):
        on_a_thread(lambda: seen.append(rig.runtime.current_stream(CPU)))
        seen.append(rig.runtime.current_stream(CPU))
        with rig.runtime.stream(rig.main):
            seen.append(rig.runtime.current_stream(CPU))
    assert seen == [rig.main, side, rig.main]
    assert rig.runtime.current_stream(CPU) is rig.main


def test_two_compute_streams_that_share_a_tensor_without_an_event_are_reported(rig: Rig) -> None:
    side = SimulatedStream("side")
    with rig.runtime.checked() as checker:
        x = torch.ones(4)
        with rig.runtime.stream(side):
            y = x * 2
        assert len(checker.violations) == 1
        rig.runtime.wait(side, rig.runtime.record(rig.main))
        with rig.runtime.stream(side):
            z = x * 3
        assert len(checker.violations) == 1
    assert y.numel() == z.numel()


# -- memory -----------------------------------------------------------------------------------------------------------


def test_h25_a_thousand_transfers_leave_nothing_behind(rig: Rig) -> None:
    runtime = rig.runtime
    with runtime.checked() as checker:
        for _ in range(1000):
            x = torch.randn(64)
            runtime.wait(rig.out, runtime.record(rig.main))
            slot = rig.slot(256)
            runtime.copy(slot, flat(x), rig.out)
            event = runtime.record(rig.out)
            runtime.wait(rig.main, event)
            del x
        assert runtime.pending_copies == 0
        assert runtime.observer.resident_bytes <= 512
        assert checker.cells < 50
    checker.assert_clean()


# -- copies run as late as the ordering allows, so a missing edge gives wrong bytes -----------------------------------


def test_h16_a_source_that_is_dropped_too_early_leaves_garbage(rig: Rig) -> None:
    source = torch.randn(64)
    slot = rig.slot(256)
    rig.runtime.copy(slot, flat(source), rig.out)
    offloaded = rig.runtime.record(rig.out)
    del source
    rig.runtime.synchronize(offloaded)
    assert slot.tensor.eq(0xFF).all()
    (fault,) = rig.runtime.faults
    assert "the source was freed before the copy ran" in str(fault)


def test_h17_a_reload_that_does_not_wait_for_the_offload_brings_the_slots_old_bytes(rig: Rig) -> None:
    for ordered in (False, True):
        slot = rig.slot(256)
        slot.tensor.fill_(9)
        source, target = torch.ones(64), rig.target(256)
        rig.runtime.copy(slot, flat(source), rig.out)
        offloaded = rig.runtime.record(rig.out)
        if ordered:
            rig.runtime.wait(rig.inward, offloaded)
        rig.runtime.copy(target, slot, rig.inward)
        rig.runtime.wait(rig.main, rig.runtime.record(rig.inward))
        assert torch.equal(target, flat(source)) == ordered


def test_h18_a_slot_that_goes_back_too_early_is_overwritten_before_it_is_read(rig: Rig) -> None:
    for ordered in (False, True):
        slot = rig.slot(256)
        slot.tensor.fill_(9)
        target, source = rig.target(256), torch.ones(64)
        rig.runtime.copy(target, slot, rig.inward)
        reloaded = rig.runtime.record(rig.inward)
        del slot
        if ordered:
            rig.runtime.wait(rig.out, reloaded)
        rig.runtime.copy(rig.slot(256), flat(source), rig.out)
        rig.runtime.wait(rig.main, rig.runtime.record(rig.out))
        rig.runtime.wait(rig.main, reloaded)
        assert bool(target.eq(9).all()) == ordered


def test_h19_a_target_that_is_dropped_before_its_copy_ran_is_a_fault(rig: Rig) -> None:
    target = rig.target(256)
    rig.runtime.copy(target, rig.slot(256), rig.inward)
    del target
    rig.runtime.synchronize_all()
    (fault,) = rig.runtime.faults
    assert "the target was freed before the copy ran" in str(fault)


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
