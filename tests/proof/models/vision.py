"""A vision transformer: patches by a convolution, a class token, torch's own encoder layers."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.proof.models.base import Batch, Trainee, images

WIDTH, HEADS, LAYERS, SIZE, PATCH, CLASSES = 32, 4, 2, 16, 4, 10


class VisionTransformer(Trainee):
    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, WIDTH, PATCH, PATCH)
        self.summary = nn.Parameter(torch.zeros(1, 1, WIDTH))
        self.positions = nn.Parameter(torch.randn(1, 1 + (SIZE // PATCH) ** 2, WIDTH) * 0.02)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(
                WIDTH, HEADS, 2 * WIDTH, dropout=0.1, activation="gelu", batch_first=True, norm_first=True
            )
            for _ in range(LAYERS)
        )
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, CLASSES)

    def batch(self, seed: int) -> Batch:
        return images(seed, 4, 3, SIZE, CLASSES)

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        patches = self.patches(inputs).flatten(2).transpose(1, 2)
        summary = self.summary.expand(inputs.shape[0], -1, -1)
        x = torch.cat([summary.to(patches.dtype), patches], 1) + self.positions
        for block in self.blocks:
            x = self.checkpointing.run(block, x)
        return F.cross_entropy(self.head(self.norm(x[:, 0])), targets)
