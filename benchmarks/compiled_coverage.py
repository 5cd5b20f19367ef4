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
from torch import nn
from torch._functorch.partitioners import default_partition, min_cut_rematerialization_partition
from torch._inductor.decomposition import select_decomp_table
from torch.fx import Node
from torch.utils._ordered_set import OrderedSet

import eager_offload as eo
from benchmarks import models
from benchmarks.common import MIB, Report, command_line, drive, parse, show
from benchmarks.simulation.graphs import traced
from eager_offload.compile.graphs import hint, nbytes_of, outputs_of, storage_of, tensor_of

from lm.model import Block

#: Of the bytes that nothing outside holds, at least so much is freed,
LEAST_COVERAGE = 0.95
#: and for one byte that is freed at most so many travel.
MOST_MOVED = 1.01

#: Makes a block of a width and a number of heads.
MODELS: dict[str, Callable[[int, int], nn.Module]] = {
    "GPT": Block,
    "Llama": lambda width, heads: models.Block(models.Shape(1, width, 3 * width, heads)),
}
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

    def make() -> tuple[nn.Module, torch.Tensor]:
        model = nn.Sequential(*(MODELS[name](options.width, options.heads) for _ in range(options.layers)))
        return model, torch.randn(options.batch, options.sequence, options.width)

    decompositions = select_decomp_table() if partitioner == "min-cut" else None
    halves = traced(make, PARTITIONERS[partitioner], decompositions)
    outputs, inputs = outputs_of(halves.forward.graph), halves.forward.graph.find_nodes(op="placeholder")
    results, values = outputs[: halves.num_outputs], outputs[halves.num_outputs :]
    outside = {storage_of(one) for one in (*inputs, *results, *outputs_of(halves.backward.graph))}
    saved = [one for one in values if tensor_of(one) is not None and storage_of(one) not in outside]
    storages: dict[object, list[Node]] = {}
    for node in saved:
        assert isinstance(node, Node)
        storages.setdefault(storage_of(node), []).append(node)
    choice = halves.choose(eo.OffloadConfig(min_bytes=options.min_bytes, keep_last_bytes=0))
    ours = {node for group in choice.groups for node in group.members}
    theirs = _torchs_choice(saved, outputs, halves.num_outputs, [inputs[index] for index in halves.static])
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
    """What torch's own rule takes of ``saved``, once all of it is marked; ``None`` where this torch has another."""
    try:
        from torch._functorch._activation_offloading.activation_offloading import can_offload

        results, users = OrderedSet(outputs), OrderedSet(outputs[:num_outputs])
        return {node for node in saved if can_offload(node, results, users, OrderedSet(static))}
    except (ImportError, TypeError):
        return None


def options_of(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = command_line(__doc__, layers=4, width=1024, heads=16, batch=8, sequence=512, min_bytes="1MiB")
    return parse(parser, arguments, layers=1)


def run(report: Report, options: argparse.Namespace) -> tuple[object, object]:
    found = [measure(name, partitioner, options) for name in MODELS for partitioner in PARTITIONERS]
    summary = {}
    for one in found:
        title = f"{one.model}, {one.partitioner}"
        summary[title] = {
            "saved values": one.saved_values,
            "MiB": one.total_bytes / MIB,
            "freed": one.freed,
            "moved/freed": one.moved_bytes / one.freed_bytes,
            "torch frees": one.torch_freed_bytes and one.torch_freed_bytes / one.total_bytes,
            "torch moves/frees": one.torch_freed_bytes and (one.torch_moved_bytes or 0) / one.torch_freed_bytes,
        }
        report.at_least(f"{title}: freed, of the bytes that nothing else holds", one.freed, LEAST_COVERAGE)
        report.at_most(f"{title}: bytes moved for each that is freed", one.moved_bytes / one.freed_bytes, MOST_MOVED)
    show("Storages that nothing else holds", ({"": title, **figures} for title, figures in summary.items()))
    return found, summary


if __name__ == "__main__":
    sys.exit(drive("compiled_coverage", options_of(), run))
