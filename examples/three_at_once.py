"""FSDP2, tensor parallelism and a pipeline at once, with offload: two stages, each on two times two ranks.

    torchrun --standalone --nproc-per-node 8 examples/three_at_once.py
    torchrun --standalone --nproc-per-node 8 examples/three_at_once.py --compare

Runs on CPU ranks as it stands and on one accelerator a rank unchanged. The context goes around the schedule's ``step``,
as in ``pipeline.py``. Neither the parts of weights that tensor parallelism leaves a rank nor what FSDP2 gathers moves.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from lm.model import LanguageModel
from lm.ranks import Rank, parse, run
from pipeline import Stage, loss_of


def train(rank: Rank) -> None:
    options, device = rank.options, rank.device
    mesh = init_device_mesh(device.type, (2, rank.size // 4, 2), mesh_dim_names=("stage", "shard", "tensor"))
    model = LanguageModel(options.layers, options.width, options.heads, options.sequence, checkpointing=False)
    number = mesh.get_local_rank("stage")
    stage = Stage(model, number, 2).to(device)
    for block in stage.blocks:
        parallelize_module(block, mesh["tensor"], {"mlp.0": ColwiseParallel(), "mlp.2": RowwiseParallel()})
        fully_shard(block, mesh=mesh["shard"])
    fully_shard(stage, mesh=mesh["shard"])
    part = PipelineStage(stage, number, 2, device, group=mesh.get_group("stage"))
    schedule = Schedule1F1B(part, n_microbatches=options.batch, loss_fn=loss_of)
    # Weights that are divided in two ways and in one cannot be stacked for one call.
    optimizer = torch.optim.AdamW(stage.parameters(), lr=1e-3, foreach=False)
    for batch in rank.data(seed=mesh.get_local_rank("shard")):
        optimizer.zero_grad()
        parts: list[Tensor] = []
        with rank.forward():
            if number == 1:
                schedule.step(target=batch.targets, losses=parts)
            else:
                schedule.step(batch.inputs)
        loss = torch.stack(parts).mean() if parts else None
        rank.note(loss, (parameter.grad for parameter in stage.parameters()), writer=rank.size // 2)
        optimizer.step()


if __name__ == "__main__":
    run(train, parse(__doc__))
