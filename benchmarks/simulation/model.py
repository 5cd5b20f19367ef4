"""A Llama-style stack of decoder blocks, without embedding and head."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["Shape", "Stack"]


@dataclass(frozen=True)
class Shape:
    """Sizes of a model, or of the small one that stands for it."""

    layers: int
    width: int
    hidden: int
    heads: int


class Block(nn.Module):
    """Attention and a SwiGLU, each behind a norm and beside a residual; no rotation of queries and keys."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.heads = shape.heads
        self.attention_norm = nn.LayerNorm(shape.width, bias=False)
        self.query, self.key, self.value, self.out = (nn.Linear(shape.width, shape.width, bias=False) for _ in range(4))
        self.mlp_norm = nn.LayerNorm(shape.width, bias=False)
        self.gate, self.up = (nn.Linear(shape.width, shape.hidden, bias=False) for _ in range(2))
        self.down = nn.Linear(shape.hidden, shape.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        length, width = x.shape
        normed = self.attention_norm(x)
        query, key, value = (
            project(normed).view(1, length, self.heads, width // self.heads).transpose(1, 2)
            for project in (self.query, self.key, self.value)
        )
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(length, width))
        normed = self.mlp_norm(x)
        return x + self.down(F.silu(self.gate(normed)) * self.up(normed))


class Stack(nn.Module):
    """Blocks, one behind the other; (tokens, width) to the same, bf16."""

    def __init__(self, shape: Shape, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.to(torch.bfloat16)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x
