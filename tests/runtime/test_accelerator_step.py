"""Whole training steps on the accelerator runtime: every call it makes into torch, read by the happens-before checker.

The calls go to a recording double, on which CPU tensors stand for the device's; see ``training_accelerator.py``.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple, TypeAlias

import pytest
import torch
from torch import Tensor, nn

from eager_offload import Offload
from eager_offload.runtime.accelerator import AcceleratorEvent
from eager_offload.runtime.base import Direction
from tests.doubles.training_accelerator import TrainingAccelerator
from tests.hazards.backends import assert_settled
from tests.hazards.blocks import ROWS, WIDTH, blocks
from tests.hazards.programs import REGIMES, Around, Regime, assert_identical, assert_moved
from tests.simulation.checker import Checker
from tests.simulation.log import Allocated, Freed, Operation, Recorded, Synchronized, Waited, WrittenLog

STEPS = 2

#: What is run with offload and without.
Program: TypeAlias = "Callable[[Around, Streams], object]"


# -- programs -------------------------------------------------------------------------------------------------------


class Streams:
    """The streams that a program computes on: the default one and two more, or those that are given.

    Without a double there are none.
    """

    def __init__(self, double: TrainingAccelerator | None, given: Sequence[torch.Stream] = ()) -> None:
        self._double = double
        self._all = list(given)
        if double is not None and not given:
            default = double.runtime.current_stream(torch.device("cpu"))
            self._all = [default, double.side_stream(), double.side_stream()]

    def select(self, number: int) -> None:
        """The program computes on another stream from here on."""
        if self._double is not None:
            self._double.set_stream(self._all[number])

    def meet(self) -> None:
        """What a program does before it uses, or lets go of, what another stream has used: each waits for all."""
        if self._double is not None:
            runtime = self._double.runtime
            done = [runtime.record(stream) for stream in self._all]
            for stream in self._all:
                for event in done:
                    runtime.wait(stream, event)


class Cross(torch.autograd.Function):
    """Goes to another stream in forward, and back in backward, as autograd does by itself on a device."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, streams: Streams, here: int, there: int) -> Tensor:
        ctx.streams, ctx.here = streams, here
        return _taken_along(x, streams, there)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        return _taken_along(gradient, ctx.streams, ctx.here), None, None, None


def _taken_along(x: Tensor, streams: Streams, to: int) -> Tensor:
    streams.meet()
    streams.select(to)
    y = x.clone()
    streams.meet()
    return y


def on_one_stream(around: Around, streams: Streams) -> object:
    return train(around, streams, [0], [0])


def each_block_on_another_stream(around: Around, streams: Streams) -> object:
    return train(around, streams, [0], [0, 1, 2])


def each_step_on_another_stream(around: Around, streams: Streams) -> object:
    return train(around, streams, [1, 0, 2], [0])


