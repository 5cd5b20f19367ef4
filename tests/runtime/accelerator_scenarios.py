"""What must hold on any accelerator: run on a recording double in every order, and on a real device where there is one.

Each scenario enqueues a small program, waits for the end of it, and returns bytes beside what they have to be. Every
wait in it has a name, so that a test can leave it out.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from eager_offload.runtime.accelerator import AcceleratorEvent, AcceleratorRuntime
from eager_offload.runtime.base import ALIGNMENT, Direction, Event, Layout
from eager_offload.tiers.arena import Arena, HostSlot
from eager_offload.tiers.base import Fence
from eager_offload.tiers.host import HostTier


class Outcome(NamedTuple):
    """Bytes that a scenario moved, on the CPU, and what they have to be."""

    moved: Tensor
    expected: Tensor


Scenario: TypeAlias = "Callable[[Machine], list[Outcome]]"


class Machine(abc.ABC):
    """A device, its runtime, and a user who computes on it.

    Args:
        api: torch's functions of accelerators, or what stands in for them.
    """

    #: The size of every tensor that travels.
    nbytes: int

    def __init__(self, runtime: AcceleratorRuntime, device: torch.device, api: Any = torch.accelerator) -> None:
        self.runtime = runtime
        self.api = api
        self.device = device
        self.tier = HostTier(Arena(runtime.host_buffer), budget=1 << 30)
        #: The names of all waits that a scenario asked for.
        self.edges: list[str] = []
        #: The one that is left out.
        self.omitted: str | None = None

    @abc.abstractmethod
    def side_stream(self) -> torch.Stream:
        """A stream of the user's own."""

    @contextmanager
    def selected(self, stream: torch.Stream) -> Iterator[None]:
        """The user computes on ``stream`` inside."""
        before = self.api.current_stream(stream.device)
        self.api.set_stream(stream)
        try:
            yield
        finally:
            self.api.set_stream(before)

    @abc.abstractmethod
    def empty(self, nbytes: int, stream: torch.Stream) -> Tensor:
        """The user allocates on ``stream``."""

    @abc.abstractmethod
    def launch(self, stream: torch.Stream, kernel: Callable[..., object], *args: Tensor, what: str) -> None:
        """The user enqueues a kernel that writes its first argument and reads the others."""

    @abc.abstractmethod
    def delay(self, stream: torch.Stream) -> None:
        """Keeps ``stream`` busy for so long that whatever does not wait for it overtakes it."""

    @abc.abstractmethod
    def finish(self) -> None:
        """The host waits for everything."""

    @property
    def out(self) -> torch.Stream:
        return self.runtime.transfer_stream(self.device, Direction.OUT)

    @property
    def back(self) -> torch.Stream:
        return self.runtime.transfer_stream(self.device, Direction.IN)

    @property
    def compute(self) -> torch.Stream:
        return self.runtime.current_stream(self.device)

    def record(self, stream: torch.Stream) -> AcceleratorEvent:
        event = self.runtime.record(stream)
        assert isinstance(event, AcceleratorEvent)
        return event

    def wait(self, edge: str, stream: torch.Stream, event: Event) -> None:
        self.edges.append(edge)
        if edge != self.omitted:
            self.runtime.wait(stream, event)

    def slot(self) -> HostSlot:
        slot = self.tier.reserve(self.nbytes)
        assert slot is not None
        return slot

    def painted(self, seed: int, stream: torch.Stream) -> Tensor:
        tensor = self.empty(self.nbytes, stream)
        self.launch(stream, paint(seed), tensor, what=f"paint {seed}")
        return tensor

    def saved(self, seed: int) -> HostSlot:
        """A slot with the bytes of ``paint(seed)`` in it, at rest."""
        slot = self.slot()
        slot.tensor.copy_(pattern(self.nbytes, seed))
        return slot


def pattern(nbytes: int, seed: int, device: torch.device | str = "cpu") -> Tensor:
    return ((torch.arange(nbytes, device=device) * (2 * seed + 1) + seed) % 251).to(torch.uint8)


def paint(seed: int) -> Callable[[Tensor], Tensor]:
    return lambda out: out.copy_(pattern(out.numel(), seed, out.device))


def take(out: Tensor, source: Tensor) -> Tensor:
    return out.copy_(source)


def assert_exact(outcomes: list[Outcome]) -> None:
    assert outcomes
    for moved, expected in outcomes:
        assert moved.numel() > 0
        assert torch.equal(moved, expected)


# -- scenarios ------------------------------------------------------------------------------------------------------


def h16_source_is_dropped_and_its_block_painted_over(machine: Machine) -> list[Outcome]:
    runtime, compute = machine.runtime, machine.compute
    slot = machine.slot()
    machine.delay(compute)
    source = machine.painted(1, compute)
    machine.wait("the source is written", machine.out, runtime.record(compute))
    machine.delay(machine.out)
    runtime.copy(slot, source, machine.out)
    machine.wait("the copy out is over", compute, runtime.record(machine.out))
    address = source.data_ptr()
    del source
    next_owner = machine.painted(2, compute)
    assert next_owner.data_ptr() == address, "the scenario needs the allocator to hand the block out again"
    machine.finish()
    return [Outcome(slot.tensor.clone(), pattern(machine.nbytes, 1))]


