"""The scenarios of the recording double, and what only a real device can show, on the accelerator of this machine."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from eager_offload.runtime.accelerator import accelerator_runtime
from eager_offload.runtime.base import ALIGNMENT, Direction, Layout
from eager_offload.tiers.arena import Arena
from eager_offload.tiers.base import Slot
from eager_offload.tiers.host import HostTier
from tests.gpu.machine import keep_busy
from tests.runtime.accelerator_scenarios import SCENARIOS, Machine, Outcome, Scenario, assert_exact, pattern

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.accelerator.is_available(), reason="torch finds no accelerator on this machine"),
]


class Packed(NamedTuple):
    """A saved tensor in host memory."""

    slot: Slot
    shape: torch.Size
    dtype: torch.dtype


#: About a tenth of a second on a device of 1.5 GHz: much longer than it takes to enqueue a scenario.
SLEEP_CYCLES = 150_000_000


class DeviceMachine(Machine):
    """The accelerator as a machine for scenarios."""

    def __init__(self) -> None:
        runtime = accelerator_runtime()
        # The virtual device copies with the CPU, which is late by itself.
        self.nbytes = 256 << 10 if runtime.device_type == "virtual" else 4 << 20
        super().__init__(runtime, torch.device(runtime.device_type, torch.accelerator.current_device_index()))
        self._side_streams: list[torch.Stream] = []
        self._taken = 0

    def side_stream(self) -> torch.Stream:
        if self._taken == len(self._side_streams):
            self._side_streams.append(torch.Stream(device=self.device))
        self._taken += 1
        return self._side_streams[self._taken - 1]

    def again(self) -> None:
        """The next scenario takes the side streams of the last one, for which there is memory in the cache by now."""
        self._taken = 0

    def empty(self, nbytes: int, stream: torch.Stream) -> Tensor:
        with self.selected(stream):
            return torch.empty(nbytes, dtype=torch.uint8, device=self.device)

    def launch(self, stream: torch.Stream, kernel: Callable[..., object], *args: Tensor, what: str) -> None:
        with self.selected(stream):
            kernel(*args)

    def delay(self, stream: torch.Stream) -> None:
        with self.selected(stream):
            keep_busy(self.device, SLEEP_CYCLES)

    def finish(self) -> None:
        torch.accelerator.synchronize(self.device)


@pytest.fixture
def machine() -> Iterator[DeviceMachine]:
    torch.accelerator.empty_cache()
    machine = DeviceMachine()
    # What is enqueued for the first time may load a kernel or get memory from the driver, and both may make the host
    # wait for the device.
    warm = machine.painted(0, machine.compute)
    warm.copy_(warm.clone()).fill_(0)
    machine.delay(machine.compute)
    machine.finish()
    del warm
    yield machine
    machine.finish()


def selection(machine: DeviceMachine) -> list[object]:
    return [torch.accelerator.current_device_index(), machine.compute]


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_scenario_is_exact_on_the_device(machine: DeviceMachine, scenario: Scenario) -> None:
    before = selection(machine)
    assert_exact(scenario(machine))
    machine.again()
    assert_exact(scenario(machine))
    assert selection(machine) == before


def test_host_goes_on_while_a_copy_waits_for_compute(machine: DeviceMachine) -> None:
    runtime, compute = machine.runtime, machine.compute
    source, slot = machine.empty(machine.nbytes, compute), machine.slot()
    machine.delay(compute)
    machine.launch(compute, lambda out: out.fill_(7), source, what="forward")
    ready = runtime.record(compute)
    runtime.wait(machine.out, ready)
    runtime.copy(slot, source, machine.out)
    copied = runtime.record(machine.out)
    runtime.wait(compute, copied)
    assert not runtime.query(ready), "the device is still busy, so that no call above waited for it"
    assert not runtime.query(copied)
    runtime.synchronize(copied)
    assert runtime.query(copied)
    assert torch.equal(slot.tensor, torch.full((machine.nbytes,), 7, dtype=torch.uint8))


def test_h16_source_is_overwritten_in_place_behind_its_copy(machine: DeviceMachine) -> None:
    runtime, compute = machine.runtime, machine.compute
    source, slot = machine.painted(1, compute), machine.slot()
    runtime.wait(machine.out, runtime.record(compute))
    machine.delay(machine.out)
    runtime.copy(slot, source, machine.out)
    runtime.wait(compute, runtime.record(machine.out))
    machine.launch(compute, lambda out: out.fill_(0), source, what="next step")
    machine.finish()
    assert_exact([Outcome(slot.tensor, pattern(machine.nbytes, 1))])
    assert not source.any()


def test_h29_threads_share_transfer_streams_and_keep_their_own(machine: DeviceMachine) -> None:
    runtime = machine.runtime
    start = threading.Barrier(4)
    failures: list[str] = []

    def work(seed: int) -> None:
        torch.accelerator.set_device_index(machine.device)
        mine = machine.side_stream()
        torch.accelerator.set_stream(mine)
        start.wait(timeout=60)
        for _ in range(50):
            source, slot = machine.painted(seed, mine), machine.slot()
            runtime.wait(machine.out, runtime.record(mine))
            runtime.copy(slot, source, machine.out)
            copied = runtime.record(machine.out)
            runtime.wait(mine, copied)
            runtime.synchronize(copied)
            if runtime.current_stream(machine.device) != mine:
                failures.append(f"thread {seed} has another stream than its own")
            if not torch.equal(slot.tensor, pattern(machine.nbytes, seed)):
                failures.append(f"thread {seed} has wrong bytes")

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(1, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


def test_h15_failure_inside_a_transfer_stream_restores_the_selection(machine: DeviceMachine) -> None:
    with machine.selected(machine.side_stream()):
        before = selection(machine)
        with pytest.raises(torch.OutOfMemoryError):
            machine.runtime.allocate(Layout(1 << 50), machine.device, machine.back)
        assert selection(machine) == before


def test_autograds_own_thread_reloads_what_the_main_thread_offloaded(machine: DeviceMachine) -> None:
    runtime, device = machine.runtime, machine.device
    threads: set[int] = set()

    def pack(tensor: Tensor) -> Packed:
        source = tensor.detach().contiguous().view(-1).view(torch.uint8)
        slot = machine.tier.reserve(source.numel())
        assert slot is not None
        runtime.wait(machine.out, runtime.record(machine.compute))
        runtime.copy(slot, source, machine.out)
        runtime.wait(machine.compute, runtime.record(machine.out))
        return Packed(slot, tensor.shape, tensor.dtype)

    def unpack(packed: Packed) -> Tensor:
        slot, shape, dtype = packed
        threads.add(threading.get_ident())
        target = runtime.allocate(Layout(shape.numel() * dtype.itemsize), device, machine.compute)
        allocated, written = runtime.record(machine.compute), runtime.record(machine.out)
        runtime.wait(machine.back, allocated)
        runtime.wait(machine.back, written)
        runtime.copy(target, slot, machine.back)
        runtime.wait(machine.compute, runtime.record(machine.back))
        return target.view(dtype).view(shape)

    def gradients() -> list[Tensor]:
        torch.manual_seed(0)
        model = torch.nn.Sequential(*(torch.nn.Linear(512, 512, device=device) for _ in range(4)))
        model(torch.randn(256, 512, device=device)).square().mean().backward()
        return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]

    plain = gradients()
    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        offloaded = gradients()
    machine.finish()
    assert len(plain) == len(offloaded) == 8
    assert all(torch.equal(one, two) for one, two in zip(plain, offloaded, strict=True))
    assert threads
    assert threading.get_ident() not in threads, "this test is about backward on a thread of autograd's"


def test_host_buffers_are_pinned_and_page_aligned(machine: DeviceMachine) -> None:
    pinned, pageable = machine.runtime.host_buffer(1 << 20), machine.runtime.host_buffer(1 << 20, pin_memory=False)
    assert pinned.is_pinned()
    assert not pageable.is_pinned()
    assert pinned.data_ptr() % 4096 == pageable.data_ptr() % 4096 == 0


def test_pageable_slots_are_exact_too(machine: DeviceMachine) -> None:
    machine.tier = HostTier(Arena(partial(machine.runtime.host_buffer, pin_memory=False)), budget=1 << 30)
    assert not machine.slot().tensor.is_pinned()
    for scenario in SCENARIOS:
        machine.again()
        assert_exact(scenario(machine))


def test_blocks_of_the_allocator_need_no_second_attempt(machine: DeviceMachine) -> None:
    for nbytes in (1, 4096, machine.nbytes):
        target = machine.runtime.allocate(Layout(nbytes), machine.device, machine.compute)
        assert target.data_ptr() % ALIGNMENT == 0
        assert target.untyped_storage().nbytes() == nbytes


@pytest.mark.parametrize("direction", Direction)
def test_bandwidth_is_that_of_a_bus(machine: DeviceMachine, direction: Direction) -> None:
    found = machine.runtime.bandwidth(machine.device, direction)
    assert 1e8 < found < 1e13
    assert machine.runtime.bandwidth(machine.device, direction) == found


@pytest.mark.skipif(torch.accelerator.device_count() < 2, reason="needs two devices")
def test_h30_second_device_has_streams_of_its_own_and_the_first_stays_selected(machine: DeviceMachine) -> None:
    runtime, second = machine.runtime, torch.device(machine.device.type, 1)
    before = selection(machine)
    compute, inward = runtime.current_stream(second), runtime.transfer_stream(second, Direction.IN)
    assert inward != machine.back
    slot = machine.saved(9)
    target = runtime.allocate(Layout(machine.nbytes), second, compute)
    runtime.wait(inward, runtime.record(compute))
    runtime.copy(target, slot, inward)
    runtime.wait(compute, runtime.record(inward))
    assert selection(machine) == before
    torch.accelerator.synchronize(second)
    assert target.device == second
    assert_exact([Outcome(target.cpu(), pattern(machine.nbytes, 9))])
