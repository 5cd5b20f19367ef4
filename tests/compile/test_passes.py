"""What passes over graphs do grows with a graph and not with its square; a transfer is pinned to two neighbours."""

from __future__ import annotations

import sys
from collections import Counter
from dataclasses import replace

import pytest
from torch.fx import Graph, Node

import eager_offload as eo
from benchmarks.models import Shape
from eager_offload.compile import choose, insert_asynchronous, insert_synchronous, ops
from eager_offload.compile.cost import roofline
from eager_offload.compile.graphs import nbytes_of
from eager_offload.compile.order import pin, prefetch, sink_waits
from eager_offload.machine import Machine
from eager_offload.planning.problem import floor_seconds
from tests.simulation.graphs import Halves, halves_of
from tests.simulation.large import H200, LARGE
from tests.simulation.player import Kind, play


def run(halves: Halves) -> tuple[Graph, Graph]:
    """All passes over both graphs of a step; what they are given stays as it is."""
    config = eo.OffloadConfig(tier="host", min_bytes=0, keep_last_bytes=0)
    given = halves.forward.graph, halves.backward.graph, halves.num_outputs
    choice = choose(*given, config)
    room = 8 * max(group.nbytes for group in choice.groups)
    forward, backward = map(insert_asynchronous, insert_synchronous(*given, choice, config))
    backward = prefetch(backward, room, 1e9, roofline(Machine("slow", 1e9, 1e9, 1e9)))
    return pin(sink_waits(forward, room)), pin(backward)


def calls_a_node(halves: Halves) -> float:
    """How many functions, of Python and of C, the passes call for each node of both graphs."""
    found: Counter[str] = Counter()
    before = sys.getprofile()
    sys.setprofile(lambda frame, event, _: found.update([event]))
    try:
        run(halves)
    finally:
        sys.setprofile(before)
    return (found["call"] + found["c_call"]) / sum(len(one.graph.nodes) for one in (halves.forward, halves.backward))


def most_pins(graph: Graph) -> int:
    """The most neighbours that one transfer, or one wait, of ``graph`` is pinned to."""
    pins: Counter[Node] = Counter()
    ends: dict[Node, Node] = {}  # who a tensor stands for: the transfer, and from its wait on the wait
    for node in graph.nodes:
        if node.target in (ops.offload, ops.reload, ops.wait_tensor):
            ends[node.args[0] if node.target is ops.wait_tensor else node] = node
            pins[node] += "after" in node.kwargs
        elif getattr(node.target, "__name__", "") == "control_deps":
            pins.update(ends[one] for one in node.args[0] if one in ends)  # the others are what it is made from
    return max(pins.values())


def test_a_node_of_a_large_graph_takes_as_many_calls_as_one_of_a_small_one() -> None:
    small, large = (halves_of(Shape(layers, 64, 128, 4), tokens=128) for layers in (2, 8))
    for halves in (small, large):
        run(halves)  # the first looks things up that are remembered
    assert calls_a_node(large) < 1.1 * calls_a_node(small)
    assert 0 < max(map(most_pins, run(large))) <= 2


@pytest.mark.parametrize("tokens", [32 << 10, 128 << 10])
def test_a_compiled_step_of_a_large_model_takes_what_its_compute_or_its_link_takes(tokens: int) -> None:
    """Also where the rates are a quarter off that the passes believe in; and windows hold."""
    truth = replace(H200, single_flops=H200.flops / 16, launch_seconds=0.0)
    belief = replace(
        truth, flops=truth.flops * 1.25, single_flops=truth.single_flops * 1.25, memory=truth.memory / 1.25
    )
    halves = halves_of(replace(LARGE, layers=2), tokens)
    window = 5 * max(nbytes_of(node.meta["val"]) for node in halves.saved())
    config = eo.OffloadConfig(tier="host", max_inflight_bytes=window, prefetch_bytes=window)
    forward, backward = halves.with_transfers(halves.choose(config), config)
    graphs = sink_waits(forward, window), prefetch(backward, window, truth.back, roofline(belief))
    out, back = (play(graph, roofline(truth), truth) for graph in graphs)
    assert out.bytes_out == back.bytes_back > 0
    floor = floor_seconds(out.compute_seconds, back.compute_seconds, out.bytes_out, truth.out, truth.back)
    assert out.seconds + back.seconds < 1.03 * floor
    assert out.most[Kind.OUT] <= window
    assert back.most[Kind.BACK] <= window
