"""How long a graph takes whose operators and transfers run on streams of their own, on a virtual clock."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from torch.fx import Graph, Node

from eager_offload.compile import ops
from eager_offload.compile.graphs import nbytes_of
from eager_offload.machine import Machine


class Kind(Enum):
    OUT = "out"
    BACK = "back"
    WAIT = "wait"


#: Which operations are transfers, and what waits for them by its first argument.
KINDS: dict[object, Kind] = {ops.offload: Kind.OUT, ops.reload: Kind.BACK, ops.wait_tensor: Kind.WAIT}


@dataclass
class Played:
    """What came of one graph. Seconds and bytes."""

    seconds: float = 0.0
    compute_seconds: float = 0.0
    bytes_out: int = 0
    bytes_back: int = 0
    #: The most bytes that had started and were not waited for.
    most: dict[Kind, int] = field(default_factory=lambda: {Kind.OUT: 0, Kind.BACK: 0})


def play(graph: Graph, seconds: Callable[[Node], float], link: Machine) -> Played:
    """Runs the nodes of ``graph`` in order on one stream, and its transfers on one for each way.

    Args:
        seconds: that an operator takes.
    """
    played = Played()
    rates = {Kind.OUT: link.out, Kind.BACK: link.back}
    free = {Kind.OUT: 0.0, Kind.BACK: 0.0}
    over: dict[Node, float] = {}
    under: dict[Kind, dict[Node, int]] = {Kind.OUT: {}, Kind.BACK: {}}
    now = 0.0
    for node in graph.nodes:
        kind = KINDS.get(node.target) if node.op == "call_function" else None
        if kind is None:
            taken = seconds(node)
            played.compute_seconds += taken
            now += taken
        elif kind is Kind.WAIT:
            transfer: Any = node.args[0]
            now = max(now, over[transfer])
            for flying in under.values():
                flying.pop(transfer, None)
        else:
            end: Any = node.args[0] if kind is Kind.OUT else node
            nbytes = nbytes_of(end.meta["val"])
            over[node] = free[kind] = max(now, free[kind]) + nbytes / rates[kind]
            flying = under[kind]
            flying[node] = nbytes
            played.most[kind] = max(played.most[kind], sum(flying.values()))
            if kind is Kind.OUT:
                played.bytes_out += nbytes
            else:
                played.bytes_back += nbytes
    played.seconds = now
    return played
