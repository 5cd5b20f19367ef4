"""The accelerator runtime on a recording double: order, what is selected afterwards, memory, links; and the adapter.

Whole training steps on it are read by the happens-before checker in ``test_accelerator_step.py``. That a real device
agrees is for ``tests/gpu`` to show.
"""

from __future__ import annotations

import math
import subprocess
import sys
import threading
import warnings
import weakref
from collections.abc import Callable

import pytest
import torch

import eager_offload.runtime.accelerator as accelerator
from eager_offload.errors import OffloadError
from eager_offload.runtime.accelerator import AcceleratorRuntime, accelerator_runtime
from eager_offload.runtime.accelerator_events import EventPool
from eager_offload.runtime.base import ALIGNMENT, Direction, Event, Layout
from eager_offload.runtime.link_probe import LinkProbe
from eager_offload.tiers.memory import PAGE
from tests.doubles.recording_accelerator import RecordingAccelerator
from tests.runtime.accelerator_double import DEVICE, NBYTES, SECOND, host_slot, pattern, selection
from tests.threads import on_threads

MIB = 1 << 20


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


# -- memory ---------------------------------------------------------------------------------------------------------


def test_target_belongs_to_the_stream_it_is_allocated_for(
    double: RecordingAccelerator, runtime: AcceleratorRuntime
) -> None:
    noted = double.stream(DEVICE)
    before = selection(double)
    target = runtime.allocate(Layout(NBYTES), DEVICE, noted)
    assert f"empty {NBYTES} on 0/{noted.stream_id}" in double.calls
    assert selection(double) == before
    address = target.data_ptr()
    del target
    assert runtime.allocate(Layout(NBYTES), DEVICE, noted).data_ptr() == address


@pytest.mark.parametrize("skew", [0, 16, 7])
@pytest.mark.parametrize("alignment_offset", [0, 1, 4, 16, 32, 63])
@pytest.mark.parametrize("nbytes", [0, 1, 4096])
def test_target_has_size_and_offset_whatever_the_allocator_aligns_to(
    skew: int, alignment_offset: int, nbytes: int
) -> None:
    runtime = AcceleratorRuntime(RecordingAccelerator(skew=skew))
    target = runtime.allocate(Layout(nbytes, alignment_offset), DEVICE, runtime.current_stream(DEVICE))
    assert target.shape == (nbytes,)
    assert target.dtype is torch.uint8
    if nbytes:
        assert target.data_ptr() % ALIGNMENT == alignment_offset


def test_aligned_target_takes_no_byte_more_than_its_size(
    double: RecordingAccelerator, runtime: AcceleratorRuntime
) -> None:
    target = runtime.allocate(Layout(MIB), DEVICE, runtime.current_stream(DEVICE))
    assert target.untyped_storage().nbytes() == MIB
    assert [call for call in double.calls if call.startswith("empty")] == [f"empty {MIB} on 0/0"]


def test_h22_what_is_allocated_under_inference_mode_is_no_inference_tensor(
    double: RecordingAccelerator, runtime: AcceleratorRuntime
) -> None:
    with torch.inference_mode():
        target = runtime.allocate(Layout(NBYTES, 16), DEVICE, runtime.current_stream(DEVICE))
        buffers = [runtime.host_buffer(PAGE), runtime.host_buffer(PAGE, pin_memory=False)]
        assert torch.is_inference_mode_enabled()
    assert not target.is_inference()
    assert not any(buffer.is_inference() for buffer in buffers)


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad, torch.enable_grad])
def test_h22_copies_are_exact_in_any_mode_of_the_caller(mode: Callable[[], torch.no_grad]) -> None:
    double = RecordingAccelerator()
    runtime = AcceleratorRuntime(double)
    with mode(), torch.autocast("cpu", dtype=torch.bfloat16), torch.device("meta"):
        slot, compute = host_slot(runtime, NBYTES), runtime.current_stream(DEVICE)
        source = double.empty(NBYTES, DEVICE)
        double.launch(compute, lambda x: x.copy_(pattern(NBYTES, 2)), source)
        runtime.copy(slot, source, runtime.transfer_stream(DEVICE, Direction.OUT), [runtime.record(compute)])
    double.run_all()
    assert torch.equal(slot.tensor, pattern(NBYTES, 2))


