"""The disk tier behind an accelerator: device, pinned memory, disk and back, on the recording double."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from eager_offload import Offload, OffloadError, TransferError
from eager_offload.runtime.accelerator import AcceleratorEvent
from eager_offload.runtime.base import Direction, Layout
from eager_offload.runtime.staging import StagedEvent, Staging
from eager_offload.tiers.base import ByteRegion
from eager_offload.tiers.disk import DiskSlot
from tests.doubles.training_accelerator import TrainingAccelerator
from tests.hazards.backends import Gate, assert_settled, transfer_threads
from tests.hazards.blocks import Step
from tests.hazards.programs import REGIMES, Regime, Settled, assert_identical, assert_moved
from tests.runtime.simulated_rig import DistantSlot
from tests.runtime.test_accelerator_step import (
    Program,
    Streams,
    each_step_on_another_stream,
    half_of_each_graph,
    on_one_stream,
)
from tests.simulation.checker import Checker
from tests.simulation.log import Operation, Recorded, Synchronized
from tests.threads import collect

CPU = torch.device("cpu")


@pytest.fixture
def double() -> Iterator[TrainingAccelerator]:
    double = TrainingAccelerator()
    yield double
    assert transfer_threads() == [], "a thread outlived the last Offload"


def staging_bytes(staging: Staging) -> int:
    """Bytes of pinned memory through which the disk is served."""
    arenas = [room._arena for room in (staging._out, staging._in)]
    return sum(arena.held_bytes for arena in arenas if arena is not None)


def make_offload(double: TrainingAccelerator, path: Path, **fields: Any) -> Offload:
    return Offload(
        runtime=double.runtime, **{"tier": "disk", "disk_path": path, "min_bytes": 0, "keep_last_bytes": 0, **fields}
    )


@contextmanager
def disk_in_the_log(double: TrainingAccelerator, monkeypatch: pytest.MonkeyPatch) -> Iterator[Checker]:
    """What the threads read and write is in the log too, as what the host does: at once, and over when it returns."""
    write, read = DiskSlot.write, DiskSlot.read

    def note(read: ByteRegion, written: ByteRegion, what: str) -> None:
        if double.log is not None:
            over = threading.Event()
            double.log.write(Operation("disk", (read,), (written,), what))
            double.log.write(Recorded("disk", over))
            double.log.write(Synchronized(over))

    def logged_write(slot: DiskSlot, source: Tensor) -> None:
        note(double.name(source), slot.region, "write to disk")
        write(slot, source)

    def logged_read(slot: DiskSlot, target: Tensor) -> None:
        note(slot.region, double.name(target), "read from disk")
        read(slot, target)

    with monkeypatch.context() as patch, double.checked() as checker:
        patch.setattr(DiskSlot, "write", logged_write)
        patch.setattr(DiskSlot, "read", logged_read)
        yield checker


# -- exact and ordered ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("regime", REGIMES, ids=str)
@pytest.mark.parametrize("program", [each_step_on_another_stream, half_of_each_graph])
def test_steps_are_exact_and_ordered(
    program: Program, regime: Regime, double: TrainingAccelerator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = program(nullcontext(), Streams(None))
    with disk_in_the_log(double, monkeypatch) as checker:
        offload = make_offload(double, tmp_path, **regime.fields)
        assert_identical(expected, program(regime.around(offload), Streams(double)))
        stats = assert_settled(offload)
        offload.close()
    checker.assert_clean()
    assert_moved(stats)
    assert stats.bytes_in > 0 or not regime.settled
    assert stats.disk_bytes_peak > 0
    assert stats.host_bytes_peak == 0


def test_a_step_with_checksums_and_staging_memory_for_one_tensor_at_a_time(
    double: TrainingAccelerator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    double.runtime._staging = Staging(double.runtime, double.runtime._enqueue, limit=8192)
    expected = on_one_stream(nullcontext(), Streams(None))
    with disk_in_the_log(double, monkeypatch) as checker:
        offload = make_offload(double, tmp_path, verify=True)
        assert_identical(expected, on_one_stream(Settled(offload), Streams(double)))
        assert staging_bytes(double.runtime._staging) <= 3 * 8192, (
            "the bound, and one pair of larger ones that travel alone"
        )
        stats = assert_settled(offload)
        offload.close()
    checker.assert_clean()
    assert_moved(stats)
    assert stats.bytes_in > 0
    assert staging_bytes(double.runtime._staging) == 0


def test_the_host_tier_spills_to_the_disk(double: TrainingAccelerator, tmp_path: Path) -> None:
    expected = on_one_stream(nullcontext(), Streams(None))
    with double.checked() as checker:
        offload = make_offload(double, tmp_path, tier="auto", host_budget=1 << 22)
        assert_identical(expected, on_one_stream(Settled(offload), Streams(double)))
        some = offload.stats()
        offload.close()
        offload = make_offload(double, tmp_path, tier="auto", host_budget=1 << 12)
        with pytest.warns(RuntimeWarning, match="the host tier is full"):
            assert_identical(expected, on_one_stream(Settled(offload), Streams(double)))
        stats = assert_settled(offload)
        offload.close()
    checker.assert_clean()
    assert_moved(stats)
    assert some.host_bytes_peak > 0
    assert some.disk_bytes_peak == 0, "the first tier has room for all"
    assert stats.disk_bytes_peak > 0
    assert stats.demotions["host_to_disk"] > 0


# -- stages ---------------------------------------------------------------------------------------------------------


@contextmanager
def gated(monkeypatch: pytest.MonkeyPatch, name: str) -> Iterator[Gate]:
    gate, original = Gate(), getattr(DiskSlot, name)

    def wait_first(slot: DiskSlot, tensor: Tensor) -> None:
        gate.pass_through()
        original(slot, tensor)

    with monkeypatch.context() as patch:
        patch.setattr(DiskSlot, name, wait_first)
        try:
            yield gate
        finally:
            gate.open()


def test_the_next_copies_leave_the_device_while_the_first_is_written(
    double: TrainingAccelerator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    step, expected = Step(1), Step(1)
    offload = make_offload(double, tmp_path)
    with gated(monkeypatch, "write") as gate:
        step.forward(offload)
        gate.wait_until_reached()
        double.run_all()
        out = double.runtime.transfer_stream(CPU, Direction.OUT)
        assert double.pending(out) == 0, "every copy into staging has run, while nothing is on the disk yet"
        assert offload.stats().inflight_bytes_peak == offload.stats().offloaded_bytes
        gate.open()
    offload.stats(synchronize=True)
    step.backward()
    expected.forward(nullcontext())
    expected.backward()
    assert_identical(expected.result, step.result)
    assert_moved(assert_settled(offload))
    offload.close()


def test_the_first_reload_reaches_the_device_while_the_next_is_read(
    double: TrainingAccelerator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reader does not wait for the device: it is at the second read while the first copy has not run."""
    step = Step(1)
    offload = make_offload(double, tmp_path)
    step.forward(Settled(offload))
    reads: list[int] = []
    reached, original = threading.Event(), DiskSlot.read
    back = double.runtime.transfer_stream(CPU, Direction.IN)
    copies = sum(call.endswith(f" on 0/{back.stream_id}") for call in double.calls)

    def counted(slot: DiskSlot, target: Tensor) -> None:
        reads.append(double.pending(back))
        if len(reads) == 3:
            reached.set()
        original(slot, target)

    with monkeypatch.context() as patch:
        patch.setattr(DiskSlot, "read", counted)
        step.backward()
    assert reached.wait(60)
    assert copies == 0
    assert sum(call.endswith(f" on 0/{back.stream_id}") for call in double.calls) >= 3
    assert_moved(assert_settled(offload))
    offload.close()


