"""The disk tier behind an accelerator: device, pinned memory, disk and back, in a pipeline."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from eager_offload import Offload, OffloadError, TransferError
from eager_offload.runtime.accelerator import AcceleratorRuntime, accelerator_runtime
from eager_offload.runtime.base import Direction, Layout
from eager_offload.runtime.captures import AcceleratorEvent
from eager_offload.runtime.staging import Staging
from eager_offload.tiers.disk import DiskSlot
from tests.hazards.backends import assert_settled, gate_before
from tests.hazards.programs import Settled, assert_identical, assert_moved, copies_given_at_once
from tests.programs.parts.blocks import Step
from tests.runtime.simulated_rig import DistantSlot
from tests.threads import collect
from tests.virtual_device import NAME, VirtualDevice
from tests.virtual_device.backend import VirtualBackend

HERE = torch.device(NAME, 0)


@pytest.fixture
def runtime() -> AcceleratorRuntime:
    return accelerator_runtime()


@pytest.fixture
def backend(virtual: VirtualDevice) -> Iterator[VirtualBackend]:
    with VirtualBackend() as backend:
        yield backend
        backend.assert_nothing_is_held()


@pytest.fixture
def disk(backend: VirtualBackend, tmp_path: Path) -> Callable[..., Offload]:
    """Makes an ``Offload`` to the disk that moves everything."""
    return partial(backend.offload, tier="disk", disk_path=tmp_path)


@pytest.fixture
def offload(disk: Callable[..., Offload]) -> Offload:
    return disk()


@pytest.fixture
def limited(backend: VirtualBackend, runtime: AcceleratorRuntime) -> Iterator[Callable[[int], Staging]]:
    """Bounds the staging memory of each way."""
    before = runtime._staging

    def limit(nbytes: int) -> Staging:
        runtime._staging = Staging(runtime, runtime._enqueue, limit=nbytes)
        return runtime._staging

    yield limit
    runtime._staging.close()
    runtime._staging = before


def staging_bytes(staging: Staging) -> int:
    """Bytes of pinned memory through which the disk is served."""
    pools = [room._pool for room in (staging._out, staging._in)]
    return sum(pool.held_bytes for pool in pools if pool is not None)


def assert_trains(offload: Offload, steps: int = 1) -> None:
    for seed in range(steps):
        expected = Step(seed).forward(nullcontext()).backward()
        assert_identical(expected.result, Step(seed).forward(Settled(offload)).backward().result)


def test_a_step_with_checksums_and_staging_memory_for_one_tensor_at_a_time(
    disk: Callable[..., Offload], limited: Callable[[int], Staging]
) -> None:
    staging, offload = limited(8192), disk(verify=True)
    assert_trains(offload, 2)
    assert staging_bytes(staging) <= 3 * 8192, "the bound, and one pair of larger ones that travel alone"
    stats = assert_settled(offload)
    assert_moved(stats)
    assert stats.bytes_in > 0
    assert stats.disk_bytes_peak > stats.host_bytes_peak == 0
    offload.close()
    assert staging_bytes(staging) == 0


# -- stages -----------------------------------------------------------------------------------------------------------


def test_pack_goes_on_where_all_staging_room_is_taken(
    backend: VirtualBackend, disk: Callable[..., Offload], limited: Callable[[int], Staging]
) -> None:
    offload, staging = disk(step_tables=False), limited(1 << 16)
    steps = [Step(seed) for seed in range(8)]
    expected = [Step(seed).forward(nullcontext()).backward() for seed in range(8)]
    with gate_before(DiskSlot, "write") as gate:
        with backend.watching(), copies_given_at_once(backend):
            for step in steps:
                step.forward(offload)
        gate.wait_until_reached()
        assert staging_bytes(staging) == 1 << 16, "all of it is taken: eight forwards do not fit into 64 KiB"
        gate.open()
    assert offload.stats(synchronize=True).offloaded_bytes > 1 << 16
    assert staging_bytes(staging) == 1 << 16
    for step, alone in zip(steps, expected, strict=True):
        assert_identical(alone.result, step.backward().result)
    steps.clear()
    del step
    assert_moved(assert_settled(offload))


def test_h41_pack_goes_on_while_the_system_pins_memory(
    offload: Offload, runtime: AcceleratorRuntime, limited: Callable[[int], Staging], monkeypatch: pytest.MonkeyPatch
) -> None:
    limited(1 << 20)
    host_buffer, asked, pins, in_time = runtime.host_buffer, threading.Event(), threading.Event(), list[bool]()

    def slow(nbytes: int) -> Tensor:
        asked.set()
        in_time.append(pins.wait(60))
        return host_buffer(nbytes)

    monkeypatch.setattr(runtime, "host_buffer", slow)
    step, expected = Step(1), Step(1).forward(nullcontext()).backward()
    step.forward(offload)
    assert asked.wait(60)
    pins.set()
    offload.stats(synchronize=True)
    assert in_time
    assert all(in_time), "pack has waited for it"
    assert_identical(expected.result, step.backward().result)
    del step
    assert_moved(assert_settled(offload))


class Elsewhere(DistantSlot):
    """Gives zeros."""

    def read(self, target: Tensor) -> None:
        target.zero_()


def test_the_next_is_read_while_the_first_is_copied_back(
    virtual: VirtualDevice, runtime: AcceleratorRuntime, limited: Callable[[int], Staging]
) -> None:
    limited(4 << 20)
    compute, back, read = runtime.current_stream(HERE), runtime.transfer_stream(HERE, Direction.IN), threading.Event()

    class Noted(Elsewhere):
        def read(self, target: Tensor) -> None:
            super().read(target)
            read.set()

    targets = [runtime.allocate(Layout(1 << 20), HERE, compute).fill_(7) for _ in range(4)]
    with virtual.held_stream(back):
        slots = [Elsewhere(1 << 20), Noted(1 << 20), Elsewhere(1 << 20), Elsewhere(1 << 20)]
        events = [
            runtime.copy(target, slot, back, [runtime.record(compute)])
            for target, slot in zip(targets, slots, strict=True)
        ]
        assert read.wait(60), "the reader waits for the copy of what it read before"
    for event in events:
        runtime.synchronize(event)
    assert not any(virtual.peek(target).any() for target in targets)


def test_staging_memory_for_reloads_is_waited_for_rather_than_exceeded(
    virtual: VirtualDevice, runtime: AcceleratorRuntime, limited: Callable[[int], Staging]
) -> None:
    staging = limited(64 << 20)
    compute, back = runtime.current_stream(HERE), runtime.transfer_stream(HERE, Direction.IN)
    for megabytes in (32, 48, 33, 50):  # none of them fits beside, or into, the room of the one before
        target = runtime.allocate(Layout(megabytes << 20), HERE, compute).fill_(7)
        event = runtime.copy(target, Elsewhere(megabytes << 20), back, [runtime.record(compute)])
        runtime.synchronize(event)
        assert 0 < staging_bytes(staging) <= 64 << 20
        assert not virtual.peek(target).any()
    staging.close()
    runtime.poll()
    assert staging_bytes(staging) == 0


# -- failures and interrupts ------------------------------------------------------------------------------------------


def failing(call: Callable[..., Any], error: Callable[[], Exception], times: int) -> Callable[..., Any]:
    """``call`` that raises the first times, a new error each time: it holds the frames that it has come through."""
    left = iter(range(times))

    def fails(*arguments: Any, **named: Any) -> Any:
        if next(left, None) is not None:
            raise error()
        return call(*arguments, **named)

    return fails


def input_output_error() -> OSError:
    return OSError(errno.EIO, "Input/output error")


def test_h27_a_write_that_fails_leaves_the_source_on_the_device(
    offload: Offload, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(DiskSlot, "write", failing(DiskSlot.write, input_output_error, 3))
    with pytest.warns(RuntimeWarning, match="offloading failed, the saved tensor stays"):
        assert_trains(offload, 3)
    stats = assert_settled(offload)
    assert stats.kept_bytes["failed"] > 0
    assert stats.fallbacks["write_failed"] == 3
    assert_moved(stats, 0.5)


def test_h27_without_memory_to_stage_it_in_the_source_stays_on_the_device(
    offload: Offload, runtime: AcceleratorRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    none = failing(runtime.host_buffer, lambda: MemoryError("none left"), 1 << 20)
    monkeypatch.setattr(runtime, "host_buffer", none)
    with pytest.warns(RuntimeWarning, match="no .* bytes of memory left"):
        assert_trains(offload)
    assert assert_settled(offload).kept_bytes["failed"] > 0


def test_h27_a_read_that_fails_is_a_transfer_error_and_the_next_step_is_exact(
    offload: Offload, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(DiskSlot, "read", failing(DiskSlot.read, input_output_error, 1))
        step = Step(1).forward(Settled(offload))
        with pytest.raises(TransferError, match="disk tier failed") as caught:
            step.backward()
        assert (caught.value.errno, caught.value.tier) == (errno.EIO, "disk")
        del step, caught
    assert_trains(offload)
    assert_moved(assert_settled(offload))


def test_h10_room_outlives_a_copy_that_was_not_noted(
    virtual: VirtualDevice, offload: Offload, runtime: AcceleratorRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where it did not, its pages would be unregistered under the copy, which the device says."""
    staging = runtime._staging
    enqueue = staging._enqueue

    def interrupted(*args: Any, **kwargs: Any) -> AcceleratorEvent:
        enqueue(*args, **kwargs)
        raise KeyboardInterrupt

    step = Step(1).forward(Settled(offload))
    with virtual.held_stream(runtime.transfer_stream(HERE, Direction.OUT)):
        with monkeypatch.context() as patch:
            patch.setattr(staging, "_enqueue", interrupted)
            with pytest.raises(KeyboardInterrupt):
                Step(2).forward(offload)
        collect()
        staging.close()  # with that copy still to come
        runtime.poll()
    torch.accelerator.synchronize()
    step.backward()
    del step
    assert_settled(offload)


