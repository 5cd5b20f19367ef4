"""What only a real device can show of the accelerator runtime itself, on the accelerator of this machine.

That copies are in order there, in every way that a step has them, is for the scenarios in ``tests/gpu`` to show.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from eager_offload.runtime.base import ALIGNMENT, Direction, Layout
from eager_offload.tiers.arena import Arena
from eager_offload.tiers.host import HostTier
from tests.gpu.machine import Machine

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.accelerator.is_available(), reason="torch finds no accelerator on this machine"),
]

MIB = 1 << 20


@pytest.fixture
def machine() -> Iterator[Machine]:
    machine = Machine()
    yield machine
    machine.finish()


def test_host_goes_on_while_a_copy_waits_for_compute(machine: Machine) -> None:
    runtime, compute = machine.runtime, machine.current
    out = runtime.transfer_stream(machine.device, Direction.OUT)
    source = torch.empty(MIB, dtype=torch.uint8, device=machine.device)
    slot = HostTier(Arena(runtime.host_buffer), budget=1 << 30).reserve(MIB)
    assert slot is not None
    runtime.synchronize(runtime.copy(slot, source, out, [runtime.record(compute)]))
    machine.doze()
    source.fill_(7)
    ready = runtime.record(compute)
    copied = runtime.copy(slot, source, out, [ready])
    runtime.wait(compute, copied)
    assert not runtime.query(ready), "the device is still busy, so that no call above waited for it"
    assert not runtime.query(copied)
    runtime.synchronize(copied)
    assert runtime.query(copied)
    assert slot.tensor.eq(7).all()


def test_h15_failure_inside_a_transfer_stream_restores_the_selection(machine: Machine) -> None:
    with machine.computing_on(machine.side_stream()):
        before = torch.accelerator.current_device_index(), machine.current
        back = machine.runtime.transfer_stream(machine.device, Direction.IN)
        with pytest.raises(torch.OutOfMemoryError):
            machine.runtime.allocate(Layout(1 << 50), machine.device, back)
        assert (torch.accelerator.current_device_index(), machine.current) == before


def test_host_buffers_are_pinned_and_page_aligned(machine: Machine) -> None:
    pinned, pageable = machine.runtime.host_buffer(MIB), machine.runtime.host_buffer(MIB, pin_memory=False)
    assert pinned.is_pinned()
    assert not pageable.is_pinned()
    assert pinned.data_ptr() % 4096 == pageable.data_ptr() % 4096 == 0


def test_targets_have_the_phase_that_was_asked_for_and_need_no_second_attempt(machine: Machine) -> None:
    for nbytes in (1, 4096, MIB):
        target = machine.runtime.allocate(Layout(nbytes), machine.device, machine.current)
        assert target.data_ptr() % ALIGNMENT == 0
        assert target.untyped_storage().nbytes() == nbytes
        for alignment_offset in (1, 4, 16, 60, 63):
            target = machine.runtime.allocate(Layout(nbytes, alignment_offset), machine.device, machine.current)
            assert target.data_ptr() % ALIGNMENT == alignment_offset
            assert target.shape == (nbytes,)


@pytest.mark.parametrize("direction", Direction)
def test_bandwidth_is_that_of_a_bus(machine: Machine, direction: Direction) -> None:
    found = machine.runtime.bandwidth(machine.device, direction)
    assert 1e8 < found < 1e13
    assert machine.runtime.bandwidth(machine.device, direction) == found
