"""Two judges of one schedule: where the checker finds nothing, latest and earliest execution give equal bytes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeAlias

import torch
from hypothesis import event, given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.runtime.simulated_rig import Rig
from tests.simulation.simulated import SimulatedEvent, SimulatedRuntime, SimulatedStream

TENSORS = 3
STARTS = [0, 32, 64]
NBYTES = 64


class Program:
    """Carries out random steps and keeps every byte that compute has read."""

    def __init__(self, *, at_once: bool) -> None:
        # A free launch keeps the clock still: no query says yes, and only events order anything.
        self.rig = Rig(SimulatedRuntime(at_once=at_once, launch_seconds=0.0))
        self.rig.slab.zero_()
        self.tensors = [torch.full((NBYTES,), index, dtype=torch.uint8) for index in range(TENSORS)]
        self.slots = [self.rig.slot(NBYTES, start) for start in STARTS]
        self.events: list[SimulatedEvent] = []
        self.read: list[Tensor] = []

    @property
    def streams(self) -> list[SimulatedStream]:
        return [self.rig.main, self.rig.out, self.rig.inward]

    def outcome(self) -> list[Tensor]:
        return [*self.read, *self.tensors, self.rig.slab[: STARTS[-1] + NBYTES]]


@dataclass(frozen=True)
class Fill:
    tensor: int
    value: int

    def run(self, program: Program) -> None:
        program.tensors[self.tensor].fill_(self.value)


@dataclass(frozen=True)
class Read:
    tensor: int

    def run(self, program: Program) -> None:
        program.read.append(program.tensors[self.tensor].clone())


@dataclass(frozen=True)
class Renew:
    """Drops a tensor and allocates another one in its place."""

    tensor: int
    value: int

    def run(self, program: Program) -> None:
        del program.tensors[self.tensor]
        program.tensors.insert(self.tensor, torch.full((NBYTES,), self.value, dtype=torch.uint8))


@dataclass(frozen=True)
class Copy:
    tensor: int
    slot: int
    outward: bool

    def run(self, program: Program) -> None:
        tensor, slot = program.tensors[self.tensor], program.slots[self.slot]
        if self.outward:
            program.rig.runtime.copy(slot, tensor, program.rig.out)
        else:
            program.rig.runtime.copy(tensor, slot, program.rig.inward)


@dataclass(frozen=True)
class Order:
    """One stream waits for all that another one has done so far; or the host does."""

    after: int
    before: int | None

    def run(self, program: Program) -> None:
        runtime = program.rig.runtime
        program.events.append(runtime.record(program.streams[self.after]))
        if self.before is None:
            runtime.synchronize(program.events[-1])
        else:
            runtime.wait(program.streams[self.before], program.events[-1])


@dataclass(frozen=True)
class Again:
    """A wait for an event that is old by now."""

    stream: int
    age: int

    def run(self, program: Program) -> None:
        if program.events:
            program.rig.runtime.wait(program.streams[self.stream], program.events[-1 - self.age % len(program.events)])


Step: TypeAlias = Fill | Read | Renew | Copy | Order | Again

tensors = st.integers(0, TENSORS - 1)
values = st.integers(10, 200)
orders = st.builds(Order, st.integers(0, 2), st.one_of(st.none(), st.integers(0, 2), st.integers(0, 2)))
steps = st.one_of(
    st.builds(Fill, tensors, values),
    st.builds(Read, tensors),
    st.builds(Renew, tensors, values),
    st.builds(Copy, tensors, st.integers(0, 2), st.booleans()),
    st.builds(Copy, tensors, st.integers(0, 2), st.booleans()),
    orders,
    orders,
    st.builds(Again, st.integers(0, 2), st.integers(0, 5)),
)


@dataclass
class Verdict:
    """What one execution came to."""

    clean: bool
    faults: int
    outcome: list[Tensor] = field(repr=False)


def execute(program: list[Step], *, at_once: bool) -> Verdict:
    with torch.no_grad():
        running = Program(at_once=at_once)
        with running.rig.runtime.checked() as checker:
            running.tensors = [tensor.clone() for tensor in running.tensors]
            for step in program:
                step.run(running)
        return Verdict(not checker.violations, len(running.rig.runtime.faults), running.outcome())


@settings(max_examples=120, deadline=None)
@given(st.lists(steps, min_size=4, max_size=24))
def test_a_clean_verdict_means_that_late_and_early_execution_agree(program: list[Step]) -> None:
    late, early = execute(program, at_once=False), execute(program, at_once=True)
    # Copies that were not carried out before their source went are reported a second time.
    assert early.faults == 0
    assert early.clean == late.clean
    equal = all(torch.equal(a, b) for a, b in zip(late.outcome, early.outcome, strict=True))
    event(f"clean: {late.clean}, equal: {equal}")
    if late.clean:
        assert equal
        assert late.faults == 0