def interrupts(call: Callable[..., Any]) -> Callable[..., Any]:
    """``call`` with an interrupt right after it."""

    def interrupted(*arguments: Any) -> Any:
        call(*arguments)
        raise KeyboardInterrupt

    return interrupted


@pytest.mark.parametrize("where", ["after memory was taken", "before the writer has it", "when the writer has it"])
def test_h10_what_an_interrupted_call_took_or_left_to_the_writer_is_not_waited_for(
    where: str,
    virtual: VirtualDevice,
    runtime: AcceleratorRuntime,
    limited: Callable[[int], Staging],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    staging = limited(1 << 20)
    compute, stream = runtime.current_stream(HERE), runtime.transfer_stream(HERE, Direction.OUT)

    class Written(DistantSlot):
        def write(self, source: Tensor) -> None:
            pass

    def copy(slot: DistantSlot) -> Any:
        tensor = runtime.allocate(Layout(slot.nbytes), HERE, compute)
        return runtime.copy(slot, tensor, stream, [runtime.record(compute)])

    def refuse(work: object) -> None:
        raise KeyboardInterrupt

    runtime.synchronize(copy(Written(4096)))  # so that there is memory to be had at once
    with gate_before(Written, "write") as gate:
        if where == "after memory was taken":
            monkeypatch.setattr(staging._out, "take_at_once", interrupts(staging._out.take_at_once))
        else:
            copy(Written(1 << 20))
            gate.wait_until_reached()
            late = interrupts(staging._writer.submit) if where == "when the writer has it" else refuse
            monkeypatch.setattr(staging._writer, "submit", late)
        with pytest.raises(KeyboardInterrupt) as caught:
            copy(Written(4096))
        monkeypatch.undo()
    if where != "after memory was taken":  # what the traceback holds may still be left to the writer
        del caught
    runtime.synchronize(copy(Written(4096)))
    with gate_before(Written, "write") as gate:
        events = [copy(Written(4096))]
        gate.wait_until_reached()
        events.append(copy(Written(4096)))
        assert events[1].copied is not None, "it was left to the writer, which is busy"
    for event in events:
        runtime.synchronize(event)
    larger = copy(Written(2 << 20))
    waiting = threading.Thread(target=runtime.synchronize, args=(larger,), daemon=True)
    waiting.start()
    waiting.join(60)
    assert runtime.query(larger), "it waits for room that nobody has"


def test_h10_a_target_outlives_the_copy_that_the_reader_has_still_to_enqueue(
    virtual: VirtualDevice, disk: Callable[..., Offload], runtime: AcceleratorRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy, targets = runtime.copy, list[int]()

    def interrupted(target: Tensor, *args: Any, **kwargs: Any) -> Any:
        targets.append(target.data_ptr())
        copy(target, *args, **kwargs)
        raise KeyboardInterrupt

    offload = disk(prefetch_bytes=0)
    step = Step(1).forward(Settled(offload))
    with virtual.held_stream(runtime.transfer_stream(HERE, Direction.IN)):
        with gate_before(DiskSlot, "read") as gate, monkeypatch.context() as patch:
            patch.setattr(runtime, "copy", interrupted)
            with pytest.raises(KeyboardInterrupt):
                step.backward()
            gate.wait_until_reached()
            gate.open()
            runtime._staging._reader.record().wait()
        collect()
        fresh = [torch.empty(32, 32, device=HERE) for _ in range(64)]
        assert not {tensor.data_ptr() for tensor in fresh} & {*targets}, "its copy has not run"
        del fresh
    torch.accelerator.synchronize()
    del step
    assert_trains(offload)
    assert_moved(assert_settled(offload))


@pytest.mark.parametrize("tier", ["host", "disk"])
def test_h28_a_child_forked_in_mid_step_touches_nothing_of_its_parents(
    virtual: VirtualDevice, tier: str, backend: VirtualBackend
) -> None:
    offload = backend.offload(tier=tier)
    step, expected = Step(1).forward(offload), Step(1).forward(nullcontext()).backward()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            with virtual.noted() as calls:
                offload.stats()
                # Not by backward, which autograd refuses in a child once it has threads for devices.
                assert step.loss is not None
                assert step.loss.grad_fn is not None
                with pytest.raises(OffloadError, match="forked"):
                    _ = step.loss.grad_fn.next_functions[0][0]._saved_self  # type: ignore[union-attr]  # it has one
                del step
                collect()
                offload.stats()
                backend.runtime.poll()
            status = 0 if calls == [] else 2
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert_identical(expected.result, step.backward().result)
    del step
    assert_moved(assert_settled(offload))
