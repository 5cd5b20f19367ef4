"""Two judges of one schedule: where the checker finds nothing, latest and earliest execution give equal bytes."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import torch
from hypothesis import strategies as st
from torch import Tensor

from tests.runtime.simulated_rig import Rig
from tests.sampling import search
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


def fill(program: Program, tensor: int, value: int) -> None:
    program.tensors[tensor].fill_(value)


def read(program: Program, tensor: int) -> None:
    program.read.append(program.tensors[tensor].clone())


def renew(program: Program, tensor: int, value: int) -> None:
    """Drops a tensor and allocates another one in its place."""
    del program.tensors[tensor]
    program.tensors.insert(tensor, torch.full((NBYTES,), value, dtype=torch.uint8))


def copy(program: Program, tensor: int, slot: int, outward: bool) -> None:
    device, host, runtime = program.tensors[tensor], program.slots[slot], program.rig.runtime
    if outward:
        runtime.copy(host, device, program.rig.out)
    else:
        runtime.copy(device, host, program.rig.inward)


def order(program: Program, after: int, before: int | None) -> None:
    """One stream waits for all that another one has done so far; or the host does."""
    runtime = program.rig.runtime
    program.events.append(runtime.record(program.streams[after]))
    if before is None:
        runtime.synchronize(program.events[-1])
    else:
        runtime.wait(program.streams[before], program.events[-1])


def again(program: Program, stream: int, age: int) -> None:
    """A wait for an event that is old by now."""
    if program.events:
        program.rig.runtime.wait(program.streams[stream], program.events[-1 - age % len(program.events)])


Step: TypeAlias = Callable[[Program], None]


def drawn(step: Callable[..., None], **fields: st.SearchStrategy[Any]) -> st.SearchStrategy[Step]:
    return st.fixed_dictionaries(fields).map(lambda chosen: partial(step, **chosen))


tensors, values, places = st.integers(0, TENSORS - 1), st.integers(10, 200), st.integers(0, 2)
copies = drawn(copy, tensor=tensors, slot=places, outward=st.booleans())
orders = drawn(order, after=places, before=st.one_of(st.none(), places, places))
steps = st.one_of(
    drawn(fill, tensor=tensors, value=values),
    drawn(read, tensor=tensors),
    drawn(renew, tensor=tensors, value=values),
    *(copies, copies, orders, orders),
    drawn(again, stream=places, age=st.integers(0, 5)),
)


class Verdict(NamedTuple):
    """What one execution came to."""

    clean: bool
    faults: int
    outcome: list[Tensor]


def execute(program: list[Step], *, at_once: bool) -> Verdict:
    with torch.no_grad():
        running = Program(at_once=at_once)
        with running.rig.runtime.checked() as checker:
            running.tensors = [tensor.clone() for tensor in running.tensors]
            for step in program:
                step(running)
        return Verdict(not checker.violations, len(running.rig.runtime.faults), running.outcome())


def test_a_clean_verdict_means_that_late_and_early_execution_agree() -> None:
    def check(program: list[Step]) -> None:
        late, early = execute(program, at_once=False), execute(program, at_once=True)
        # Copies that were not carried out before their source went are reported a second time.
        assert early.faults == 0
        assert early.clean == late.clean
        if late.clean:
            assert all(torch.equal(a, b) for a, b in zip(late.outcome, early.outcome, strict=True))
            assert late.faults == 0
        verdicts.add(late.clean)

    verdicts = set[bool]()
    search(check, st.lists(steps, min_size=4, max_size=24), fixed=120)
    assert verdicts == {True, False}
