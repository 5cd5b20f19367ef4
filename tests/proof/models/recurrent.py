"""A language model of LSTM layers with dropout between them."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from tests.proof.models.base import VOCABULARY, Batch, Trainee, tokens

WIDTH, LENGTH, LAYERS = 24, 12, 2


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(WIDTH, WIDTH, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        h, _ = self.lstm(x)
        return F.dropout(h, 0.1)


class Recurrent(Trainee):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def batch(self, seed: int) -> Batch:
        return tokens(seed, 4, LENGTH)

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        x = self.tokens(inputs)
        for layer in self.layers:
            x = self.checkpointing.run(layer, x)
        return F.cross_entropy(self.head(x).flatten(0, 1), targets.flatten())
