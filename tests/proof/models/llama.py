"""Llama: rotary positions, RMSNorm, SwiGLU, fewer heads for keys and values than for queries."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.proof.models.base import VOCABULARY, Batch, Trainee, tokens

WIDTH, HEADS, KV_HEADS, LENGTH, LAYERS = 32, 4, 2, 24, 2
HEAD = WIDTH // HEADS


def rotations(length: int) -> Tensor:
    """The unit complex number that turns each pair of channels at each position: (length, HEAD / 2)."""
    frequencies = 1.0 / 10_000 ** (torch.arange(0, HEAD, 2) / HEAD)
    angles = torch.outer(torch.arange(length), frequencies)
    return torch.polar(torch.ones_like(angles), angles)


def rotate(x: Tensor, turns: Tensor) -> Tensor:
    """Turns ``x`` of (rows, length, heads, HEAD) by its positions."""
    pairs = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)))
    return torch.view_as_real(pairs * turns[:, None]).flatten(-2).type_as(x)


class RmsNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-5)).type_as(x) * self.weight


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.out = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.k, self.v = (nn.Linear(WIDTH, KV_HEADS * HEAD, bias=False) for _ in range(2))

    def forward(self, x: Tensor, turns: Tensor) -> Tensor:
        q, k, v = (part(x).unflatten(-1, (-1, HEAD)) for part in (self.q, self.k, self.v))
        q, k = rotate(q, turns), rotate(k, turns)
        k, v = (part.repeat_interleave(HEADS // KV_HEADS, dim=2) for part in (k, v))
        mixed = F.scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True)
        return self.out(mixed.transpose(1, 2).flatten(2))


class SwiGlu(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = (nn.Linear(WIDTH, 3 * WIDTH, bias=False) for _ in range(2))
        self.down = nn.Linear(3 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    def __init__(self, mlp: Callable[[], nn.Module] = SwiGlu) -> None:
        super().__init__()
        self.attention_norm, self.attention, self.mlp_norm, self.mlp = RmsNorm(), Attention(), RmsNorm(), mlp()

    def forward(self, x: Tensor, turns: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), turns)
        return x + self.mlp(self.mlp_norm(x))


class Llama(Trainee):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm, self.head = RmsNorm(), nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.register_buffer("turns", rotations(LENGTH), persistent=False)

    def batch(self, seed: int) -> Batch:
        return tokens(seed, 3, LENGTH)

    def embed(self, inputs: Tensor) -> Tensor:
        """What the first block is given."""
        return self.tokens(inputs)

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        x, turns = self.embed(inputs), self.turns[: inputs.shape[1]]
        for block in self.blocks:
            x = self.checkpointing.run(block, x, turns)
        return F.cross_entropy(self.head(self.norm(x)).float().flatten(0, 1), targets.flatten())
