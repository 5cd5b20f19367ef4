"""How much of what a compiled graph saves can leave the device, and how many bytes travel for it.

    python -m benchmarks.compiled_coverage
    python -m benchmarks.compiled_coverage --layers 32

A GPT with one projection for queries, keys and values, and a Llama with three, are traced with fake tensors and split
by both of AOTAutograd's partitioners. Counted are the storages of saved values that nothing outside of the graph holds:
no input, no output and no gradient shares them. A storage is freed if every saved value in it moves. Beside it stands
what the rule of torch's own pass for offloading activations frees, where this torch has one.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.partitioners import default_partition, min_cut_rematerialization_partition
from torch._inductor.decomposition import select_decomp_table
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import GraphModule, Node
from torch.utils._ordered_set import OrderedSet

import eager_offload as eo
from benchmarks.common import MIB, Report, console, drive, table
from benchmarks.options import command_line, parse
from eager_offload.compile import choose
from eager_offload.compile.graphs import hint, nbytes_of, outputs_of, storage_of, tensor_of

from lm.model import Block

#: Of the bytes that nothing outside holds, at least so much is freed,
LEAST_COVERAGE = 0.95
#: and for one byte that is freed at most so many travel.
MOST_MOVED = 1.01


class Separate(nn.Module):
    """A Llama's block: three projections, and a gated feed-forward."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList([nn.RMSNorm(width), nn.RMSNorm(width)])
        self.q, self.k, self.v, self.out = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.gate, self.up = (nn.Linear(width, 3 * width, bias=False) for _ in range(2))
        self.down = nn.Linear(3 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        h = self.norms[0](x)
        q, k, v = (one(h).view(batch, length, self.heads, -1).transpose(1, 2) for one in (self.q, self.k, self.v))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        h = self.norms[1](x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


MODELS: dict[str, type[nn.Module]] = {"GPT": Block, "Llama": Separate}
#: Inductor hands decomposed graphs to the one; the other is what ``aot_eager`` uses.
PARTITIONERS: dict[str, Callable[..., Any]] = {
    "min-cut": min_cut_rematerialization_partition,
    "default": default_partition,
}


@dataclass(frozen=True)
class Coverage:
    """One model, split in one way. Bytes of whole storages."""

    model: str
    partitioner: str
    saved_values: int
    #: That the graph saves and nothing outside holds.
    total_bytes: int
    #: Of those, what our choice frees, and what travels for it.
    freed_bytes: int
    moved_bytes: int
    #: Of those, what torch's own rule frees, and what travels for it; ``None`` where this torch has none.
    torch_freed_bytes: int | None
    torch_moved_bytes: int | None
    #: Bytes of values that stay, by reason.
    kept_bytes: dict[str, int]

    @property
    def freed(self) -> float:
        return self.freed_bytes / self.total_bytes


def measure(name: str, partitioner: str, options: argparse.Namespace) -> Coverage:
    """Traces a model and looks at what it saves."""
    found: list[Coverage] = []

    def looking(module: GraphModule, joint: Sequence[object], **named: Any) -> tuple[GraphModule, GraphModule]:
        forward, backward = PARTITIONERS[partitioner](module, joint, **named)
        static = named.get("static_lifetime_input_indices") or []
        found.append(_coverage(name, partitioner, forward, backward, named["num_fwd_outputs"], static, options))
        return forward, backward

    def as_is(module: GraphModule, inputs: Sequence[object]) -> Any:
        def run(arguments: list[object]) -> Any:
            return module.forward(*arguments)

        run._boxed_call = True  # type: ignore[attr-defined]  # how torch marks what takes one list
        return run

    torch._dynamo.reset()
    decompositions = select_decomp_table() if partitioner == "min-cut" else None
    backend = aot_autograd(fw_compiler=as_is, bw_compiler=as_is, partition_fn=looking, decompositions=decompositions)
    with FakeTensorMode(allow_non_fake_inputs=True):
        model = nn.Sequential(*(MODELS[name](options.width, options.heads) for _ in range(options.layers)))
        x = torch.randn(options.batch, options.sequence, options.width)
        torch.compile(model, backend=backend, dynamic=False, fullgraph=True)(x)
    return found[0]


def _coverage(
    name: str,
    partitioner: str,
    forward: GraphModule,
    backward: GraphModule,
    num_outputs: int,
    static: Sequence[int],
    options: argparse.Namespace,
) -> Coverage:
    outputs = outputs_of(forward.graph)
    inputs = forward.graph.find_nodes(op="placeholder")
    outside = {storage_of(one) for one in (*inputs, *outputs[:num_outputs], *outputs_of(backward.graph))}
    saved = [one for one in outputs[num_outputs:] if tensor_of(one) is not None and storage_of(one) not in outside]
    storages: dict[object, list[Node]] = {}
    for node in saved:
        assert isinstance(node, Node)
        storages.setdefault(storage_of(node), []).append(node)
    config = eo.OffloadConfig(min_bytes=options.min_bytes, keep_last_bytes=0)
    choice = choose(forward.graph, backward.graph, num_outputs, config)
    ours = {node for group in choice.groups for node in group.members}
    theirs = _torchs_choice(saved, outputs, num_outputs, [inputs[index] for index in static])
    return Coverage(
        name,
        partitioner,
        len(saved),
        sum(nbytes_of(nodes[0].meta["val"]) for nodes in storages.values()),
        _freed(storages, ours),
        choice.moved_bytes(),
        None if theirs is None else _freed(storages, theirs),
        None if theirs is None else sum(hint(n.meta["val"].numel()) * n.meta["val"].itemsize for n in theirs),
        {reason.value: nbytes for reason, nbytes in choice.kept_bytes().items()},
    )


def _freed(storages: dict[object, list[Node]], moving: set[Node]) -> int:
    return sum(nbytes_of(nodes[0].meta["val"]) for nodes in storages.values() if moving.issuperset(nodes))


def _torchs_choice(
    saved: Sequence[Any], outputs: Sequence[object], num_outputs: int, static: Sequence[Node]
) -> set[Node] | None:
    """What torch's own rule takes of ``saved``, once all of it is marked."""
    try:
        from torch._functorch._activation_offloading.activation_offloading import can_offload
    except ImportError:
        return None
    results, users = OrderedSet(outputs), OrderedSet(outputs[:num_outputs])
    try:
        return {node for node in saved if can_offload(node, results, users, OrderedSet(static))}
    except TypeError:  # another signature
        return None


def options_of(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = command_line(__doc__, layers=4, width=1024, heads=16, batch=8, sequence=512, min_bytes="1MiB")
    return parse(parser, arguments, layers=1)


def run(report: Report, options: argparse.Namespace) -> tuple[object, object]:
    found = [measure(name, partitioner, options) for name in MODELS for partitioner in PARTITIONERS]
    shown = table("model, partitioner", "saved values", "MiB", "freed", "moved/freed", "torch frees", "moved/freed")
    for one in found:
        title = f"{one.model}, {one.partitioner}"
        shown.add_row(
            title,
            str(one.saved_values),
            f"{one.total_bytes / MIB:,.0f}",
            f"{one.freed:.1%}",
            f"{one.moved_bytes / one.freed_bytes:.3f}",
            "-" if one.torch_freed_bytes is None else f"{one.torch_freed_bytes / one.total_bytes:.1%}",
            f"{one.torch_moved_bytes / one.torch_freed_bytes:.3f}"
            if one.torch_freed_bytes and one.torch_moved_bytes
            else "-",
        )
        report.at_least(f"{title}: freed, of the bytes that nothing else holds", one.freed, LEAST_COVERAGE)
        report.at_most(f"{title}: bytes moved for each that is freed", one.moved_bytes / one.freed_bytes, MOST_MOVED)
    console.print(shown)
    summary = {f"{one.model}, {one.partitioner}": {"freed": one.freed} for one in found}
    return found, summary


if __name__ == "__main__":
    sys.exit(drive("compiled_coverage", options_of(), run))
