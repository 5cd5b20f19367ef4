"""The accelerator runtime: its calls, what is selected afterwards, memory, links, and times of the device."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from eager_offload.errors import OffloadError
from eager_offload.runtime import accelerator
from eager_offload.runtime.accelerator import AcceleratorRuntime, accelerator_runtime
from eager_offload.runtime.base import Direction, Event, Layout
from eager_offload.tiers.host import HostTier
from eager_offload.tiers.memory import PAGE
from eager_offload.tiers.pool import HostSlot, Pool
from tests.threads import collect, on_threads
from tests.virtual_device import NAME, VirtualDevice
from tests.virtual_device.api import Api

HERE, THERE = torch.device(NAME, 0), torch.device(NAME, 1)
NBYTES, PROBE = 1 << 14, 1 << 16
LATE = 2e-3  # seconds that a copy takes at least


#: Slots, which are kept until their copies are over.
_slots: list[HostSlot] = []


@pytest.fixture
def api(virtual: VirtualDevice, monkeypatch: pytest.MonkeyPatch) -> Api:
    return Api(monkeypatch)


@pytest.fixture
def runtime(api: Api, virtual: VirtualDevice) -> Iterator[AcceleratorRuntime]:
    runtime = AcceleratorRuntime(probe_bytes=PROBE)
    yield runtime
    for index in range(virtual.devices):
        torch.accelerator.synchronize(index)
    _slots.clear()
    collect()
    runtime.close()
    runtime.poll()
    assert not api.registered


def slot_of(runtime: AcceleratorRuntime) -> HostSlot:
    slot = HostTier(Pool(runtime.host_buffer, sizes=runtime.slab_sizes()), budget=1 << 30).reserve(NBYTES)
    assert slot is not None
    _slots.append(slot)
    return slot


def block() -> Tensor:
    return torch.empty(NBYTES, dtype=torch.uint8, device=HERE)


def offload(runtime: AcceleratorRuntime) -> Event:
    event = runtime.copy(slot_of(runtime), block(), runtime.transfer_stream(HERE, Direction.OUT))
    runtime.synchronize(event)
    return event


def selection() -> list[object]:
    """What the calling thread has selected."""
    return [torch.accelerator.current_device_index(), *map(torch.accelerator.current_stream, (HERE, THERE))]


# -- calls, and what is selected afterwards ---------------------------------------------------------------------------


def test_h15_a_copy_costs_so_many_calls_and_the_host_does_not_wait(
    virtual: VirtualDevice, runtime: AcceleratorRuntime
) -> None:
    compute, out = runtime.current_stream(HERE), runtime.transfer_stream(HERE, Direction.OUT)
    source, slot = block(), slot_of(runtime)
    timed, plain = [], []
    with virtual.held():
        for number in range(accelerator._TIMED + 5):
            with virtual.noted() as calls:
                over = runtime.copy(slot, source, out, after=[runtime.record(compute)])
                runtime.wait(compute, over)
            (timed if number == 0 else plain)[:] = calls
        assert not runtime.query(over), "the host did not wait for the copy"
    there, here = f"0/{out.stream_id}", "0/0"
    assert timed == [
        *("make_event", f"record_event {here}", f"wait_event {there}"),
        *("make_event", f"record_event {there}"),  # the first copies tell how long they took
        *(f"set_stream {there}", f"copy {NBYTES} on {there}", f"set_stream {here}"),
        *("make_event", f"record_event {there}", f"wait_event {here}"),
    ]
    assert plain == [
        *(f"record_event {here}", f"wait_event {there}"),
        *(f"set_stream {there}", f"copy {NBYTES} on {there}", f"set_stream {here}"),
        *(f"record_event {there}", f"wait_event {here}"),
    ], "events are recorded again once what they stood for is of no use to anyone"


@pytest.mark.parametrize("call", [None, "copy", "empty", "set_stream"])
def test_h10_h30_a_copy_on_another_device_restores_what_was_selected_even_where_it_fails(
    api: Api, runtime: AcceleratorRuntime, call: str | None
) -> None:
    own = torch.Stream(device=HERE)
    slot, inward = slot_of(runtime), runtime.transfer_stream(THERE, Direction.IN)
    with own:
        before = selection()
        target = runtime.allocate(Layout(NBYTES), THERE, runtime.current_stream(THERE))

        def attempt() -> None:
            runtime.copy(target, slot, inward)
            runtime.allocate(Layout(NBYTES), THERE, inward)

        if call is not None:
            api.fail(call, torch.OutOfMemoryError("no room"))
            with pytest.raises(torch.OutOfMemoryError, match="no room"):
                attempt()
            assert selection() == before
        attempt()
        assert selection() == before
    assert target.device == THERE


def test_h29_threads_inside_one_transfer_stream_at_once_get_their_own_streams_back(
    api: Api, runtime: AcceleratorRuntime
) -> None:
    out, both_inside = runtime.transfer_stream(HERE, Direction.OUT), threading.Barrier(2)
    api.during_copy = lambda: both_inside.wait(timeout=60)

    def work(number: int) -> bool:
        torch.accelerator.set_stream(torch.Stream(device=HERE))
        before = selection()
        runtime.copy(slot_of(runtime), block(), out)
        return selection() == before

    assert on_threads(2, work) == [True, True]


# -- memory -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad, torch.enable_grad])
def test_h22_copies_are_exact_and_memory_is_ordinary_in_any_mode_of_the_caller(
    runtime: AcceleratorRuntime, mode: Callable[[], torch.no_grad]
) -> None:
    source = block()
    with mode(), torch.autocast("cpu", dtype=torch.bfloat16), torch.device("meta"):
        compute, slot = runtime.current_stream(HERE), slot_of(runtime)
        target = runtime.allocate(Layout(NBYTES, 16), HERE, compute)
        buffers = [runtime.host_buffer(PAGE), runtime.host_buffer(PAGE, pin_memory=False)]
        source.fill_(3)
        out = runtime.copy(slot, source, runtime.transfer_stream(HERE, Direction.OUT), [runtime.record(compute)])
        after = [out, runtime.record(compute)]
        runtime.synchronize(runtime.copy(target, slot, runtime.transfer_stream(HERE, Direction.IN), after))
    assert not any(one.is_inference() for one in (target, *buffers))
    assert target.eq(3).all()


# -- links ------------------------------------------------------------------------------------------------------------


def test_without_events_that_tell_the_time_the_host_does(virtual: VirtualDevice, runtime: AcceleratorRuntime) -> None:
    with virtual.without_a_clock():
        assert not runtime.tells_time(HERE)
        with virtual.slow_links(bandwidth=1e8):
            assert 0 < runtime.measure_link(HERE).out.median <= 1e8
        before = runtime.moment(runtime.current_stream(HERE))
        (span,) = runtime.spans(offload(runtime))
        assert runtime.seconds_between(span.began, span.ended) == 0.0
        after = runtime.moment(runtime.current_stream(HERE))
        assert runtime.seconds_between(before, after, synchronize=True) == 0.0


def test_h10_the_memory_of_an_interrupted_probe_outlives_its_copies(
    virtual: VirtualDevice, runtime: AcceleratorRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(event: Event) -> None:
        raise KeyboardInterrupt

    out, before = runtime.transfer_stream(HERE, Direction.OUT), torch.accelerator.memory_allocated()
    monkeypatch.setattr(runtime, "synchronize", interrupted)
    for _ in range(2):  # the second time an event of the first is over
        with virtual.held_stream(out):
            with pytest.raises(KeyboardInterrupt):
                runtime.measure_link(HERE)
            runtime.poll()
            collect()
            assert torch.accelerator.memory_allocated() >= before + PROBE
        torch.accelerator.synchronize()
        runtime.poll()
        assert torch.accelerator.memory_allocated() == before


# -- times ------------------------------------------------------------------------------------------------------------


def test_moments_of_a_stream_tell_what_lies_between_once_they_are_past(
    virtual: VirtualDevice, runtime: AcceleratorRuntime
) -> None:
    compute, out = runtime.current_stream(HERE), runtime.transfer_stream(HERE, Direction.OUT)
    source, slot = block(), slot_of(runtime)
    before = runtime.moment(compute)
    assert runtime.seconds_between(before, before, synchronize=True) == 0.0
    with virtual.slow_links(latency=LATE):
        with virtual.held_stream(out):
            runtime.wait(compute, copied := runtime.copy(slot, source, out))
            after = runtime.moment(compute)
            assert runtime.seconds_between(before, before) == 0.0
            assert runtime.seconds_between(before, after) is None
            assert runtime.tells_time(HERE)
            assert not runtime.query(copied), "the host has waited for a transfer, which another thread may be behind"
        assert runtime.seconds_between(before, after, synchronize=True) >= LATE


def test_h28_a_child_waits_for_no_moment_of_its_parents(virtual: VirtualDevice, runtime: AcceleratorRuntime) -> None:
    """Or the stalls of the child's own would stand behind it in the log for ever."""
    compute = runtime.current_stream(HERE)
    before = runtime.moment(compute)
    with virtual.held_stream(compute):
        after = runtime.moment(compute)
        assert runtime.seconds_between(before, after) is None
        child = os.fork()
        if child == 0:
            status = 1
            try:
                status = 0 if runtime.seconds_between(before, after) == 0.0 else 2
            finally:
                os._exit(status)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


# -- where there is none ----------------------------------------------------------------------------------------------


def test_a_process_has_one_runtime_and_without_an_accelerator_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accelerator, "_runtime", None)
    with monkeypatch.context() as patch:
        patch.setattr(torch.accelerator, "current_accelerator", lambda **_: None)
        with pytest.raises(OffloadError, match="no usable accelerator"):
            accelerator_runtime()
    assert accelerator_runtime() is accelerator_runtime()


class OneStream(type):
    """The class of a ``torch.Stream`` that cannot be made."""

    def __instancecheck__(cls, value: object) -> bool:
        return isinstance(value, STREAM)

    def __call__(cls, *_: object, **__: object) -> None:
        raise NotImplementedError("this device has one stream")


STREAM = torch.Stream


def test_a_device_that_cannot_serve_is_an_error_that_says_why(
    runtime: AcceleratorRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(OffloadError, match=f"cpu is not the accelerator of this process, which is '{NAME}'"):
        runtime.current_stream(torch.device("cpu"))
    monkeypatch.setattr(torch, "Stream", OneStream("Stream", (), {}))
    with pytest.raises(OffloadError, match=rf"cannot create a stream on {NAME}:0.*run without Offload there"):
        runtime.transfer_stream(HERE, Direction.IN)
