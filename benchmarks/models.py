"""The decoders that benchmarks train, in the style of Llama: a whole model, and a bare stack of its blocks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn

#: How a block is called: by itself, or through a checkpoint.
Run: TypeAlias = Callable[[nn.Module, Tensor], Tensor]
LayerNorm = partial(nn.LayerNorm, bias=False)


@dataclass(frozen=True)
class Shape:
    """Sizes of a model; the defaults have about 1.04 billion parameters."""

    layers: int = 16
    width: int = 2048
    hidden: int = 8192
    heads: int = 32
    #: Of keys and values; 0: as many as queries have.
    shared_heads: int = 0
    vocabulary: int = 32_000

    @property
    def head(self) -> int:
        return self.width // self.heads


class Block(nn.Module):
    """Attention and SwiGLU, each behind a norm and beside a residual; (..., length, width) to the same."""

    def __init__(self, shape: Shape, norm: Callable[[int], nn.Module] = nn.RMSNorm, *, rotates: bool = False) -> None:
        super().__init__()
        self.shape, self.rotates = shape, rotates
        width, shared = shape.width, (shape.shared_heads or shape.heads) * shape.head
        self.attention_norm, self.mlp_norm = norm(width), norm(width)
        self.query, self.key, self.value, self.out = (
            nn.Linear(width, outputs, bias=False) for outputs in (width, shared, shared, width)
        )
        self.gate, self.up = (nn.Linear(width, shape.hidden, bias=False) for _ in range(2))
        self.down = nn.Linear(shape.hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.out(self.attend(self.attention_norm(x)))
        return x + self.feed(self.mlp_norm(x))

    def attend(self, x: Tensor) -> Tensor:
        query, key, value = (
            project(x).view(-1, x.shape[-2], project.out_features // self.shape.head, self.shape.head).transpose(1, 2)
            for project in (self.query, self.key, self.value)
        )
        if self.rotates:
            cos, sin = _angles(x.shape[-2], self.shape.head, x.device, query.dtype)
            query, key = _rotate(query, cos, sin), _rotate(key, cos, sin)
        if self.shape.shared_heads:
            groups = self.shape.heads // self.shape.shared_heads
            key, value = (part.repeat_interleave(groups, dim=1) for part in (key, value))
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return mixed.transpose(1, 2).reshape(x.shape)

    def feed(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Llama(nn.Module):
    """RoPE, RMSNorm, grouped queries, tied embeddings. Returns the loss of predicting each next token."""

    def __init__(self, shape: Shape, run: Run = lambda block, x: block(x)) -> None:
        super().__init__()
        self.run = run
        self.embedding = nn.Embedding(shape.vocabulary, shape.width)
        self.blocks = nn.ModuleList(Block(shape, rotates=True) for _ in range(shape.layers))
        self.norm = nn.RMSNorm(shape.width)
        nn.init.normal_(self.embedding.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens[:, :-1])
        for block in self.blocks:
            x = self.run(block, x)
        logits = F.linear(self.norm(x), self.embedding.weight)
        return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


class Stack(nn.Module):
    """Blocks with layer norms and without rotation, embedding and head; (tokens, width) to the same, bf16."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block(shape, LayerNorm) for _ in range(shape.layers))
        self.to(torch.bfloat16)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def _angles(length: int, head: int, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    rates = 500_000.0 ** (-torch.arange(0, head, 2, device=device, dtype=torch.float32) / head)
    angles = torch.outer(torch.arange(length, device=device, dtype=torch.float32), rates).repeat(1, 2)
    return angles.cos().to(dtype), angles.sin().to(dtype)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin
