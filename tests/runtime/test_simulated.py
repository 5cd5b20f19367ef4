"""The simulated runtime: the way of a saved tensor with every edge in turn, its ends, streams and memory."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from eager_offload.errors import TransferError
from eager_offload.runtime.base import Direction, Event, Layout
from eager_offload.simulation.checker import Checker, OrderingError
from eager_offload.simulation.log import WrittenLog
from eager_offload.simulation.simulated import SimulatedRuntime, SimulatedStream
from tests.runtime.simulated_rig import CPU, DistantSlot, Rig, flat
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


def test_bytes_that_only_the_slot_can_reach_travel_both_ways(rig: Rig) -> None:
    source, slot, target = torch.randn(16), DistantSlot(64), rig.target(64)
    rig.runtime.copy(slot, flat(source), rig.out)
    rig.runtime.wait(rig.inward, rig.runtime.record(rig.out))
    rig.runtime.copy(target, slot, rig.inward)
    rig.runtime.synchronize(rig.runtime.record(rig.inward))
    assert torch.equal(target, flat(source))


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


def test_operators_of_slots_are_not_seen_as_the_users(rig: Rig) -> None:
    recording = WrittenLog()
    with rig.runtime.checked(recording):
        source = torch.randn(16)
        before = len(recording.entries)
        rig.runtime.synchronize(rig.runtime.copy(DistantSlot(64), flat(source), rig.out))
        assert [type(entry).__name__ for entry in recording.entries[before:]] == [
            "Operation",
            "Recorded",
            "Synchronized",
        ]


def test_leaving_the_context_carries_out_what_is_pending(rig: Rig) -> None:
    source, slot = torch.randn(64), rig.slot(256)
    with rig.runtime.checked() as checker:
        rig.runtime.copy(slot, flat(source), rig.out)
        assert rig.runtime.pending_copies == 1
    checker.assert_clean()
    assert rig.runtime.pending_copies == 0
    assert torch.equal(slot.tensor, flat(source))
    entries = checker.entries
    rig.runtime.record(rig.main)
    assert checker.entries == entries


def test_h10_an_exception_leaves_the_runtime_usable(rig: Rig) -> None:
    with pytest.raises(ValueError, match="mine"), rig.runtime.checked():
        raise ValueError("mine")
    with rig.runtime.checked() as checker:
        torch.ones(4) + 1
    checker.assert_clean()
    assert checker.entries > 0


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


def test_there_is_one_transfer_stream_for_each_direction(rig: Rig) -> None:
    assert rig.runtime.transfer_stream(torch.device("cpu"), Direction.OUT) is rig.out
    assert rig.out is not rig.inward


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


def test_another_thread_is_watched_through_a_context_of_its_own(rig: Rig) -> None:
    with rig.runtime.checked() as checker:
        entries = checker.entries

        def compute() -> None:
            with rig.runtime.watching():
                torch.ones(4).exp()

        on_a_thread(compute)
        assert checker.entries > entries
    checker.assert_clean()


# -- memory -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("alignment_offset", [0, 4, 60])
def test_targets_have_the_alignment_offset_that_was_asked_for(rig: Rig, alignment_offset: int) -> None:
    target = rig.runtime.allocate(Layout(100, alignment_offset), CPU, rig.main)
    assert (target.data_ptr() % 64, target.numel(), target.dtype) == (alignment_offset, 100, torch.uint8)


def test_host_buffers_are_page_aligned_and_no_device_memory(rig: Rig) -> None:
    with rig.runtime.checked() as checker:
        buffer = rig.runtime.host_buffer(5000)
        assert checker.entries == 0
    assert (buffer.data_ptr() % 4096, buffer.numel(), buffer.dtype) == (0, 5000, torch.uint8)


def test_peak_resident_bytes_are_those_of_what_was_allocated_inside(rig: Rig) -> None:
    weight = torch.randn(1024)
    with rig.runtime.checked():
        x = weight * 2
        y = weight * 3
        del x, y
        z = weight * 4
    assert (rig.runtime.peak_resident_bytes, rig.runtime.resident_bytes) == (8192, 4096)
    assert z.numel() == 1024


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
        assert runtime.resident_bytes <= 512
        assert checker.cells < 50
    checker.assert_clean()


def test_a_model_that_is_trained_without_transfers_is_clean_and_unchanged() -> None:
    def train() -> list[Tensor]:
        torch.manual_seed(0)
        model = torch.nn.Sequential(
            torch.nn.Linear(8, 16), torch.nn.BatchNorm1d(16), torch.nn.ReLU(), torch.nn.Linear(16, 1)
        )
        optimizer = torch.optim.AdamW(model.parameters())
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.randn(4, 8)).square().mean().backward()
            optimizer.step()
        return [parameter.detach() for parameter in model.parameters()]

    plain = train()
    runtime = SimulatedRuntime()
    with runtime.checked() as checker:
        watched = train()
    checker.assert_clean()
    assert all(torch.equal(a, b) for a, b in zip(plain, watched, strict=True))
    assert checker.entries > 100
