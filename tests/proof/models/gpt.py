"""GPT: learned positions, LayerNorm, a fused projection, attention written out, dropout, a tied head."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.proof.models.base import VOCABULARY, Batch, Trainee, tokens

WIDTH, HEADS, LENGTH, LAYERS = 32, 4, 24, 2


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention_norm, self.mlp_norm = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(approximate="tanh"), nn.Linear(4 * WIDTH, WIDTH), nn.Dropout(0.1)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + F.dropout(self.out(self._attend(self.attention_norm(x))), 0.1)
        return x + self.mlp(self.mlp_norm(x))

    def _attend(self, x: Tensor) -> Tensor:
        rows, length, _ = x.shape
        q, k, v = (part.view(rows, length, HEADS, -1).transpose(1, 2) for part in self.qkv(x).split(WIDTH, dim=2))
        scores = q @ k.transpose(-2, -1) / math.sqrt(q.size(-1))
        future = torch.ones(length, length, dtype=torch.bool).triu(1)
        weights = F.dropout(scores.masked_fill_(future, float("-inf")).softmax(-1), 0.1)
        return (weights @ v).transpose(1, 2).reshape(rows, length, WIDTH)


class Gpt(Trainee):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)
        nn.init.normal_(self.tokens.weight, std=0.02)
        self.head.weight = self.tokens.weight

    def batch(self, seed: int) -> Batch:
        return tokens(seed, 3, LENGTH)

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        x = F.dropout(self.tokens(inputs) + self.positions.weight[: inputs.shape[1]], 0.1)
        for block in self.blocks:
            x = self.checkpointing.run(block, x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten())
