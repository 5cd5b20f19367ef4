"""What a graph of the virtual device consists of, and what nothing in it orders."""

from __future__ import annotations

import json
import tempfile
import threading
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.simulation.checker import Checker, Violation
from tests.simulation.log import Allocated, ByteRegion, Freed, Operation, Recorded, Waited
from tests.virtual_device.backend import side_stream

if not hasattr(torch.accelerator, "Graph"):  # whoever imports this is a test of graphs
    pytest.skip("this torch captures nothing on such a device", allow_module_level=True)

Edge = tuple[int, int]


@dataclass(frozen=True, eq=False)
class Node:
    """A piece of work in a graph."""

    number: int
    #: ``kernel``, ``copy out``, ``copy in``; ``allocate`` and ``free`` paint memory.
    kind: str
    #: The operator.
    what: str
    #: The number of the stream that was captured.
    stream: int
    reads: tuple[ByteRegion, ...]
    writes: tuple[ByteRegion, ...]
    #: Numbers of the nodes that it waits for.
    after: tuple[int, ...]

    @property
    def edges(self) -> list[Edge]:
        return [(before, self.number) for before in self.after]

    def __str__(self) -> str:
        return f"{self.stream} (node {self.number}, {self.what})"


@contextmanager
def capturing(mode: str = "default", stream: torch.Stream | None = None, **arguments: Any) -> Iterator[Any]:
    """A graph in debug mode, captured inside on ``stream``, else on one of its own, which is the current one there."""
    graph = torch.accelerator.Graph(capture_error_mode=mode, **arguments)  # type: ignore[arg-type]
    graph.enable_debug_mode()
    with stream or side_stream(), graph:
        yield graph


def nodes_of(graph: torch.accelerator.Graph) -> list[Node]:
    """The nodes, each behind all that it waits for; ``graph`` is in debug mode."""
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "graph.json"
        graph.debug_dump(str(path))
        found = json.loads(path.read_text())
    return [
        Node(
            number,
            entry["kind"],
            entry["what"],
            entry["stream"],
            tuple(ByteRegion("memory", *ends) for ends in entry["reads"]),
            tuple(ByteRegion("memory", *ends) for ends in entry["writes"]),
            tuple(entry["after"]),
        )
        for number, entry in enumerate(found)
    ]


def violations(nodes: Sequence[Node], without: Collection[Edge] = ()) -> list[Violation]:
    """What the happens-before checker says of one replay, in which the edges ``without`` are not kept.

    Each node is a stream by itself, since in a replay only edges order nodes.
    """
    checker = Checker()
    events = [threading.Event() for _ in nodes]
    for node in nodes:
        for before in node.after:
            if (before, node.number) not in without:
                checker.write(Waited(node, events[before]))
        if node.kind == "allocate":
            checker.write(Allocated(node, node.writes[0], node.what))
        elif node.kind == "free":
            checker.write(Freed(node, node.writes[0], node.what))
        else:
            checker.write(Operation(node, node.reads, node.writes, node.what))
        checker.write(Recorded(node, events[node.number]))
    return checker.violations
