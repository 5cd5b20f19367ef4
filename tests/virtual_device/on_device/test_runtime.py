"""The accelerator runtime: what is selected after its calls, memory, links, and times of the device."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable

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
NBYTES = 1 << 14


def slot_of(runtime: AcceleratorRuntime) -> HostSlot:
    slot = HostTier(Pool(runtime.host_buffer, sizes=runtime.slab_sizes()), budget=1 << 30).reserve(NBYTES)
    assert slot is not None
    return slot


def block() -> Tensor:
    return torch.empty(NBYTES, dtype=torch.uint8, device=HERE)


def selection() -> list[object]:
    """What the calling thread has selected."""
    return [torch.accelerator.current_device_index(), *map(torch.accelerator.current_stream, (HERE, THERE))]


# -- what is selected afterwards --------------------------------------------------------------------------------------


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
        runtime.synchronize(runtime.copy(slot_of(runtime), block(), out))
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
            assert torch.accelerator.memory_allocated() >= before + (1 << 16), "what a probe copies"
        torch.accelerator.synchronize()
        runtime.poll()
        assert torch.accelerator.memory_allocated() == before


# -- times ------------------------------------------------------------------------------------------------------------


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