def train(around: Around, streams: Streams, of_steps: Sequence[int], of_blocks: Sequence[int]) -> object:
    """A few steps with AdamW; the losses and the parameters after them.

    Args:
        of_steps, of_blocks: where steps are computed, and the blocks of each step where that is not 0.
    """
    torch.manual_seed(0)
    model = blocks(4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    losses = []
    for step in range(STEPS):
        home = of_steps[step % len(of_steps)]
        streams.meet()
        streams.select(home)
        with around:
            x = torch.randn(ROWS, WIDTH)
            for number, block in enumerate(model):
                aside = of_blocks[number % len(of_blocks)]
                x = nn.functional.dropout(x, 0.1)
                if aside:
                    x = Cross.apply(x, streams, home, aside)  # type: ignore[no-untyped-call]
                x = block(x)
                if aside:
                    x = Cross.apply(x, streams, aside, home)  # type: ignore[no-untyped-call]
            loss = x.square().mean()
        loss.backward()
        streams.meet()
        optimizer.step()
        streams.meet()
        optimizer.zero_grad()
        losses.append(loss.item())
        del x, loss
    streams.meet()
    streams.select(0)
    return [losses, [parameter.detach() for parameter in model.parameters()]]


def half_of_each_graph(around: Around, streams: Streams) -> object:
    """Backward stops half-way, so that what was brought back early is never asked for."""
    torch.manual_seed(0)
    model, results = blocks(4), []
    for _ in range(2 * STEPS):
        x = torch.randn(ROWS, WIDTH)
        with around:
            for block in model:
                x = block(x)
            loss = x.square().mean()
        results.append(torch.autograd.grad(loss, list(model[-1].parameters())))
        del x, loss
    return results


def two_models_that_never_meet(around: Around, streams: Streams) -> object:
    """Each on a stream of its own, so that nothing but the library orders what they share: its slots."""
    torch.manual_seed(0)
    models = [blocks(3), blocks(3)]
    results: list[Sequence[Tensor]] = []
    streams.meet()
    for step in range(2 * STEPS):
        streams.select(1 + step % 2)
        x = torch.randn(ROWS, WIDTH)
        with around:
            for block in models[step % 2]:
                x = block(x)
            loss = x.square().mean()
        results.append(torch.autograd.grad(loss, list(models[step % 2].parameters())))
        del x, loss
    streams.meet()
    streams.select(0)
    copies = [[gradient.clone() for gradient in gradients] for gradients in results]
    streams.meet()
    return copies


PROGRAMS: list[Program] = [
    on_one_stream,
    each_block_on_another_stream,
    each_step_on_another_stream,
    half_of_each_graph,
    two_models_that_never_meet,
]


def make_offload(double: TrainingAccelerator, **fields: Any) -> Offload:
    return Offload(runtime=double.runtime, tier="host", min_bytes=0, **{"keep_last_bytes": 0, **fields})


# -- clean and exact ------------------------------------------------------------------------------------------------


#: How soon copies run: as late as they may, when chance has it, at once.
MEETINGS = [
    *((0.0, regime) for regime in REGIMES),
    (0.5, REGIMES[2]),
    (0.5, REGIMES[3]),
    (1.0, REGIMES[3]),
]


@pytest.mark.sampled(4, quick=True)
@pytest.mark.parametrize(("haste", "regime"), MEETINGS, ids=str)
@pytest.mark.parametrize("program", PROGRAMS)
def test_a_training_step_is_exact_and_every_call_of_it_is_ordered(
    program: Program, haste: float, regime: Regime
) -> None:
    expected = program(nullcontext(), Streams(None))
    double, recording = TrainingAccelerator(haste=haste), WrittenLog()
    with double.checked(recording) as checker:
        offload = make_offload(double, **regime.fields)
        assert_identical(expected, program(regime.around(offload), Streams(double)))
        stats = assert_settled(offload)
        offload.close()
    checker.assert_clean()
    assert_moved(stats)
    assert stats.bytes_in > 0 or not regime.settled
    assert_all_calls_are_logged(double, recording)


def assert_all_calls_are_logged(double: TrainingAccelerator, recording: WrittenLog) -> None:
    """Every call that orders or touches memory has an entry, and nothing but such calls orders anything."""
    made: dict[str, int] = defaultdict(int)
    for call in double.calls:
        made[call.partition(" ")[0]] += 1
    copies = ("offload", "reload")
    entries = recording.entries
    assert made["record_event"] == sum(isinstance(entry, Recorded) for entry in entries) > 0
    assert made["wait_event"] == sum(isinstance(entry, Waited) for entry in entries) > 0
    assert made["copy"] == sum(isinstance(entry, Operation) and entry.what in copies for entry in entries) > 0
    assert made["empty"] == sum(isinstance(entry, Allocated) and entry.what == "reload target" for entry in entries)
    assert 0 < sum(isinstance(entry, Synchronized) for entry in entries) <= made["query"] + made["synchronize"]
    operators = {entry.what for entry in entries if isinstance(entry, Operation)}
    assert {"aten.addmm.default", "aten.gelu_backward.default"} <= operators, "compute is logged as well"
    assert any(isinstance(entry, Freed) for entry in entries)


# -- without one edge -----------------------------------------------------------------------------------------------


class Edge(NamedTuple):
    """Who comes after whom."""

    #: ``"compute"``, ``"out"``, ``"in"`` or, if it waits, ``"host"``.
    waits: str
    after: str


EDGES = {
    Edge("out", "compute"): "a copy out comes after the operators that made its source",
    Edge("out", "in"): "a slot is written after its last reload",
    Edge("in", "compute"): "a reload comes after the kernels of the last owner of its target",
    Edge("compute", "in"): "compute comes after the reload of what it reads",
    Edge("host", "out"): "a source goes, and a reload comes, after the copy out",
    Edge("host", "in"): "a target that was not asked for goes after its copy",
}
#: Of the program's own: it changes streams.
OWN = Edge("compute", "compute")

#: Programs in which every edge is needed somewhere.
WRITTEN_DOWN: list[tuple[Program, Regime]] = [
    (each_step_on_another_stream, REGIMES[0]),
    (on_one_stream, REGIMES[2]),
    (half_of_each_graph, REGIMES[0]),
    (two_models_that_never_meet, REGIMES[0]),
]


class Logged(NamedTuple):
    """A program that was written down, and what orders it."""

    recording: WrittenLog
    edges: dict[Edge, list[int]]


@functools.cache
def written_down(number: int) -> Logged:
    program, regime = WRITTEN_DOWN[number]
    double, recording = TrainingAccelerator(), WrittenLog()
    run(program, regime, double, recording)
    roles = roles_of(double)
    home: dict[object, str] = {}
    edges: dict[Edge, list[int]] = defaultdict(list)
    for index, entry in enumerate(recording.entries):
        if isinstance(entry, Recorded):
            home[entry.event] = roles.get(entry.stream, "compute")
        elif isinstance(entry, Waited):
            edges[Edge(roles.get(entry.stream, "compute"), home[entry.event])].append(index)
        elif isinstance(entry, Synchronized):
            edges[Edge("host", home[entry.event])].append(index)
    return Logged(recording, dict(edges))


def run(program: Program, regime: Regime, double: TrainingAccelerator, recording: WrittenLog | None = None) -> Checker:
    with double.checked(recording) as checker:
        offload = make_offload(double, **regime.fields)
        program(regime.around(offload), Streams(double))
        offload.stats(synchronize=True)
        offload.close()
    return checker


def roles_of(double: TrainingAccelerator) -> dict[object, str]:
    device = torch.device("cpu")
    return {double.runtime.transfer_stream(device, way): way.value for way in Direction}


def violations(recording: WrittenLog, without: set[int]) -> int:
    checker = Checker()
    for index, entry in enumerate(recording.entries):
        if index not in without:
            checker.write(entry)
    return len(checker.violations)


def test_a_step_is_ordered_by_these_edges_and_no_others() -> None:
    found = {edge for number in range(len(WRITTEN_DOWN)) for edge in written_down(number).edges}
    assert found - {OWN, Edge("host", "compute")} == set(EDGES)


@pytest.mark.parametrize("edge", EDGES, ids=EDGES.values())
def test_a_step_without_one_kind_of_edge_is_reported(edge: Edge) -> None:
    reported = 0
    for number in range(len(WRITTEN_DOWN)):
        recording, edges = written_down(number)
        reported += violations(recording, set(edges.get(edge, ())))
    assert reported > 0


@pytest.mark.parametrize("edge", [edge for edge in EDGES if edge != Edge("host", "in")], ids=str)
def test_a_step_without_a_single_edge_is_reported(edge: Edge) -> None:
    """One instance alone: not its neighbours, which may order the same by chance.

    The host asks twice about a target that backward did not ask for, so that no single answer is needed.
    """
    for number in reversed(range(len(WRITTEN_DOWN))):
        recording, edges = written_down(number)
        for index in edges.get(edge, [])[:80]:
            if violations(recording, {index}):
                return
    pytest.fail(f"no single instance of {edge} is needed")


# -- without a call, in the runtime itself ----------------------------------------------------------------------------


@pytest.mark.parametrize("edge", [edge for edge in EDGES if edge.waits != "host"], ids=str)
def test_a_runtime_that_forgets_one_kind_of_wait_is_reported(edge: Edge, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not the log but the call is left out: what the runtime says that it did is not what counts."""
    wait_on, forgotten, reported = AcceleratorEvent.wait_on, 0, 0
    roles: dict[object, str] = {}

    def forgetful(event: AcceleratorEvent, stream: torch.Stream) -> None:
        nonlocal forgotten
        assert event.recorded_on is not None
        if Edge(roles.get(stream, "compute"), roles.get(event.recorded_on, "compute")) == edge:
            forgotten += 1
        else:
            wait_on(event, stream)

    monkeypatch.setattr(AcceleratorEvent, "wait_on", forgetful)
    for program, regime in WRITTEN_DOWN:
        double = TrainingAccelerator()
        roles = roles_of(double)
        reported += len(run(program, regime, double).violations)
    assert forgotten > 0
    assert reported > 0
