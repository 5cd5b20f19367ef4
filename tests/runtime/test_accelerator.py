"""The accelerator runtime on a recording double of ``torch.accelerator``: order, and what is selected afterwards.

Whole training steps on it are read by the happens-before checker in ``test_accelerator_step.py``. That a real device
agrees is for ``tests/gpu`` to show.
"""

from __future__ import annotations

import threading

import pytest
import torch

from eager_offload.runtime.accelerator import AcceleratorRuntime
from eager_offload.runtime.base import Direction, Layout
from tests.doubles.recording_accelerator import RecordingAccelerator
from tests.runtime.accelerator_double import DEVICE, NBYTES, SECOND, host_slot, pattern, selection
from tests.threads import on_threads


@pytest.fixture
def double() -> RecordingAccelerator:
    return RecordingAccelerator(devices=2)


@pytest.fixture
def runtime(double: RecordingAccelerator) -> AcceleratorRuntime:
    return AcceleratorRuntime(double)


# -- the order of calls, and what is selected afterwards ------------------------------------------------------------


def test_h15_copy_enters_its_stream_around_the_copy_alone_and_never_makes_the_host_wait(
    double: RecordingAccelerator, runtime: AcceleratorRuntime
) -> None:
    compute = runtime.current_stream(DEVICE)
    source, slot = double.empty(NBYTES, DEVICE), host_slot(runtime, NBYTES)
    out = runtime.transfer_stream(DEVICE, Direction.OUT)
    double.calls.clear()
    over = runtime.copy(slot, source, out, after=[runtime.record(compute)])
    runtime.wait(compute, over)
    assert double.calls == [
        "record_event 0/0",
        f"wait_event 0/{out.stream_id}",
        f"record_event 0/{out.stream_id}",  # the first copies tell how long they took
        f"set_stream 0/{out.stream_id}",
        f"copy {NBYTES} on 0/{out.stream_id}",
        "set_stream 0/0",
        f"record_event 0/{out.stream_id}",
        "wait_event 0/0",
    ]
    assert double.pending(out) > 0, "the host did not wait for the copy"


def test_h30_copy_on_another_device_restores_device_and_streams(
    double: RecordingAccelerator, runtime: AcceleratorRuntime
) -> None:
    double.set_stream(double.stream(DEVICE))
    before = selection(double)
    slot = host_slot(runtime, NBYTES)
    target = runtime.allocate(Layout(NBYTES), SECOND, runtime.current_stream(SECOND))
    runtime.copy(target, slot, runtime.transfer_stream(SECOND, Direction.IN))
    assert selection(double) == before
    assert double.device_of(target) == SECOND
    copies = [call for call in double.calls if call.startswith("copy")]
    assert copies == [f"copy {NBYTES} on 1/{runtime.transfer_stream(SECOND, Direction.IN).stream_id}"]


@pytest.mark.parametrize("call", ["copy", "empty", "set_stream"])
def test_h10_failure_restores_device_and_streams(
    double: RecordingAccelerator, runtime: AcceleratorRuntime, call: str
) -> None:
    double.set_stream(double.stream(DEVICE))
    before = selection(double)
    slot = host_slot(runtime, NBYTES)
    target = runtime.allocate(Layout(NBYTES), SECOND, runtime.current_stream(SECOND))
    inward = runtime.transfer_stream(SECOND, Direction.IN)

    def attempt() -> None:
        runtime.copy(target, slot, inward)
        runtime.allocate(Layout(NBYTES), SECOND, inward)

    double.fail(call, torch.OutOfMemoryError("no room"))
    with pytest.raises(torch.OutOfMemoryError, match="no room"):
        attempt()
    assert selection(double) == before
    attempt()
    assert selection(double) == before


def test_streams_can_be_entered_inside_each_other_and_twice(
    double: RecordingAccelerator, runtime: AcceleratorRuntime
) -> None:
    before = selection(double)
    out, far = runtime.transfer_stream(DEVICE, Direction.OUT), runtime.transfer_stream(SECOND, Direction.OUT)
    with runtime.enter(out), runtime.enter(far):
        assert double.current_device_index() == 1
        with runtime.enter(out):
            assert runtime.current_stream(torch.device("cuda")) == out
        assert runtime.current_stream(torch.device("cuda")) == far
        assert runtime.current_stream(DEVICE) == out
    assert selection(double) == before


def test_h29_threads_inside_one_transfer_stream_at_once_get_their_own_streams_back(
    double: RecordingAccelerator, runtime: AcceleratorRuntime
) -> None:
    out = runtime.transfer_stream(DEVICE, Direction.OUT)
    both_inside = threading.Barrier(2)
    double.during_copy = lambda: both_inside.wait(timeout=30)
    restored: list[bool] = []

    def work(number: int) -> None:
        double.set_stream(double.stream(DEVICE))
        before = selection(double)
        source, slot = double.empty(NBYTES, DEVICE), host_slot(runtime, NBYTES)
        runtime.copy(slot, source, out)
        restored.append(selection(double) == before)

    on_threads(2, work)
    assert restored == [True, True]
    assert sum(call == f"copy {NBYTES} on 0/{out.stream_id}" for call in double.calls) == 2