def test_host_buffer_is_page_aligned_and_exact(double: RecordingAccelerator, runtime: AcceleratorRuntime) -> None:
    buffer = runtime.host_buffer(MIB)
    assert buffer.data_ptr() % PAGE == 0
    assert buffer.shape == (MIB,)
    assert double.calls == [f"register {PAGE}", f"empty_pinned {MIB}"], "room to spare would double the slab"


def test_host_buffer_is_page_aligned_where_pinned_memory_is_not() -> None:
    runtime = AcceleratorRuntime(RecordingAccelerator(skew=64))
    buffer = runtime.host_buffer(MIB)
    assert buffer.data_ptr() % PAGE == 0
    assert buffer.shape == (MIB,)


def test_host_buffer_is_pageable_on_request(double: RecordingAccelerator, runtime: AcceleratorRuntime) -> None:
    buffer = runtime.host_buffer(MIB, pin_memory=False)
    assert buffer.data_ptr() % PAGE == 0
    assert buffer.shape == (MIB,)
    assert double.calls == []


def test_failed_pin_falls_back_to_pageable_memory_and_says_so_once(
    double: RecordingAccelerator, runtime: AcceleratorRuntime
) -> None:
    for _ in range(2):
        double.fail("empty_pinned", RuntimeError("CUDA error: out of memory\nmany more lines"))
    with pytest.warns(RuntimeWarning, match=r"could not be pinned \(CUDA error: out of memory\)"):
        buffer = runtime.host_buffer(MIB)
    assert buffer.fill_(7).data_ptr() % PAGE == 0
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert runtime.host_buffer(MIB).shape == (MIB,)
        assert runtime.host_buffer(MIB).shape == (MIB,)
    assert double.calls.count(f"empty_pinned {MIB}") == 3


# -- bandwidth ------------------------------------------------------------------------------------------------------


def test_bandwidth_is_measured_once_by_the_devices_clock() -> None:
    double = RecordingAccelerator(rate=5e10)
    runtime = AcceleratorRuntime(double)
    before = double.current_stream(DEVICE)
    found = runtime.bandwidth(DEVICE, Direction.OUT)
    assert math.isclose(found, 5e10, rel_tol=1e-9)
    assert runtime.current_stream(DEVICE) == before
    double.calls.clear()
    assert runtime.bandwidth(torch.device("cuda"), Direction.OUT) == found
    assert double.calls == []
    out = runtime.transfer_stream(DEVICE, Direction.OUT)
    assert double.pending(out) == 0, "the probe's memory went back after its last copy"


def test_bandwidth_probe_waits_for_the_last_owner_of_its_memory() -> None:
    double = RecordingAccelerator()
    runtime = AcceleratorRuntime(double)
    for direction in Direction:
        before = len(double.calls)
        runtime.bandwidth(DEVICE, direction)
        stream, calls = runtime.transfer_stream(DEVICE, direction).stream_id, double.calls[before:]
        first_copy = next(n for n, call in enumerate(calls) if call.startswith("copy"))
        assert "record_event 0/0" in calls[:first_copy]
        assert f"wait_event 0/{stream}" in calls[:first_copy]


def test_bandwidth_is_timed_by_the_host_where_events_cannot_tell() -> None:
    runtime = AcceleratorRuntime(RecordingAccelerator(can_time=False))
    assert 0 < runtime.bandwidth(DEVICE, Direction.OUT) < math.inf


def test_bandwidth_of_a_full_device_is_measured_with_less() -> None:
    double = RecordingAccelerator(rate=1e10)
    double.fail("empty", torch.OutOfMemoryError("no room"))
    double.fail("empty", torch.OutOfMemoryError("no room"))
    assert math.isclose(AcceleratorRuntime(double).bandwidth(DEVICE, Direction.OUT), 1e10, rel_tol=1e-9)
    copies = {call for call in double.calls if call.startswith("copy")}
    assert {call.split()[1] for call in copies} == {str(4 * MIB)}


def test_bandwidth_of_a_device_without_a_megabyte_is_out_of_memory() -> None:
    double = RecordingAccelerator()
    for _ in range(4):
        double.fail("empty", torch.OutOfMemoryError("no room"))
    with pytest.raises(torch.OutOfMemoryError):
        AcceleratorRuntime(double).bandwidth(DEVICE, Direction.OUT)


