"""Times of an accelerator on the host's clock, on the recording double, whose clock runs in copies alone."""

from __future__ import annotations

import time

import pytest
import torch

from eager_offload.runtime import accelerator
from eager_offload.runtime.accelerator import AcceleratorRuntime
from eager_offload.runtime.base import Direction, Event
from tests.doubles.recording_accelerator import RecordingAccelerator
from tests.runtime.accelerator_double import DEVICE, NBYTES, host_slot
from tests.runtime.simulated_rig import DistantSlot


class Machine:
    """The double, and the runtime on it."""

    def __init__(self) -> None:
        self.double = RecordingAccelerator()
        self.runtime = AcceleratorRuntime(self.double)

    @property
    def compute(self) -> torch.Stream:
        return self.runtime.current_stream(DEVICE)


@pytest.fixture
def machine() -> Machine:
    return Machine()


def offload(machine: Machine) -> Event:
    source = machine.double.empty(NBYTES, DEVICE)
    out = machine.runtime.transfer_stream(DEVICE, Direction.OUT)
    event = machine.runtime.copy(host_slot(machine.runtime, NBYTES), source, out, ())
    machine.double.run_all()
    return event


def use_up_timed_copies(machine: Machine) -> None:
    """The first copies of a stream, and then one in as many, tell how long they took in any case."""
    for _ in range(accelerator._TIMED + 1):
        offload(machine)


def test_the_first_copies_and_some_later_ones_tell_how_long_they_took(machine: Machine) -> None:
    copies = [machine.runtime.seconds(offload(machine)) for _ in range(2 * accelerator._TIMED + 2)]
    timed = [number for number, seconds in enumerate(copies) if seconds is not None]
    assert timed == [*range(accelerator._TIMED + 1), 2 * accelerator._TIMED]
    assert [copies[number] for number in timed] == pytest.approx([NBYTES / machine.double.rate] * len(timed))


def test_a_copy_tells_when_it_ran_once_it_is_asked(machine: Machine) -> None:
    runtime = machine.runtime
    use_up_timed_copies(machine)
    assert runtime.hops(offload(machine)) == ()
    began = time.perf_counter()
    runtime.start_timing(DEVICE)
    before, first, second = time.perf_counter(), offload(machine), offload(machine)
    (one,), (other,) = runtime.hops(first), runtime.hops(second)
    assert one.stop - one.start == pytest.approx(NBYTES / machine.double.rate)
    assert began <= one.start <= before, "the origin of the device's clock is a moment of the host's"
    assert other.start == pytest.approx(one.stop)
    runtime.stop_timing(DEVICE)
    assert runtime.hops(offload(machine)) == ()
    assert runtime.hops(first) == (one,), "what was measured stays known"


def test_a_mark_is_a_moment_of_its_stream(machine: Machine) -> None:
    runtime = machine.runtime
    runtime.start_timing(DEVICE)
    out = runtime.transfer_stream(DEVICE, Direction.OUT)
    first = runtime.mark(out)
    event = offload(machine)
    second = runtime.mark(out)
    (hop,) = runtime.hops(event)
    assert runtime.time_of(first) == pytest.approx(hop.start)
    assert runtime.time_of(second) == pytest.approx(hop.stop)
    runtime.copy(host_slot(runtime, NBYTES), machine.double.empty(NBYTES, DEVICE), out, ())
    third = runtime.mark(out)
    assert runtime.time_of(third) == pytest.approx(hop.stop + NBYTES / machine.double.rate), "it has come by then"


def test_two_may_want_to_know_and_the_last_ends_it(machine: Machine) -> None:
    runtime = machine.runtime
    use_up_timed_copies(machine)
    runtime.start_timing(DEVICE)
    runtime.start_timing(DEVICE)
    runtime.stop_timing(DEVICE)
    assert len(runtime.hops(offload(machine))) == 1
    runtime.stop_timing(DEVICE)
    assert runtime.hops(offload(machine)) == ()


def test_where_events_do_not_tell_the_time_marks_are_the_hosts(machine: Machine) -> None:
    machine.double.can_time = False
    runtime = machine.runtime
    runtime.start_timing(DEVICE)
    before = time.perf_counter()
    mark = runtime.mark(machine.compute)
    assert before <= runtime.time_of(mark) <= time.perf_counter()
    assert runtime.hops(offload(machine)) == ()
    runtime.stop_timing(DEVICE)


def test_moments_of_a_stream_tell_what_lies_between_once_they_are_past(machine: Machine) -> None:
    runtime, out = machine.runtime, machine.runtime.transfer_stream(DEVICE, Direction.OUT)
    source = machine.double.empty(NBYTES, DEVICE)
    machine.double.run_all()
    before = runtime.moment(machine.compute)
    machine.double.run_all()
    copied = runtime.copy(host_slot(runtime, NBYTES), source, out, ())
    runtime.wait(machine.compute, copied)
    after = runtime.moment(machine.compute)
    assert runtime.is_past(before)
    assert not runtime.is_past(after), "no thread waits for it"
    assert runtime.seconds_between(before, after) is None
    machine.double.run_all()
    assert runtime.is_past(after)
    assert runtime.seconds_between(before, after) == pytest.approx(NBYTES / machine.double.rate)
    copied = runtime.copy(host_slot(runtime, NBYTES), source, out, ())
    assert runtime.tells_time(DEVICE)
    assert not runtime.query(copied), "the host has waited for a transfer, which another thread's pack may be behind"
    machine.double.run_all()
    machine.double.can_time = False
    assert not runtime.tells_time(DEVICE)


def test_an_event_that_became_part_of_a_captured_graph_is_no_moment(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    runtime = machine.runtime
    runtime.start_timing(DEVICE)
    before = time.perf_counter()
    mark, event = runtime.mark(machine.compute), offload(machine)
    after = time.perf_counter()

    def refuse(*arguments: object) -> float:
        raise RuntimeError("operation not permitted on an event last recorded in a capturing stream")

    monkeypatch.setattr("tests.doubles.recording_streams.RecordingEvent.elapsed_time", refuse)
    assert runtime.hops(event) == ()
    assert before <= runtime.time_of(mark) <= after
    runtime.stop_timing(DEVICE)


def test_the_way_to_a_disk_has_two_legs(machine: Machine) -> None:
    runtime = machine.runtime
    runtime.start_timing(DEVICE)
    source = machine.double.empty(NBYTES, DEVICE)
    slot = DistantSlot(NBYTES)
    event = runtime.copy(slot, source, runtime.transfer_stream(DEVICE, Direction.OUT), ())
    runtime.synchronize(event)  # the writer's thread alone runs the double meanwhile
    tier, device = runtime.hops(event)
    assert (tier.name, device.name) == ("disk", "")
    assert device.stop - device.start == pytest.approx(NBYTES / machine.double.rate)
    target = machine.double.empty(NBYTES, DEVICE)
    back = runtime.copy(target, slot, runtime.transfer_stream(DEVICE, Direction.IN), ())
    runtime.synchronize(back)
    assert [hop.name for hop in runtime.hops(back)] == ["disk", ""]
    runtime.stop_timing(DEVICE)
    runtime._staging.close()
