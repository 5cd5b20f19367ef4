"""A small model of blocks with residual connections."""

from __future__ import annotations

import torch
from torch import Tensor, nn

__all__ = ["BOUNDARY", "ROWS", "WIDTH", "Block", "blocks", "gradients"]

WIDTH, ROWS = 32, 16
#: Bytes of what goes from one block to the next.
BOUNDARY = WIDTH * ROWS * 4


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


def blocks(count: int = 4) -> nn.ModuleList:
    torch.manual_seed(0)
    return nn.ModuleList(Block() for _ in range(count))


def gradients(model: nn.Module) -> list[Tensor | None]:
    return [parameter.grad for parameter in model.parameters()]
