"""How long the passes over graphs take, and that they grow with the graph and not with its square.

    python -m benchmarks.compiled_passes
    python -m benchmarks.compiled_passes --nodes 2500,5000,10000,20000

A deep stack of small blocks, forward and backward, as AOTAutograd splits it; a graph counts with the nodes of both
halves. Pinning, which takes most of its time in a pass of Inductor's, is timed apart. Times are the processor's: the
passes are one thread that waits for nothing.
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import torch
from torch.fx import Graph, Node

import eager_offload as eo
from benchmarks.common import Report, Spread, command_line, drive, listed, parse, positive, show
from benchmarks.models import Shape
from benchmarks.simulation.graphs import Halves, halves_of
from eager_offload.compile import choose, insert_asynchronous, insert_synchronous, ops
from eager_offload.compile.cost import roofline
from eager_offload.compile.order import pin, prefetch, sink_waits
from eager_offload.machine import Machine

#: Seconds for ten thousand nodes.
LIMIT, COUNT = 1.0, 10_000
#: How much more a node may cost in the largest graph than in the smallest.
GROWTH = 1.5
TOKENS = 128
SHAPE = Shape(1, 64, 128, 4)
STEPS = ("choose", "insert", "take the waiting out", "prefetch", "sink waits", "pin")


@dataclass(frozen=True)
class Sample:
    """One run of all passes over one graph. Seconds."""

    nodes: int
    transfers: int
    #: By pass.
    seconds: dict[str, float]
    #: The most neighbours that a transfer is pinned to.
    pins: int

    @property
    def without_pins(self) -> float:
        return sum(taken for name, taken in self.seconds.items() if name != "pin")


def sample(halves: Halves) -> Sample:
    """Runs all passes; what they are given stays as it is."""
    config = eo.OffloadConfig(tier="host", min_bytes=0, keep_last_bytes=0)
    seconds: Counter[str] = Counter()

    def timed(name: str, work: Callable[..., Any], *arguments: Any) -> Any:
        gc.collect()
        started = time.process_time()
        result = work(*arguments)
        seconds[name] += time.process_time() - started
        return result

    forward, backward, count = halves.forward.graph, halves.backward.graph, halves.num_outputs
    nodes = len(forward.nodes) + len(backward.nodes)
    estimate = roofline(Machine("slow", 1e9, 1e9, 1e9))
    choice = timed("choose", choose, forward, backward, count, config)
    forward, backward = timed("insert", insert_synchronous, forward, backward, count, choice, config)
    forward = timed("take the waiting out", insert_asynchronous, forward)
    backward = timed("take the waiting out", insert_asynchronous, backward)
    room = 8 * max(group.nbytes for group in choice.groups)
    backward = timed("prefetch", prefetch, backward, room, 1e9, estimate)
    forward = timed("sink waits", sink_waits, forward, room)
    pinned = [timed("pin", pin, graph) for graph in (forward, backward)]
    transfers = 2 * len(choice.groups)
    return Sample(nodes, transfers, dict(seconds), max(map(most_pins, pinned)))


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
    return max(pins.values(), default=0)


def halves_with(nodes: int) -> Halves:
    """The graphs of a stack with about that many nodes."""
    small, large = (halves_of(replace(SHAPE, layers=layers), TOKENS) for layers in (1, 3))
    fewest, per_layer = _size(small), (_size(large) - _size(small)) / 2
    return halves_of(replace(SHAPE, layers=max(1, round((nodes - fewest) / per_layer) + 1)), TOKENS)


def _size(halves: Halves) -> int:
    return len(halves.forward.graph.nodes) + len(halves.backward.graph.nodes)


def run(report: Report, options: argparse.Namespace) -> tuple[object, object]:
    torch.set_num_threads(1)
    found: dict[int, list[Sample]] = {}
    for count in options.nodes:
        halves = halves_with(count)
        sample(halves)  # the first looks things up that are remembered
        found[count] = [sample(halves) for _ in range(options.rounds)]
    per_node = {count: median(one.without_pins / one.nodes for one in samples) for count, samples in found.items()}
    fewest, most = min(found), max(found)
    report.at_most(f"seconds for {COUNT:,} nodes", COUNT * per_node[most], LIMIT)
    report.at_most("a node in the largest graph over one in the smallest", per_node[most] / per_node[fewest], GROWTH)
    report.at_most("pinned neighbours of a transfer", max(one.pins for every in found.values() for one in every), 2)
    summary = [
        {
            "nodes": samples[0].nodes,
            "transfers": samples[0].transfers,
            **{name: Spread.of((one.seconds[name] for one in samples), 1e-3) for name in STEPS},
            "all but pins": Spread.of((one.without_pins for one in samples), 1e-3),
        }
        for samples in found.values()
    ]
    medians = ({what: getattr(one, "median", one) for what, one in row.items()} for row in summary)
    show("Medians in milliseconds", medians)
    return found, summary


def options_of() -> argparse.Namespace:
    parser = command_line(__doc__, rounds=5)
    parser.add_argument("--nodes", type=listed(positive), default="1000,3000,10000")
    return parse(parser, nodes=[300, 900], rounds=2)


if __name__ == "__main__":
    sys.exit(drive("compiled_passes", options_of(), run))
