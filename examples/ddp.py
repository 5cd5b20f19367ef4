"""``DistributedDataParallel`` with offload: a whole model in each rank, gradients averaged while backward runs.

    torchrun --standalone --nproc-per-node 2 examples/ddp.py
    torchrun --standalone --nproc-per-node 2 examples/ddp.py --compare

Runs on CPU ranks as it stands and on one accelerator a rank unchanged. Nothing is special about DDP here: the context
goes around the forward of the wrapped model. Each rank has a budget of its own, worked out from its part of the node.
"""

from __future__ import annotations

import torch
from torch.nn.parallel import DistributedDataParallel

from lm.model import LanguageModel
from lm.ranks import Rank, parse, run


def train(rank: Rank) -> None:
    options, device = rank.options, rank.device
    model = LanguageModel(options.layers, options.width, options.heads, options.sequence, checkpointing=False)
    parallel = DistributedDataParallel(model.to(device), device_ids=None if device.type == "cpu" else [device])
    optimizer = torch.optim.AdamW(parallel.parameters(), lr=1e-3)
    for batch in rank.data(seed=rank.number):
        optimizer.zero_grad()
        with rank.forward():
            loss = parallel(batch.inputs, batch.targets)
        loss.backward()
        rank.note(loss, (parameter.grad for parameter in model.parameters()))
        optimizer.step()


if __name__ == "__main__":
    run(train, parse(__doc__))
