"""When transfers run: what sinking waits, prefetching and pinning promise, of small graphs and of any graph."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor
from torch.fx import Graph, Node
from torch.fx.experimental.proxy_tensor import make_fx

from benchmarks.models import Shape, Stack
from eager_offload.compile import insert_synchronous, ops
from eager_offload.compile.decide import roofline
from eager_offload.compile.graphs import nbytes_of, storage_of
from eager_offload.compile.insert import insert_asynchronous
from eager_offload.compile.order import pin, prefetch, sink_waits
from eager_offload.planning.machine import Machine
from tests.compile.happens_before import (
    CONFIG,
    CPU,
    asynchronous,
    labels,
    of_kind,
    peak_flying,
    peak_open,
    run,
    wait_of,
)
from tests.compile.split import Split, config_of, split
from tests.sampling import search

#: Bytes of every value of the chain, and what goes through it.
NBYTES = 256
X, WEIGHT = torch.linspace(-1, 1, 64).view(8, 8), torch.linspace(-0.3, 0.4, 64).view(8, 8)


def one_second(node: Node) -> float:
    """Every operator of torch takes a second."""
    return float(node.op == "call_function" and node.target not in (ops.offload, ops.reload, ops.wait_tensor))


def in_order(graph: Graph) -> str:
    """A letter for each node: o, r, w for transfers and waits, c for all else that computes."""
    return "".join(label[0] for label in labels(graph) if label not in ("placeholder", "output"))


def backward(a: Tensor, b: Tensor, grad: Tensor) -> Tensor:
    """All reloads at the top; ``b`` is used after five operators, ``a``, by a view, after seven."""
    x, y = ops.reload(a, CPU, config=CONFIG), ops.reload(b, CPU, config=CONFIG)
    view = x.view(64)
    for _ in range(5):
        grad = grad.sin()
    grad = (grad * y).sin()
    return grad.view(64) * view


def test_a_reload_starts_when_the_operators_before_its_use_take_as_long_as_it_does() -> None:
    graph = asynchronous(backward, X, X + 1, X + 2)
    ready = prefetch(graph, 1 << 20, NBYTES / 2, one_second, margin=1.0)  # each transfer takes two seconds
    soon, late = of_kind(ready, ops.reload)
    assert [node.args[0].name for node in (soon, late)] == ["b_1", "a_1"], "they start in the order of need"
    assert _seconds_between(soon, wait_of(soon)) == 2
    assert _seconds_between(late, wait_of(late)) == 2
    assert torch.equal(run(ready, X, X + 1, X).results[0], run(graph, X, X + 1, X).results[0])
    ready = prefetch(graph, 0, 1.0, one_second)
    wait = wait_of(of_kind(ready, ops.reload)[1])
    assert wait.next.target is torch.ops.aten.view.default, "a view of what comes back is no use of it"
    assert wait.next.next.target is not torch.ops.aten.view.default
    ran = run(ready, X, X + 1, X)
    assert ran.violations == []
    assert ran.stats.bytes_in == 2 * NBYTES


def _seconds_between(first: Node, last: Node) -> float:
    seconds, node = 0.0, first
    while node is not last:
        seconds += one_second(node)
        node = node.next
    return seconds


@pytest.mark.parametrize("comes_first", [False, True])
def test_no_reload_starts_between_two_products_that_read_what_one_kernel_makes(comes_first: bool) -> None:
    def program(saved: Tensor, weight: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
        x = ops.reload(saved, CPU, config=CONFIG)
        grad = (grad if comes_first else torch.mm(grad, weight)).sin()
        first, second = torch.mm(grad.t(), grad), torch.mm(grad, weight)
        return first, torch.mm(second, weight) * x

    graph = asynchronous(program, X, WEIGHT, X + 1)
    ready = [prefetch(graph, 1 << 20, NBYTES / seconds, one_second, margin=1.0) for seconds in (1, 2)]
    behind, before = ("ccccrcwc", "rcccccwc") if comes_first else ("cccccrcwc", "crcccccwc")
    assert [in_order(one) for one in ready] == [behind, before], "behind both of them, or before what they read"


# -- any graph --------------------------------------------------------------------------------------------------------

#: What goes through random programs.
NARROW, FEW = torch.linspace(-0.5, 0.6, 16).view(4, 4), torch.linspace(-1, 1, 12).view(3, 4)
#: Bytes of a row of it.
ROW = 16


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
    return make_fx(program, tracing_mode="fake")(FEW, NARROW).graph


def seconds(node: Node) -> float:
    """By name, so that some take long and some no time."""
    return float(len(node.name) % 4) if node.op == "call_function" else 0.0


#: Bytes, from nothing to more than there is; and a window, which is never nothing.
ROOM = st.integers(0, 12).map(lambda rows: rows * ROW)
WINDOW = ROOM.map(lambda nbytes: max(1, nbytes))
LINKS = st.sampled_from([1e-3, 1.0, 16.0, 1e6])


def test_the_window_holds_and_no_wait_comes_sooner_than_it_has_to() -> None:
    search(check_window, programs(), WINDOW, fixed=30)


def check_window(program: Program, window: int) -> None:
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


def test_the_cap_holds_and_reloads_come_in_the_order_of_need() -> None:
    search(check_cap, programs(), ROOM, LINKS, fixed=30)


def check_cap(program: Program, cap: int, bandwidth: float) -> None:
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


@pytest.mark.parametrize(
    "examples", [pytest.param(20, marks=pytest.mark.short), pytest.param(150, marks=pytest.mark.long)]
)
def test_every_pass_keeps_the_order_of_bytes_and_the_bits(examples: int) -> None:
    search(check_bits, programs(), ROOM, WINDOW, LINKS, fixed=examples)


def check_bits(program: Program, cap: int, window: int, bandwidth: float) -> None:
    graph = traced(program)
    wanted = run(graph, FEW, NARROW)
    stages: list[Any] = [insert_asynchronous(graph)]
    stages.append(prefetch(stages[-1], cap, bandwidth, seconds))
    stages.append(sink_waits(stages[-1], window))
    stages.append(pin(stages[-1]))
    for stage in stages:
        stage.lint()
        ran = run(stage, FEW, NARROW)
        assert ran.violations == []
        assert torch.equal(ran.results[0], wanted.results[0])
        assert ran.stats.bytes_out == wanted.stats.bytes_out > 0
        assert ran.stats.bytes_in == wanted.stats.bytes_in


# -- cost -------------------------------------------------------------------------------------------------------------


def with_all_passes(halves: Split) -> tuple[Graph, Graph]:
    """Returns both graphs of a step after all passes; what they are given stays as it is."""
    config = config_of(tier="host")
    choice = halves.choose(config)
    room = 8 * max(group.nbytes for group in choice.groups)
    given = halves.forward.graph, halves.backward.graph, halves.num_outputs
    forward, backward = map(insert_asynchronous, insert_synchronous(*given, choice, config))
    backward = prefetch(backward, room, 1e9, roofline(Machine("slow", 1e9, 1e9, 1e9)))
    return pin(sink_waits(forward, room)), pin(backward)


def calls_a_node(halves: Split) -> float:
    """Counts the functions, of Python and of C, that the passes call for each node of both graphs."""
    found: Counter[str] = Counter()
    before = sys.getprofile()
    sys.setprofile(lambda frame, event, _: found.update([event]))
    try:
        with_all_passes(halves)
    finally:
        sys.setprofile(before)
    return (found["call"] + found["c_call"]) / sum(len(one.graph.nodes) for one in (halves.forward, halves.backward))


def most_pins(graph: Graph) -> int:
    """Returns the most neighbours that one transfer, or one wait, of ``graph`` is pinned to."""
    pins: Counter[Node] = Counter()
    ends: dict[Node, Node] = {}  # who a tensor stands for: the transfer, and from its wait on the wait
    for node in graph.nodes:
        if node.target in (ops.offload, ops.reload, ops.wait_tensor):
            ends[node.args[0] if node.target is ops.wait_tensor else node] = node
            pins[node] += "after" in node.kwargs
        elif getattr(node.target, "__name__", "") == "control_deps":
            pins.update(ends[one] for one in node.args[0] if one in ends)  # the others are what it is made from
    return max(pins.values())


@pytest.mark.long
def test_a_node_of_a_large_graph_takes_as_many_calls_as_one_of_a_small_one() -> None:
    small, large = (split(Stack(Shape(layers, 64, 128, 4)), torch.randn(128, 64).bfloat16())[0] for layers in (2, 8))
    for halves in (small, large):
        with_all_passes(halves)  # the first looks things up that are remembered
    assert calls_a_node(large) < 1.1 * calls_a_node(small)
    assert 0 < max(map(most_pins, with_all_passes(large))) <= 2, "pinned to two neighbours"
