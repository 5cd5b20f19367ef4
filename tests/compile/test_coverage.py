"""How much of what graphs save can move, and how many bytes travel for it: of storages that nothing outside holds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch._functorch.partitioners import default_partition, min_cut_rematerialization_partition
from torch._inductor.decomposition import select_decomp_table
from torch.fx import Node

import eager_offload as eo
from benchmarks import models
from eager_offload.compile.graphs import nbytes_of, outputs_of, storage_of, tensor_of
from eager_offload.stats import KeepReason
from tests.simulation.graphs import traced

from lm.model import Block

WIDTH, HEADS = 64, 4
#: A GPT has one projection for queries, keys and values, a Llama three.
MODELS: dict[str, Callable[[], nn.Module]] = {
    "GPT": lambda: Block(WIDTH, HEADS),
    "Llama": lambda: models.Block(models.Shape(1, WIDTH, 3 * WIDTH, HEADS)),
}
#: Inductor hands decomposed graphs to the one; the other is what ``aot_eager`` uses.
PARTITIONERS: dict[str, Callable[..., Any]] = {
    "min-cut": min_cut_rematerialization_partition,
    "default": default_partition,
}


@pytest.mark.parametrize("partitioner", PARTITIONERS)
@pytest.mark.parametrize("model", MODELS)
def test_nearly_all_that_nothing_else_holds_is_freed_and_little_more_travels(model: str, partitioner: str) -> None:
    def make() -> tuple[nn.Module, torch.Tensor]:
        return nn.Sequential(*(MODELS[model]() for _ in range(2))), torch.randn(2, 64, WIDTH)

    halves = traced(make, PARTITIONERS[partitioner], select_decomp_table() if partitioner == "min-cut" else None)
    outputs, inputs = outputs_of(halves.forward.graph), halves.forward.graph.find_nodes(op="placeholder")
    results, values = outputs[: halves.num_outputs], outputs[halves.num_outputs :]
    outside = {storage_of(one) for one in (*inputs, *results, *outputs_of(halves.backward.graph))}
    saved = [one for one in values if tensor_of(one) is not None and storage_of(one) not in outside]
    storages: dict[object, list[Node]] = {}
    for node in saved:
        assert isinstance(node, Node)
        storages.setdefault(storage_of(node), []).append(node)

    def freed(moving: set[Node]) -> int:
        """Bytes of storages of which every saved value moves."""
        return sum(nbytes_of(nodes[0].meta["val"]) for nodes in storages.values() if moving.issuperset(nodes))

    choice = halves.choose(eo.OffloadConfig(min_bytes="4KiB", keep_last_bytes=0))
    ours = freed({node for group in choice.groups for node in group.members})
    total = freed(set(saved))
    assert total > 900_000
    assert ours >= 0.95 * total
    assert choice.moved_bytes() <= 1.01 * ours
    assert KeepReason.LAYOUT not in choice.kept_bytes()
