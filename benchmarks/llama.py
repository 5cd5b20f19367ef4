"""A decoder in the style of Llama: RoPE, RMSNorm, SwiGLU, grouped queries, tied embeddings."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["Config", "Llama", "Run"]

#: How a block is called: by itself, or through a checkpoint.
Run: TypeAlias = Callable[[nn.Module, Tensor], Tensor]


@dataclass(frozen=True)
class Config:
    """The defaults have about 1.04 billion parameters."""

    layers: int = 16
    width: int = 2048
    inner: int = 8192
    heads: int = 32
    shared_heads: int = 8
    vocabulary: int = 32_000

    @property
    def head(self) -> int:
        return self.width // self.heads


class Block(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        shared = config.shared_heads * config.head
        self.attention_norm, self.inner_norm = nn.RMSNorm(config.width), nn.RMSNorm(config.width)
        self.q, self.o = (nn.Linear(config.width, config.width, bias=False) for _ in range(2))
        self.k, self.v = (nn.Linear(config.width, shared, bias=False) for _ in range(2))
        self.gate, self.up = (nn.Linear(config.width, config.inner, bias=False) for _ in range(2))
        self.down = nn.Linear(config.inner, config.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self._attend(self.attention_norm(x))
        h = self.inner_norm(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))

    def _attend(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q, k, v = (
            part.view(batch, length, -1, self.config.head).transpose(1, 2) for part in (self.q(x), self.k(x), self.v(x))
        )
        cos, sin = _angles(length, self.config.head, x.device, x.dtype)
        q, k = _rotate(q, cos, sin), _rotate(k, cos, sin)
        groups = self.config.heads // self.config.shared_heads
        k, v = (part.repeat_interleave(groups, dim=1) for part in (k, v))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o(mixed.transpose(1, 2).reshape(batch, length, -1))


class Llama(nn.Module):
    """Returns the loss of predicting each next token."""

    def __init__(self, config: Config, run: Run = lambda block, x: block(x)) -> None:
        super().__init__()
        self.run = run
        self.embedding = nn.Embedding(config.vocabulary, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.width)
        nn.init.normal_(self.embedding.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens[:, :-1])
        for block in self.blocks:
            x = self.run(block, x)
        logits = F.linear(self.norm(x), self.embedding.weight)
        return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def _angles(length: int, head: int, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    rates = 500_000.0 ** (-torch.arange(0, head, 2, device=device, dtype=torch.float32) / head)
    angles = torch.outer(torch.arange(length, device=device, dtype=torch.float32), rates).repeat(1, 2)
    return angles.cos().to(dtype), angles.sin().to(dtype)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin
