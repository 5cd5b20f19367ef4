"""Graphs with transfers, run operator by operator on the simulated runtime under the happens-before checker."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Interpreter, Node
from torch.fx.experimental.proxy_tensor import make_fx

from eager_offload import Offload, OffloadStats
from eager_offload.compile import ops
from eager_offload.compile.graphs import nbytes_of
from eager_offload.compile.insert import insert_asynchronous
from eager_offload.compile.ops import bytes_of
from tests.simulation.checker import Violation
from tests.simulation.simulated import SimulatedRuntime

CPU = torch.device("cpu")
#: What every graph here is made for.
FIELDS: dict[str, Any] = {"tier": "host", "min_bytes": 0, "keep_last_bytes": 0}
CONFIG = Offload(**FIELDS).config_key


@dataclass(frozen=True)
class Run:
    """What came of a graph, and what the checker says of the way."""

    results: list[Tensor]
    violations: list[Violation] = field(repr=False)
    stats: OffloadStats


@contextmanager
def _offloading(runtime: SimulatedRuntime) -> Iterator[Offload]:
    offload = Offload(runtime=runtime, **FIELDS)
    try:
        with torch.no_grad(), offload:
            yield offload
    finally:
        offload.close()


def run(graph: Graph, *inputs: Tensor) -> Run:
    """Runs ``graph`` as it stands; values go after their last use. Copies run as late as their ordering allows.

    Placeholders that a reload takes get the host tensors of ``inputs``. Whatever configuration the graph was made for,
    it is the one here that carries it out.
    """
    # Calls of the host take no time: so no query hides that a wait is missing.
    runtime = SimulatedRuntime(launch_seconds=0.0)
    module = GraphModule(graph.owning_module or {}, graph)
    for node in module.graph.nodes:
        if node.target in (ops.offload, ops.reload, ops.wait_tensor):
            # It names what has to come first. The checker knows operators by their schema, and would call it a read.
            node.kwargs = {name: value for name, value in node.kwargs.items() if name != "after"}
            if node.target is not ops.wait_tensor:
                node.kwargs = {**node.kwargs, "config": CONFIG}
        elif getattr(node.target, "__name__", "") == "control_deps":
            node.target = _pinned  # not every version runs it where an operator is watched
    with runtime.checked() as checker, _offloading(runtime) as offload:
        values = list(inputs)
        for position, node in enumerate(graph.find_nodes(op="placeholder")):
            if any(user.target is ops.reload for user in node.users):
                values[position] = ops.offload(values[position], config=CONFIG)
        found = Interpreter(module).run(*values)
        results = [one.clone() for one in (found if isinstance(found, list | tuple) else [found]) if _has_bytes(one)]
        del found, values
        stats = offload.stats(synchronize=True)
    return Run(results, checker.violations, stats)


def _pinned(dependencies: object, operator: Callable[..., Any], *inputs: Tensor) -> Any:
    """What a pinned operator does."""
    return operator(*inputs)


def _has_bytes(value: object) -> bool:
    """Not the host tensors: the graph that saves them only keeps them."""
    return isinstance(value, Tensor) and bytes_of(value) is None


def asynchronous(program: Callable[..., object], *inputs: Tensor) -> Graph:
    """The graph of ``program``, whose transfers do not wait any more."""
    return insert_asynchronous(make_fx(program, tracing_mode="fake")(*inputs).graph)


def chain(length: int) -> Callable[..., Any]:
    """Forward and backward of a chain of products in one: every value goes out, and comes back for its gradient."""

    def program(x: Tensor, weight: Tensor) -> Tensor:
        hosts = []
        for _ in range(length):
            x = torch.mm(x, weight).tanh()
            hosts.append(ops.offload(x, config=CONFIG))
        grad = torch.ones_like(x)
        for host in reversed(hosts):
            y = ops.reload(host, CPU, config=CONFIG)
            grad = torch.mm(grad * (1 - y * y), weight.t())
        return grad

    return program


def of_kind(graph: Graph, operation: object) -> list[Node]:
    """The nodes that call ``operation``, in order."""
    return [node for node in graph.nodes if node.target is operation]


def wait_of(transfer: Node) -> Node:
    """Who waits for a transfer."""
    (wait,) = (user for user in transfer.users if user.target is ops.wait_tensor and user.args[0] is transfer)
    return wait


def labels(graph: Graph) -> list[str]:
    """What each node does, in a word."""
    kinds = {ops.offload: "offload", ops.reload: "reload", ops.wait_tensor: "wait"}
    return [kinds.get(node.target, node.op if node.op != "call_function" else "compute") for node in graph.nodes]


def peak_flying(graph: Graph) -> tuple[int, int]:
    """The most bytes of offloads that have started and were not waited for: of two or more at a time, and of one."""
    return _peaks(graph, ops.offload, lambda node: node.args[0])


def peak_open(graph: Graph) -> tuple[int, int]:
    """The most bytes of reloads that have started and were not waited for: of two or more at a time, and of one."""
    return _peaks(graph, ops.reload, lambda node: node)


def _peaks(graph: Graph, operation: object, holder: Callable[[Node], Any]) -> tuple[int, int]:
    under: dict[Node, int] = {}
    together = alone = 0
    for node in graph.nodes:
        if node.target is operation:
            under[node] = nbytes_of(holder(node).meta["val"])
        elif node.target is ops.wait_tensor:
            under.pop(node.args[0], None)
        if len(under) > 1:
            together = max(together, sum(under.values()))
        alone = max(alone, *under.values(), 0)
    return together, alone
