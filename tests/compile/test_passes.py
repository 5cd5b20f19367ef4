"""What passes over graphs do grows with a graph and not with its square; a transfer is pinned to two neighbours."""

from __future__ import annotations

import sys
from collections import Counter

import pytest
import torch
from torch.fx import Graph, Node

import eager_offload as eo
from benchmarks.models import Shape, Stack
from eager_offload.compile import choose, insert_asynchronous, insert_synchronous, ops
from eager_offload.compile.decide import roofline
from eager_offload.compile.order import pin, prefetch, sink_waits
from eager_offload.planning.machine import Machine
from tests.compile.split import Split, split


def run(halves: Split) -> tuple[Graph, Graph]:
    """All passes over both graphs of a step; what they are given stays as it is."""
    config = eo.OffloadConfig(tier="host", min_bytes=0, keep_last_bytes=0)
    given = halves.forward.graph, halves.backward.graph, halves.num_outputs
    choice = choose(*given, config)
    room = 8 * max(group.nbytes for group in choice.groups)
    forward, backward = map(insert_asynchronous, insert_synchronous(*given, choice, config))
    backward = prefetch(backward, room, 1e9, roofline(Machine("slow", 1e9, 1e9, 1e9)))
    return pin(sink_waits(forward, room)), pin(backward)


def calls_a_node(halves: Split) -> float:
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


@pytest.mark.long
def test_a_node_of_a_large_graph_takes_as_many_calls_as_one_of_a_small_one() -> None:
    small, large = (split(Stack(Shape(layers, 64, 128, 4)), torch.randn(128, 64).bfloat16())[0] for layers in (2, 8))
    for halves in (small, large):
        run(halves)  # the first looks things up that are remembered
    assert calls_a_node(large) < 1.1 * calls_a_node(small)
    assert 0 < max(map(most_pins, run(large))) <= 2
