"""A pipeline of stages with offload: microbatches wait for their backward elsewhere than in memory.

    torchrun --standalone --nproc-per-node 2 examples/pipeline.py
    torchrun --standalone --nproc-per-node 2 examples/pipeline.py --compare

Runs on CPU ranks as it stands and on one accelerator a rank unchanged. A schedule calls forward and backward of its
microbatches in an order of its own, so the context goes around its whole ``step``.
"""

from __future__ import annotations

import argparse

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import PipelineScheduleSingle, get_schedule_class

from lm.model import LanguageModel
from lm.ranks import Rank, parse, run


class Stage(nn.Module):
    """The blocks of one rank, with what comes before the first and after the last of all."""

    def __init__(self, model: LanguageModel, number: int, size: int) -> None:
        super().__init__()
        count = len(model.blocks)
        self.blocks = model.blocks[number * count // size : (number + 1) * count // size]
        self.tokens, self.positions = (model.tokens, model.positions) if number == 0 else (None, None)
        self.norm, self.head = (model.norm, model.head) if number == size - 1 else (None, None)

    def forward(self, x: Tensor) -> Tensor:
        if self.tokens is not None and self.positions is not None:
            x = self.tokens(x) + self.positions(torch.arange(x.shape[1], device=x.device))
        for block in self.blocks:
            x = block(x)
        return x if self.head is None or self.norm is None else self.head(self.norm(x))


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def train(rank: Rank) -> None:
    options = rank.options
    model = LanguageModel(options.layers, options.width, options.heads, options.sequence, checkpointing=False)
    stage = Stage(model, rank.number, rank.size).to(rank.device)
    part = PipelineStage(stage, rank.number, rank.size, rank.device)
    kind = get_schedule_class(options.schedule)
    assert issubclass(kind, PipelineScheduleSingle), f"{options.schedule} wants several stages in each rank"
    schedule = kind(part, n_microbatches=options.microbatches, loss_fn=loss_of)
    optimizer = torch.optim.AdamW(stage.parameters(), lr=1e-3)
    first, last = rank.number == 0, rank.number == rank.size - 1
    for batch in rank.data(seed=0):
        optimizer.zero_grad()
        parts: list[Tensor] = []
        with rank.forward():
            if last:
                schedule.step(target=batch.targets, losses=parts)
            else:
                schedule.step(*([batch.inputs] if first else []))
        loss = torch.stack(parts).mean() if last else None
        rank.note(loss, (parameter.grad for parameter in stage.parameters()), writer=rank.number)
        optimizer.step()


if __name__ == "__main__":
    more = argparse.ArgumentParser(add_help=False)
    more.add_argument("--schedule", default="1F1B", help="1F1B or GPipe")
    more.add_argument("--microbatches", type=int, default=4)
    run(train, parse(__doc__, more))
