"""FSDP2 (``fully_shard``) with offload: weights are divided among the ranks, activations are moved away.

    torchrun --standalone --nproc-per-node 2 examples/fsdp2.py
    torchrun --standalone --nproc-per-node 2 examples/fsdp2.py --compare

Runs on CPU ranks as it stands and on one accelerator a rank unchanged. The context goes around the forward of the
outermost module. What FSDP2 gathers of the weights for a layer is known as weights, and no byte of it moves.
"""

from __future__ import annotations

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from lm.model import LanguageModel
from lm.ranks import Rank, parse, run


def train(rank: Rank) -> None:
    options, device = rank.options, rank.device
    model = LanguageModel(options.layers, options.width, options.heads, options.sequence, checkpointing=False)
    model.to(device)
    mesh = init_device_mesh(device.type, (rank.size,))
    # Matrix products in bfloat16 are slow on many CPUs.
    policy = MixedPrecisionPolicy(param_dtype=None if device.type == "cpu" else torch.bfloat16)
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for batch in rank.data(seed=rank.number):
        optimizer.zero_grad()
        with rank.forward():
            loss = model(batch.inputs, batch.targets)
        loss.backward()
        rank.note(loss, (parameter.grad for parameter in model.parameters()))
        optimizer.step()


if __name__ == "__main__":
    run(train, parse(__doc__))
