"""What the passes promise of any graph: the window, the cap, the order, and the same bits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.fx import Graph, Node
from torch.fx.experimental.proxy_tensor import make_fx

from eager_offload.compile import ops
from eager_offload.compile.graphs import nbytes_of, storage_of
from eager_offload.compile.insert import insert_asynchronous
from eager_offload.compile.order import pin, prefetch, sink_waits
from tests.compile.happens_before import CONFIG, CPU, of_kind, peak_flying, peak_open, run, wait_of

WIDTH = 4
WEIGHT = torch.linspace(-0.5, 0.6, WIDTH * WIDTH).view(WIDTH, WIDTH)
X = torch.linspace(-1, 1, 3 * WIDTH).view(3, WIDTH)
#: Bytes of a row.
ROW = 4 * WIDTH


@dataclass(frozen=True)
class Program:
    """A forward whose values differ in size, and a backward that asks for some of them in any order."""

    steps: tuple[str, ...]
    #: Which of the values leave, by number.
    saved: tuple[int, ...]
    #: In which order they are asked for, and whether by a view.
    asked: tuple[tuple[int, bool], ...]
    #: Whether all reloads stand at the beginning of the backward, as partitioned graphs have them.
    all_first: bool
    #: Which values are written over once they have left.
    changed: frozenset[int]

    def __call__(self, x: Tensor, weight: Tensor) -> Tensor:
        hosts: dict[int, Tensor] = {}
        for number, step in enumerate(self.steps):
            x = _STEPS[step](x, weight)
            if number in self.saved:
                hosts[number] = ops.offload(x, config=CONFIG)
            if number in self.changed:
                x.add_(0.25)
        back = {n: ops.reload(hosts[n], CPU, config=CONFIG) for n, _ in self.asked} if self.all_first else {}
        grad = weight.sin()
        for number, by_view in self.asked:
            y = back[number] if self.all_first else ops.reload(hosts[number], CPU, config=CONFIG)
            grad = torch.mm(grad, weight) + (y.t() if by_view else y.cos()).sum()
        return grad + x.sum()


_STEPS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "product": torch.mm,
    "sine": lambda x, _: x.sin(),
    "longer": lambda x, _: torch.cat([x, x[:2] * 2]),
    "shorter": lambda x, _: x[: max(1, x.shape[0] // 2)].cos(),
}


@st.composite
def programs(draw: st.DrawFn) -> Program:
    steps = draw(st.lists(st.sampled_from(sorted(_STEPS)), min_size=1, max_size=10))
    numbers = range(len(steps))
    saved = draw(st.lists(st.sampled_from(numbers), unique=True, min_size=1))
    order = draw(st.permutations(saved))
    asked = [(number, draw(st.booleans())) for number in order[: draw(st.integers(0, len(order)))]]
    changed = draw(st.frozensets(st.sampled_from(numbers)))
    return Program(tuple(steps), tuple(saved), tuple(asked), draw(st.booleans()), changed)


def traced(program: Program) -> Graph:
    return make_fx(program, tracing_mode="fake")(X, WEIGHT).graph


def seconds(node: Node) -> float:
    """By name, so that some take long and some no time."""
    return float(len(node.name) % 4) if node.op == "call_function" else 0.0


#: Bytes, from nothing to more than there is.
room = st.integers(0, 12).map(lambda rows: rows * ROW)
quick = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])


@quick
@given(programs(), room.map(lambda nbytes: max(1, nbytes)))
def test_the_window_holds_and_no_wait_comes_sooner_than_it_has_to(program: Program, window: int) -> None:
    graph = sink_waits(insert_asynchronous(traced(program)), window)
    together, _ = peak_flying(graph)
    assert together <= window
    offloads = of_kind(graph, ops.offload)
    waits = [node.args[0] for node in of_kind(graph, ops.wait_tensor) if node.args[0].target is ops.offload]
    assert waits == offloads, "in the order in which they start"
    flying: dict[Node, int] = {}
    for node in graph.nodes:
        if node.target is ops.offload:
            flying[node] = nbytes_of(node.args[0].meta["val"])
        elif node.target is ops.wait_tensor and node.args[0] in flying:
            last = node.next.target is not ops.wait_tensor or node.next.args[0].target is not ops.offload
            assert not last or _forces(node.next, node.args[0], sum(flying.values()), window)
            del flying[node.args[0]]


def _forces(node: Node, host: Node, flying: int, window: int) -> bool:
    """Whether the wait for ``host`` cannot stand behind ``node``."""
    if node.op == "output" or host in node.all_input_nodes:
        return True
    if node.target is torch.ops.aten.add_.Tensor:
        return storage_of(node.args[0]) == storage_of(host.args[0])
    return node.target is ops.offload and flying + nbytes_of(node.args[0].meta["val"]) > window


@quick
@given(programs(), room, st.sampled_from([1e-3, 1.0, 16.0, 1e6]))
def test_the_cap_holds_and_reloads_come_in_the_order_of_need(program: Program, cap: int, bandwidth: float) -> None:
    before = insert_asynchronous(traced(program))
    graph = prefetch(before, cap, bandwidth, seconds)
    together, _ = peak_open(graph)
    assert together <= cap
    reloads = of_kind(graph, ops.reload)
    order = {node: position for position, node in enumerate(graph.nodes)}
    assert [order[wait_of(node)] for node in reloads] == sorted(order[wait_of(node)] for node in reloads)
    for node in reloads:
        assert order[wait_of(node.args[0])] < order[node] < order[wait_of(node)]
        if cap == 0:
            assert node.next is wait_of(node)
    assert [node.name for node in graph.nodes if _stays(node)] == [node.name for node in before.nodes if _stays(node)]


def _stays(node: Node) -> bool:
    return node.target not in (ops.reload, ops.wait_tensor, torch.ops.aten.t.default)


@pytest.mark.parametrize("examples", [30, pytest.param(600, marks=pytest.mark.long)])
def test_every_pass_keeps_the_order_of_bytes_and_the_bits(examples: int) -> None:
    links = st.sampled_from([1e-3, 1.0, 16.0, 1e6])
    settings(quick, max_examples=examples)(
        given(programs(), room, room.map(lambda nbytes: max(1, nbytes)), links)(check)
    )()


def check(program: Program, cap: int, window: int, bandwidth: float) -> None:
    graph = traced(program)
    wanted = run(graph, X, WEIGHT)
    stages: list[Any] = [insert_asynchronous(graph)]
    stages.append(prefetch(stages[-1], cap, bandwidth, seconds))
    stages.append(sink_waits(stages[-1], window))
    stages.append(pin(stages[-1]))
    for stage in stages:
        stage.lint()
        ran = run(stage, X, WEIGHT)
        assert ran.violations == []
        assert torch.equal(ran.results[0], wanted.results[0])
        assert ran.stats.bytes_out == wanted.stats.bytes_out > 0
        assert ran.stats.bytes_in == wanted.stats.bytes_in