def test_pack_waits_for_staging_room_only_when_all_of_it_is_taken(
    double: TrainingAccelerator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    double.runtime._staging = staging = Staging(double.runtime, double.runtime._enqueue, limit=1 << 16)
    offload, steps = make_offload(double, tmp_path), [Step(seed) for seed in range(8)]
    done = threading.Event()

    def forward() -> None:
        for step in steps:
            step.forward(offload)
        done.set()

    with gated(monkeypatch, "write") as gate:
        thread = threading.Thread(target=forward)
        thread.start()
        gate.wait_until_reached()
        assert not done.wait(0.2), "eight forwards do not fit into 64 KiB of staging"
        assert staging_bytes(staging) <= 1 << 16
        gate.open()
        thread.join()
    assert done.is_set()
    steps[-1].backward()
    steps.clear()
    assert_moved(assert_settled(offload))
    offload.close()


# -- failures -------------------------------------------------------------------------------------------------------


def failing(call: Callable[[DiskSlot, Tensor], None], *, times: int) -> Callable[[DiskSlot, Tensor], None]:
    left = [times]

    def fails(slot: DiskSlot, tensor: Tensor) -> None:
        if left[0] > 0:
            left[0] -= 1
            raise OSError(errno.EIO, "Input/output error")
        call(slot, tensor)

    return fails


def test_h27_a_write_that_fails_leaves_the_source_on_the_device(
    double: TrainingAccelerator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = on_one_stream(nullcontext(), Streams(None))
    with disk_in_the_log(double, monkeypatch) as checker, monkeypatch.context() as patch:
        patch.setattr(DiskSlot, "write", failing(DiskSlot.write, times=3))
        offload = make_offload(double, tmp_path)
        with pytest.warns(RuntimeWarning, match="offloading failed, the saved tensor stays"):
            assert_identical(expected, on_one_stream(Settled(offload), Streams(double)))
        stats = assert_settled(offload)
        offload.close()
    checker.assert_clean()
    assert stats.demotions["write_failed"] == 3
    assert stats.kept_bytes["failed"] > 0
    assert_moved(stats, 0.5)


def test_h27_a_read_that_fails_is_a_transfer_error_and_the_next_step_is_exact(
    double: TrainingAccelerator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    offload, expected = make_offload(double, tmp_path), Step(2)
    with double.checked() as checker:
        with monkeypatch.context() as patch:
            patch.setattr(DiskSlot, "read", failing(DiskSlot.read, times=1))
            step = Step(1)
            step.forward(Settled(offload))
            with pytest.raises(TransferError, match="disk tier failed") as caught:
                step.backward()
            assert caught.value.errno == errno.EIO
            assert caught.value.tier == "disk"
            del step, caught
        step = Step(2)
        step.forward(Settled(offload))
        step.backward()
        expected.forward(nullcontext())
        expected.backward()
        assert_identical(expected.result, step.result)
        del step
        assert_moved(assert_settled(offload))
        offload.close()
    checker.assert_clean()


def test_no_memory_for_staging_leaves_the_source_on_the_device(
    double: TrainingAccelerator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    offload, step = make_offload(double, tmp_path), Step(1)

    def refused(nbytes: int, **_: object) -> Tensor:
        raise MemoryError("none left")

    monkeypatch.setattr(double.runtime, "host_buffer", refused)
    with pytest.warns(RuntimeWarning, match="no .* bytes of memory left"):
        step.forward(Settled(offload))
    step.backward()
    stats = offload.stats()
    assert stats.offloaded_bytes == 0
    assert stats.kept_bytes["failed"] > 0
    offload.close()


class Elsewhere(DistantSlot):
    """Gives zeros."""

    def read(self, target: Tensor) -> None:
        target.zero_()


def test_a_host_that_waits_for_a_reload_waits_for_the_device_too(double: TrainingAccelerator) -> None:
    runtime = double.runtime
    compute, back = runtime.current_stream(CPU), runtime.transfer_stream(CPU, Direction.IN)
    target = runtime.allocate(Layout(4096), CPU, compute)
    target.fill_(7)
    event = runtime.copy(target, Elsewhere(4096), back, [runtime.record(compute)])
    runtime.synchronize(event)
    assert not target.any()
    assert double.pending(back) == 0
    assert runtime.query(event)
    runtime._staging.close()


def test_staging_memory_for_reloads_is_waited_for_rather_than_exceeded() -> None:
    double = TrainingAccelerator(can_register=True)
    runtime, limit = double.runtime, 64 << 20
    runtime._staging = staging = Staging(runtime, runtime._enqueue, limit=limit)
    compute, back = runtime.current_stream(CPU), runtime.transfer_stream(CPU, Direction.IN)
    for megabytes in (32, 48, 33, 50):  # none of them fits beside, or into, the room of the one before
        target = runtime.allocate(Layout(megabytes << 20), CPU, compute)
        event = runtime.copy(target, Elsewhere(megabytes << 20), back, [runtime.record(compute)])
        assert isinstance(event, StagedEvent)
        assert event.work is not None
        event.work.result()
        assert 0 < staging_bytes(staging) <= limit
        del target
    runtime.synchronize(event)
    staging.close()
    runtime.poll()
    assert staging_bytes(staging) == 0
    assert double.registered == {}


# -- interrupts -----------------------------------------------------------------------------------------------------


def test_h10_room_outlives_a_copy_that_was_not_noted(
    double: TrainingAccelerator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    staging = double.runtime._staging
    enqueue = staging._enqueue

    def interrupted(*args: Any) -> AcceleratorEvent:
        enqueue(*args)
        raise KeyboardInterrupt

    with double.checked() as checker:
        offload, step = make_offload(double, tmp_path), Step(1)
        step.forward(offload)
        for again in (True, False):
            with monkeypatch.context() as patch:
                patch.setattr(staging, "_enqueue", interrupted)
                with pytest.raises(KeyboardInterrupt):
                    Step(2).forward(offload)
            if again:
                offload.stats(synchronize=True)
        step.backward()
        del step
        for lane in offload._offloaders.all():
            lane.poll()
        staging.close()  # with that copy still to come
        _ = torch.zeros(1)  # whatever went is in the log by now
        assert_settled(offload)
        offload.close()
    checker.assert_clean()


def test_h10_a_target_outlives_the_copy_that_the_reader_has_still_to_enqueue(
    double: TrainingAccelerator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runtime = double.runtime
    copy = runtime.copy

    def interrupted(*args: Any, **kwargs: Any) -> Any:
        copy(*args, **kwargs)
        raise KeyboardInterrupt

    with double.checked() as checker:
        offload, step = make_offload(double, tmp_path, prefetch_bytes=0), Step(1)
        step.forward(Settled(offload))
        with gated(monkeypatch, "read") as gate, monkeypatch.context() as patch:
            patch.setattr(runtime, "copy", interrupted)
            with pytest.raises(KeyboardInterrupt):
                step.backward()
            gate.wait_until_reached()
            # What the interrupted call itself left behind is over: all but the reader let go of the target.
            runtime.synchronize_kept()
            gate.open()
            runtime._staging._reader.record().wait()
        collect()
        _ = torch.zeros(1)  # whatever went is in the log by now
        step.forward(Settled(offload))
        step.backward()
        del step
        assert_moved(assert_settled(offload))
        offload.close()
    checker.assert_clean()


# -- fork -----------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
@pytest.mark.parametrize("tier", ["host", "disk"])
def test_h28_a_child_forked_in_mid_step_touches_nothing_of_its_parents(
    tier: str, double: TrainingAccelerator, tmp_path: Path
) -> None:
    offload, step, expected = make_offload(double, tmp_path, tier=tier, disk_path=None), Step(1), Step(1)
    step.forward(offload)
    child = os.fork()
    if child == 0:
        status = 1
        try:
            double.calls.clear()
            offload.stats()
            # Not by backward, which autograd refuses in a child once it has threads for devices.
            assert step.loss is not None
            assert step.loss.grad_fn is not None
            with pytest.raises(OffloadError, match="forked"):
                _ = step.loss.grad_fn.next_functions[0][0]._saved_self  # type: ignore[union-attr]  # it has one
            del step
            collect()
            offload.stats()
            double.runtime.poll()
            status = 0 if double.calls == [] else 2
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    step.backward()
    expected.forward(nullcontext())
    expected.backward()
    assert_identical(expected.result, step.result)
    del step
    assert_moved(assert_settled(offload))
    offload.close()


# -- without one wait -----------------------------------------------------------------------------------------------


def test_a_writer_that_does_not_wait_for_the_copy_is_reported(
    double: TrainingAccelerator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(AcceleratorEvent, "synchronize", lambda event: None)
    with disk_in_the_log(double, monkeypatch) as checker:
        offload = make_offload(double, tmp_path)
        each_step_on_another_stream(Settled(offload), Streams(double))
        offload.close()
    assert any("write to disk" in str(found) for found in checker.violations)


def test_a_reader_that_does_not_wait_for_the_last_copy_from_its_room_is_reported(
    double: TrainingAccelerator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    double.runtime._staging = Staging(double.runtime, double.runtime._enqueue, limit=1 << 14)
    synchronize = double.runtime.synchronize

    def forgetful(event: Any) -> None:
        if not threading.current_thread().name.endswith("read"):
            synchronize(event)

    monkeypatch.setattr(double.runtime, "synchronize", forgetful)
    with disk_in_the_log(double, monkeypatch) as checker:
        offload = make_offload(double, tmp_path)
        each_step_on_another_stream(Settled(offload), Streams(double))
        offload.close()
    assert any("read from disk" in str(found) for found in checker.violations)
