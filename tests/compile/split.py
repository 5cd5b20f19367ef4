"""What AOTAutograd hands to a partitioner, with the passes in between, run as it stands."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch._dynamo
from functorch.compile import default_partition, make_boxed_func, min_cut_rematerialization_partition
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch.fx import Graph, GraphModule, Node

import eager_offload as eo
from eager_offload import contexts
from eager_offload.compile import (
    Choice,
    choose,
    choose_joint,
    insert_asynchronous,
    insert_synchronous,
    insert_synchronous_joint,
)
from eager_offload.compile.graphs import outputs_of, storage_of
from tests.proof.bits import same_bits

PARTITIONERS = {"default": default_partition, "min_cut": min_cut_rematerialization_partition}

#: Changes both graphs of a split one, given how many outputs are the user's.
Change = Callable[["Split"], None]


@dataclass
class Split:
    """A function's forward and backward."""

    forward: GraphModule
    backward: GraphModule
    num_outputs: int

    def saved(self) -> list[Node]:
        """What travels from one to the other."""
        return [node for node in outputs_of(self.forward.graph)[self.num_outputs :] if isinstance(node, Node)]

    def choose(self, config: eo.OffloadConfig) -> Choice:
        return choose(self.forward.graph, self.backward.graph, self.num_outputs, config)

    def insert(self, config: eo.OffloadConfig, choice: Choice | None = None) -> Choice:
        """Puts the synchronous operations in."""
        choice = choice or self.choose(config)
        graphs = insert_synchronous(self.forward.graph, self.backward.graph, self.num_outputs, choice, config)
        self.take(*graphs)
        return choice

    def take(self, forward: Graph, backward: Graph) -> None:
        for module, graph in ((self.forward, forward), (self.backward, backward)):
            graph.lint()
            module.graph = graph
            module.recompile()


def config_of(**fields: Any) -> eo.OffloadConfig:
    """Moves everything that can move, unless ``fields`` say otherwise."""
    return eo.OffloadConfig(**{"tier": "disk", "min_bytes": 0, "keep_last_bytes": 0, **fields})


def split(
    function: Callable[..., Any],
    *inputs: Tensor,
    change: Change = lambda split: None,
    partition: str = "default",
    dynamic: bool = False,
) -> tuple[Split, Callable[..., Any]]:
    """Compiles ``function`` and returns its graphs, and the function that runs them."""
    found: list[Split] = []

    def changed(module: GraphModule, joint: Sequence[object], **named: Any) -> tuple[GraphModule, GraphModule]:
        one = Split(*PARTITIONERS[partition](module, joint, **named), named["num_fwd_outputs"])
        change(one)
        found.append(one)
        return one.forward, one.backward

    def as_is(module: GraphModule, inputs: Sequence[object]) -> Any:
        return make_boxed_func(module.forward)

    torch._dynamo.reset()
    backend = aot_autograd(fw_compiler=as_is, bw_compiler=as_is, partition_fn=changed)
    run = torch.compile(function, backend=backend, dynamic=dynamic, fullgraph=True)
    run(*inputs)
    assert found, "nothing was to be differentiated"
    return found[0], run


def with_transfers(
    module: GraphModule, boundary: Node, config: eo.OffloadConfig, *, waits: bool = False
) -> tuple[GraphModule, Choice]:
    """A joint graph with all transfers that are chosen in it."""
    choice = choose_joint(module.graph, boundary, config)
    graph = insert_synchronous_joint(module.graph, boundary, choice, config)
    return GraphModule(module, graph if waits else insert_asynchronous(graph)), choice


def gradients(function: Callable[..., Any], *inputs: Tensor) -> list[Tensor | None]:
    """The outputs of ``function`` and the gradients of the sum of their squares."""
    leaves = [one.detach().clone().requires_grad_(one.requires_grad) for one in inputs]
    outputs = function(*leaves)
    outputs = [outputs] if isinstance(outputs, Tensor) else list(outputs)
    sum(one.square().sum() for one in outputs if one.requires_grad).backward()
    return [*(one.detach() for one in outputs), *(leaf.grad for leaf in leaves)]


def owner(node: Node) -> str:
    """The node that made the storage that ``node`` shares."""
    key = storage_of(node)
    return next(one.name for one in node.graph.nodes if storage_of(one) is key)


def reasons(choice: Choice) -> dict[str, str]:
    """Why each storage that stays does, by what made it."""
    return {owner(node): reason.value for node, reason in choice.kept.items()}


def moving(choice: Choice) -> set[str]:
    """What made the storages that move."""
    return {owner(group.base) for group in choice.groups}


def stats_of(config: eo.OffloadConfig) -> eo.OffloadStats:
    """What was done for graphs of ``config`` outside of every ``with``."""
    return contexts.serving(config.to_text()).stats(synchronize=True)


def assert_moves_exactly(
    function: Callable[..., Any],
    *inputs: Tensor,
    config: eo.OffloadConfig | None = None,
    partition: str = "default",
    dynamic: bool = False,
    more: Change = lambda split: None,
    shapes: Sequence[Sequence[Tensor]] = (),
) -> tuple[Split, Choice]:
    """Asserts that the graphs of ``function`` give the same bits with transfers in them, and that bytes moved.

    Args:
        more: what is done to the graphs after the synchronous operations are in.
        shapes: further inputs, of other sizes.
    """
    config = config or config_of()
    choices: list[Choice] = []

    def change(one: Split) -> None:
        choices.append(one.insert(config))
        more(one)

    one, run = split(function, *inputs, change=change, partition=partition, dynamic=dynamic)
    choice = choices[0]
    for given in (inputs, *shapes):
        before = stats_of(config)
        ours, theirs = gradients(run, *given), gradients(function, *given)
        after = stats_of(config)
        assert all(map(same_bits, ours, theirs)), "the results are others"
        assert after.bytes_out > before.bytes_out, "nothing moved"
        assert after.bytes_in > before.bytes_in, "nothing came back"
        if not dynamic:
            assert after.bytes_out - before.bytes_out == sum(group.nbytes for group in choice.groups)
    assert len(choices) == 1, f"compiled {len(choices)} times"
    return one, choice
