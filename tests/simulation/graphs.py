"""A large model's forward and backward as a compiler sees them: no numbers, only shapes, so that any size fits."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch._dynamo
from functorch.compile import default_partition, make_boxed_func
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph, GraphModule, Node

from benchmarks.models import Shape, Stack
from eager_offload import OffloadConfig
from eager_offload.compile import Choice, choose, insert_asynchronous, insert_synchronous
from eager_offload.compile.graphs import outputs_of, storage_of


@dataclass
class Halves:
    """The two graphs of a training step."""

    forward: GraphModule
    backward: GraphModule
    #: How many of the forward's outputs are the user's.
    num_outputs: int

    def saved(self) -> list[Node]:
        """What the forward leaves to the backward, and nothing else holds."""
        inputs = {storage_of(node) for node in self.forward.graph.find_nodes(op="placeholder")}
        return [
            node
            for node in outputs_of(self.forward.graph)[self.num_outputs :]
            if isinstance(node, Node) and storage_of(node) is not None and storage_of(node) not in inputs
        ]

    def choose(self, config: OffloadConfig) -> Choice:
        return choose(self.forward.graph, self.backward.graph, self.num_outputs, config)

    def with_transfers(self, choice: Choice, config: OffloadConfig) -> tuple[Graph, Graph]:
        """Both graphs with transfers, as early and as late as data flows."""
        forward, backward = insert_synchronous(
            self.forward.graph, self.backward.graph, self.num_outputs, choice, config
        )
        return insert_asynchronous(forward), insert_asynchronous(backward)


def halves_of(shape: Shape, tokens: int) -> Halves:
    """The graphs of a stack of blocks for one sequence of ``tokens``, as AOTAutograd splits them by itself."""
    with torch.device("meta"):
        like = Stack(shape)

    return traced(lambda: (like.to_empty(device="cpu"), torch.empty(tokens, shape.width, dtype=torch.bfloat16)))


def traced(
    make: Callable[[], tuple[nn.Module, Tensor]],
    partition: Callable[..., tuple[GraphModule, GraphModule]] = default_partition,
    decompositions: Mapping[Any, Any] | None = None,
) -> Halves:
    """The graphs of what ``make`` makes among fake tensors: a model, and what it is given."""
    found: list[Halves] = []

    def split(module: GraphModule, joint: Sequence[object], **named: Any) -> tuple[GraphModule, GraphModule]:
        forward, backward = partition(module, joint, **named)
        found.append(Halves(forward, backward, named["num_fwd_outputs"]))
        return forward, backward

    def as_is(module: GraphModule, inputs: Sequence[object]) -> Callable[..., Any]:
        boxed: Callable[..., Any] = make_boxed_func(module.forward)
        return boxed

    torch._dynamo.reset()
    with FakeTensorMode(allow_non_fake_inputs=True):
        model, x = make()
        backend = aot_autograd(fw_compiler=as_is, bw_compiler=as_is, partition_fn=split, decompositions=decompositions)
        torch.compile(model, backend=backend, dynamic=False, fullgraph=True)(x)
    torch._dynamo.reset()
    return found[0]
