"""Tensor parallelism with offload: every matrix of the MLPs is divided among the ranks, and the sequence in between.

    torchrun --standalone --nproc-per-node 2 examples/tensor_parallel.py
    torchrun --standalone --nproc-per-node 2 examples/tensor_parallel.py --compare

Runs on CPU ranks as it stands and on one accelerator a rank unchanged. All ranks work on the same batch. Activations
are ``DTensor``s here, of which each rank moves what it has itself; they come back with their mesh and placements.
"""

from __future__ import annotations

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from lm.model import LanguageModel
from lm.ranks import Rank, parse, run


def divide(model: LanguageModel, mesh: DeviceMesh) -> None:
    """Between the blocks, each rank has its part of the sequence; in an MLP, all of it and a part of the width."""
    part, whole = Shard(1), Replicate()
    for block in model.blocks:
        plan = {
            "attention_norm": SequenceParallel(),
            "attention": PrepareModuleInput(input_layouts=part, desired_input_layouts=whole, use_local_output=True),
            "attention.out": PrepareModuleOutput(output_layouts=whole, desired_output_layouts=part),
            "mlp_norm": SequenceParallel(),
            "mlp": PrepareModuleInput(input_layouts=part, desired_input_layouts=whole),
            "mlp.0": ColwiseParallel(),
            "mlp.2": RowwiseParallel(output_layouts=part),
        }
        parallelize_module(block, mesh, plan)
    ends = {
        "blocks.0": PrepareModuleInput(input_layouts=whole, desired_input_layouts=part, use_local_output=True),
        "norm": SequenceParallel(),
        "head": ColwiseParallel(input_layouts=part, output_layouts=whole),
    }
    parallelize_module(model, mesh, ends)


def train(rank: Rank) -> None:
    options, device = rank.options, rank.device
    model = LanguageModel(options.layers, options.width, options.heads, options.sequence, checkpointing=False)
    model.to(device)
    divide(model, init_device_mesh(device.type, (rank.size,)))
    # Weights that are divided and weights that are not cannot be stacked for one call.
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)
    for batch in rank.data(seed=0):
        optimizer.zero_grad()
        with rank.forward():
            loss = model(batch.inputs, batch.targets)
        loss.backward()
        rank.note(loss, (parameter.grad for parameter in model.parameters()))
        optimizer.step()


if __name__ == "__main__":
    run(train, parse(__doc__))