# -- streams and events ---------------------------------------------------------------------------------------------


def test_streams_are_named_by_identity_not_by_object(double: RecordingAccelerator, runtime: AcceleratorRuntime) -> None:
    one, two = runtime.current_stream(DEVICE), runtime.current_stream(torch.device("cuda"))
    assert one is not two
    assert one == two
    assert hash(one) == hash(two)
    assert one != runtime.current_stream(SECOND)
    double.set_stream(double.stream(DEVICE))
    assert one != runtime.current_stream(DEVICE)


def test_transfer_streams_are_created_once_whichever_thread_asks_first(
    double: RecordingAccelerator, runtime: AcceleratorRuntime
) -> None:
    start = threading.Barrier(8)
    found: list[torch.Stream] = []

    def ask(number: int) -> None:
        start.wait(timeout=30)
        found.append(runtime.transfer_stream(DEVICE, Direction.OUT))

    on_threads(8, ask)
    assert len({id(stream) for stream in found}) == 1
    assert double.calls.count("stream 0") == 2
    every = {runtime.transfer_stream(device, way) for device in (DEVICE, SECOND) for way in Direction}
    assert len(every) == 4
    assert double.calls.count("stream 1") == 2


def test_torchs_events_are_recorded_again_once_their_points_are_of_no_use_to_anyone(
    double: RecordingAccelerator, runtime: AcceleratorRuntime
) -> None:
    made, compute, out = [], runtime.current_stream(DEVICE), runtime.transfer_stream(DEVICE, Direction.OUT)
    event = double.event
    double.event = lambda *args, **kwargs: made.append(event(*args, **kwargs)) or made[-1]  # type: ignore[method-assign]
    first, other = runtime.record(compute), runtime.record(out)
    assert first != other
    assert first.recorded_on == compute
    runtime.wait(out, first)  # before the event's next record, which the wait has nothing to do with
    del first
    again = runtime.record(runtime.current_stream(DEVICE))
    assert len(made) == 2, "no event without need"
    assert not runtime.query(again)
    double.run_all(first=[out])
    assert runtime.query(again)
    runtime.record(runtime.current_stream(SECOND))
    assert len(made) == 3, "an event belongs to its device"


def test_failed_record_leaves_no_event(double: RecordingAccelerator, runtime: AcceleratorRuntime) -> None:
    double.fail("record_event", RuntimeError("device lost"))
    with pytest.raises(RuntimeError, match="device lost"):
        runtime.record(runtime.current_stream(DEVICE))
    assert not runtime.query(runtime.record(runtime.current_stream(DEVICE)))


def test_copies_inside_an_entered_stream_switch_once(double: RecordingAccelerator, runtime: AcceleratorRuntime) -> None:
    out, slots = runtime.transfer_stream(DEVICE, Direction.OUT), [host_slot(runtime, NBYTES) for _ in range(3)]
    source = double.empty(NBYTES, DEVICE)
    double.calls.clear()
    with runtime.enter(out):
        for slot in slots:
            runtime.copy(slot, source, out)
    assert [call for call in double.calls if "set_stream" in call] == [
        f"set_stream 0/{out.stream_id}",
        "set_stream 0/0",
    ]
    assert double.calls.count(f"copy {NBYTES} on 0/{out.stream_id}") == 3
    assert not any(call.startswith("device") for call in double.calls), "it was selected already"


def test_wait_costs_no_call_where_order_is_given_already(
    double: RecordingAccelerator, runtime: AcceleratorRuntime
) -> None:
    compute, out = runtime.current_stream(DEVICE), runtime.transfer_stream(DEVICE, Direction.OUT)
    event = runtime.record(compute)
    double.calls.clear()
    runtime.wait(compute, event)
    assert double.calls == []
    assert not runtime.query(event)
    runtime.wait(out, event)
    assert f"wait_event 0/{out.stream_id}" in double.calls
    runtime.synchronize(event)
    double.calls.clear()
    assert runtime.query(event)
    runtime.wait(out, event)
    runtime.synchronize(event)
    assert double.calls == []


def test_synchronize_waits_for_what_the_event_stands_for_and_no_more(
    double: RecordingAccelerator, runtime: AcceleratorRuntime
) -> None:
    compute, out = runtime.current_stream(DEVICE), runtime.transfer_stream(DEVICE, Direction.OUT)
    source, slot = double.empty(NBYTES, DEVICE), host_slot(runtime, NBYTES)
    double.launch(compute, lambda x: x.copy_(pattern(NBYTES, 1)), source)
    runtime.wait(out, runtime.record(compute))
    copied = runtime.copy(slot, source, out)
    runtime.copy(slot, source, out)
    runtime.synchronize(copied)
    assert torch.equal(slot.tensor, pattern(NBYTES, 1))
    assert double.pending(out) == 3, "the second copy and its events"