def h18_slot_goes_to_another_while_it_is_read(machine: Machine) -> list[Outcome]:
    runtime, compute = machine.runtime, machine.compute
    slot = machine.saved(3)
    target = runtime.allocate(Layout(machine.nbytes), machine.device, compute)
    machine.wait("the target is allocated", machine.back, runtime.record(compute))
    machine.delay(machine.back)
    runtime.copy(target, slot, machine.back)
    read = machine.record(machine.back)
    address = slot.tensor.data_ptr()
    slot.fences += (Fence(runtime, read),)
    del slot
    source = machine.painted(4, compute)
    other = machine.slot()
    assert other.tensor.data_ptr() == address, "the scenario needs the arena to hand the slot out again"
    assert other.fences or runtime.query(read), "from pageable memory the host waits for the copy"
    machine.wait("the source is written", machine.out, runtime.record(compute))
    for fence in other.fences:
        machine.wait("the slot's last reader is done", machine.out, fence.event)
    runtime.copy(other, source, machine.out)
    written = runtime.record(machine.out)
    machine.wait("the reload has arrived", compute, read)
    result = machine.empty(machine.nbytes, compute)
    machine.launch(compute, take, result, target, what="backward")
    machine.finish()
    runtime.synchronize(written)
    return [
        Outcome(result.cpu(), pattern(machine.nbytes, 3)),
        Outcome(other.tensor.clone(), pattern(machine.nbytes, 4)),
    ]


def h17_reload_is_asked_for_while_the_copy_out_runs(machine: Machine) -> list[Outcome]:
    runtime, compute = machine.runtime, machine.compute
    source, slot = machine.painted(5, compute), machine.slot()
    machine.wait("the source is written", machine.out, runtime.record(compute))
    machine.delay(machine.out)
    runtime.copy(slot, source, machine.out)
    target = runtime.allocate(Layout(machine.nbytes), machine.device, compute)
    machine.wait("the target is allocated", machine.back, runtime.record(compute))
    machine.wait("the bytes are in the slot", machine.back, runtime.record(machine.out))
    runtime.copy(target, slot, machine.back)
    machine.wait("the reload has arrived", compute, runtime.record(machine.back))
    result = machine.empty(machine.nbytes, compute)
    machine.launch(compute, take, result, target, what="backward")
    machine.finish()
    return [Outcome(result.cpu(), pattern(machine.nbytes, 5))]


def reload_lands_in_a_block_whose_last_owner_is_queued(machine: Machine) -> list[Outcome]:
    runtime, compute = machine.runtime, machine.compute
    slot = machine.saved(6)
    last_owner = machine.empty(machine.nbytes, compute)
    machine.delay(compute)
    machine.launch(compute, paint(7), last_owner, what="the last owner's kernel")
    address = last_owner.data_ptr()
    del last_owner
    target = runtime.allocate(Layout(machine.nbytes), machine.device, compute)
    assert target.data_ptr() == address, "the scenario needs the allocator to hand the block out again"
    machine.wait("the target is allocated", machine.back, runtime.record(compute))
    runtime.copy(target, slot, machine.back)
    machine.wait("the reload has arrived", compute, runtime.record(machine.back))
    result = machine.empty(machine.nbytes, compute)
    machine.launch(compute, take, result, target, what="backward")
    machine.finish()
    return [Outcome(result.cpu(), pattern(machine.nbytes, 6))]


def h14_streams_change_between_forward_and_backward(machine: Machine) -> list[Outcome]:
    runtime = machine.runtime
    forward, backward = machine.side_stream(), machine.side_stream()
    with machine.selected(forward):
        assert machine.compute == forward
        source, slot = machine.painted(8, forward), machine.slot()
        machine.delay(forward)
        machine.launch(forward, paint(9), source, what="forward")
        machine.wait("the source is written", machine.out, runtime.record(machine.compute))
        runtime.copy(slot, source, machine.out)
        copied = runtime.record(machine.out)
        assert machine.compute == forward
    with machine.selected(backward):
        assert machine.compute == backward
        target = runtime.allocate(Layout(machine.nbytes), machine.device, machine.compute)
        machine.delay(machine.out)
        machine.wait("the target is allocated", machine.back, runtime.record(machine.compute))
        machine.wait("the bytes are in the slot", machine.back, copied)
        runtime.copy(target, slot, machine.back)
        assert machine.compute == backward
        machine.wait("the reload has arrived", machine.compute, runtime.record(machine.back))
        result = machine.empty(machine.nbytes, backward)
        machine.launch(backward, take, result, target, what="backward")
    machine.wait("the copy out is over", forward, copied)
    del source
    machine.finish()
    return [Outcome(result.cpu(), pattern(machine.nbytes, 9))]


def target_has_the_phase_that_was_asked_for(machine: Machine) -> list[Outcome]:
    runtime, compute = machine.runtime, machine.compute
    slot, outcomes = machine.saved(10), []
    for alignment_offset in (0, 1, 4, 16, 60, 63):
        target = runtime.allocate(Layout(machine.nbytes, alignment_offset), machine.device, compute)
        assert target.data_ptr() % ALIGNMENT == alignment_offset
        assert target.shape == (machine.nbytes,)
        machine.wait("the target is allocated", machine.back, runtime.record(compute))
        runtime.copy(target, slot, machine.back)
        machine.wait("the reload has arrived", compute, runtime.record(machine.back))
        result = machine.empty(machine.nbytes, compute)
        machine.launch(compute, take, result, target, what="backward")
        machine.finish()
        outcomes.append(Outcome(result.cpu(), pattern(machine.nbytes, 10)))
    return outcomes


#: All of them.
SCENARIOS: list[Scenario] = [
    h16_source_is_dropped_and_its_block_painted_over,
    h18_slot_goes_to_another_while_it_is_read,
    h17_reload_is_asked_for_while_the_copy_out_runs,
    reload_lands_in_a_block_whose_last_owner_is_queued,
    h14_streams_change_between_forward_and_backward,
    target_has_the_phase_that_was_asked_for,
]