def test_h10_the_memory_of_an_interrupted_probe_outlives_its_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    double = RecordingAccelerator()
    runtime = AcceleratorRuntime(double)

    def interrupted(event: Event) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(runtime, "synchronize", interrupted)
    for _ in range(2):  # the second time an event of the first is over
        with pytest.raises(KeyboardInterrupt):
            runtime.bandwidth(DEVICE, Direction.OUT)
        runtime.poll()
        ((event, held),) = runtime._kept
        assert not runtime.query(event), "it stands for the copy"
        alive = weakref.ref(held.target), weakref.ref(held.source)
        del event, held
        double.run_all()
        assert all(ref() is not None for ref in alive)
        runtime.poll()
        assert all(ref() is None for ref in alive)


def test_the_first_copies_are_over_before_others_are_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    double, said = RecordingAccelerator(can_time=False), list[str]()
    runtime = AcceleratorRuntime(double)
    probe = LinkProbe(runtime, double, EventPool(double), DEVICE, 1 << 12)
    synchronize = runtime.synchronize

    def noted(event: Event) -> None:
        assert not runtime.query(event), "there is something to wait for"
        said.append("waited")
        synchronize(event)

    monkeypatch.setattr(runtime, "synchronize", noted)
    double.during_copy = lambda: said.append("copy")
    assert probe.bandwidth(Direction.OUT) > 0
    assert said == ["copy", "waited", *["copy"] * 4]


# -- where there is none --------------------------------------------------------------------------------------------


def test_machine_without_an_accelerator_is_an_error_that_says_so() -> None:
    with pytest.raises(OffloadError, match="no usable accelerator"):
        AcceleratorRuntime(RecordingAccelerator(devices=0))


def test_device_that_is_not_the_accelerator_is_refused(runtime: AcceleratorRuntime) -> None:
    with pytest.raises(OffloadError, match="cpu is not the accelerator of this process, which is 'cuda'"):
        runtime.current_stream(torch.device("cpu"))


def test_device_without_streams_is_an_error_with_the_way_out() -> None:
    runtime = AcceleratorRuntime(RecordingAccelerator(can_stream=False))
    with pytest.raises(OffloadError, match=r"cannot create a stream on cuda:0.*run without Offload there"):
        runtime.transfer_stream(DEVICE, Direction.IN)


def test_process_has_one_runtime(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accelerator, "_runtime", None)
    monkeypatch.setattr(accelerator, "AcceleratorApi", lambda: RecordingAccelerator(devices=0))
    with pytest.raises(OffloadError, match="no usable accelerator"):
        accelerator_runtime()
    monkeypatch.setattr(accelerator, "AcceleratorApi", RecordingAccelerator)
    assert accelerator_runtime() is accelerator_runtime()


# -- the adapter ----------------------------------------------------------------------------------------------------

ON_A_DEVICE_WITHOUT_MEMORY = """
import torch, warnings
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend
_setup_privateuseone_for_python_backend("sim")
from eager_offload.runtime.accelerator import AcceleratorEvent, accelerator_runtime
from eager_offload.runtime.base import Direction

device = torch.device("sim", 0)
runtime = accelerator_runtime()
assert runtime.device_type == "sim"
compute, out = runtime.current_stream(torch.device("sim")), runtime.transfer_stream(device, Direction.OUT)
assert compute.device == out.device == device
with runtime.enter(out):
    assert torch.accelerator.current_stream(device) == out
assert torch.accelerator.current_device_index() == 0
event = runtime.record(compute)
assert isinstance(event, AcceleratorEvent) and event.recorded_on == compute
del event
event = runtime.record(out)  # by the event of torch's that has been used
runtime.wait(compute, event)
assert runtime.query(event)
runtime.synchronize(event)
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    assert runtime.host_buffer(1 << 20).numel() == 1 << 20
assert len(caught) == 1 and "could not be pinned" in str(caught[0].message)
print("every call was accepted")
"""


def test_adapter_calls_torch_as_torch_wants_to_be_called() -> None:
    """On a device that torch registers from Python: its streams and events order nothing, but the calls are real."""
    done = subprocess.run(
        [sys.executable, "-c", ON_A_DEVICE_WITHOUT_MEMORY], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "every call was accepted"
