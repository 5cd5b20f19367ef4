"""A mixture of experts: lengths, and how many tokens each expert gets, change every step."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.proof.models.base import VOCABULARY, Batch, Trainee, tokens
from tests.proof.models.llama import WIDTH, Block, RmsNorm, rotations

EXPERTS, CHOSEN, LAYERS = 4, 2, 2


class Experts(nn.Module):
    """Each token goes to the two experts that its router likes best; an expert may well get none."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH)) for _ in range(EXPERTS)
        )

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(0, 1)
        weights, chosen = self.router(flat).float().softmax(-1).topk(CHOSEN, dim=-1)
        weights = weights / weights.sum(-1, keepdim=True)
        mixed = torch.zeros_like(flat)
        for number, expert in enumerate(self.experts):
            token, place = (chosen == number).nonzero(as_tuple=True)
            share = weights[token, place, None] * expert(flat[token])
            mixed = mixed.index_add(0, token, share.type_as(mixed))
        return mixed.view_as(x)


class MixtureOfExperts(Trainee):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block(Experts) for _ in range(LAYERS))
        self.norm, self.head = RmsNorm(), nn.Linear(WIDTH, VOCABULARY, bias=False)

    def batch(self, seed: int) -> Batch:
        return tokens(seed, 2, 13 + 5 * (seed % 3) + seed % 7)

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        x, turns = self.tokens(inputs), rotations(inputs.shape[1])
        for block in self.blocks:
            x = self.checkpointing.run(block, x, turns)
        return F.cross_entropy(self.head(self.norm(x)).float().flatten(0, 1), targets.flatten())
