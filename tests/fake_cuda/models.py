"""Five models at the sizes that people train, each with a batch that fills a large part of a GPU.

Nothing here depends on values, which are garbage over the stand-in: an expert takes as many tokens as any other.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.models import Block, Llama, Run, Shape


@dataclass(frozen=True)
class Model:
    """A model on the device, made by ``make``, and what it is called with; it returns a loss.

    Each of its blocks is called by the ``Run`` that ``make`` is given.
    """

    make: Callable[[Run], nn.Module]
    batch: Callable[[], tuple[Tensor, ...]]
    #: Ways to train it, beside none, ours and save_on_cpu.
    ways: tuple[str, ...] = ()
    #: Whether it has weights in fp32 and computes in bf16.
    is_mixed: bool = True


def words(*size: int) -> Tensor:
    return torch.zeros(size, dtype=torch.int64)


def images(count: int, pixels: int) -> Tensor:
    return torch.zeros(count, 3, pixels, pixels)


# -- decoders ---------------------------------------------------------------------------------------------------------


class Adapted(nn.Module):
    """A frozen product and a trained one of low rank beside it."""

    def __init__(self, frozen: nn.Linear, rank: int = 16) -> None:
        super().__init__()
        self.frozen, self.out_features = frozen, frozen.out_features
        self.down = nn.Linear(frozen.in_features, rank, bias=False)
        self.up = nn.Linear(rank, frozen.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.frozen(x) + self.up(self.down(x))


def adapted_llama(run: Run) -> nn.Module:
    """An 8B Llama whose weights are frozen, with adapters of queries and values."""
    model = Llama(Shape(32, 4096, 14_336, 32, 8, 128_256), run).requires_grad_(False)
    for block in model.blocks:
        block.query, block.value = Adapted(block.query), Adapted(block.value)
    return model.to(torch.bfloat16)


class GPTBlock(nn.Module):
    """Attention and GELU with dropout in all three places, behind layer norms."""

    def __init__(self, width: int, heads: int, dropout: float = 0.1) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.mix, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.feed = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        first, second = self.norms
        parts = self.mix(first(x)).chunk(3, dim=-1)
        query, key, value = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in parts)
        mixed = F.scaled_dot_product_attention(query, key, value, dropout_p=self.dropout, is_causal=True)
        x = x + F.dropout(self.out(mixed.transpose(1, 2).flatten(2)), self.dropout)
        return x + F.dropout(self.feed(second(x)), self.dropout)


class GPT(nn.Module):
    """Learned positions, dropout everywhere, tied embeddings; about 350M parameters."""

    def __init__(self, run: Run, layers: int = 24, width: int = 1024, length: int = 1024) -> None:
        super().__init__()
        self.run = run
        self.embedding, self.places = nn.Embedding(50_257, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(GPTBlock(width, 16) for _ in range(layers))
        self.norm = nn.LayerNorm(width)

    def forward(self, tokens: Tensor) -> Tensor:
        places = torch.arange(tokens.shape[1] - 1, device=tokens.device)
        x = F.dropout(self.embedding(tokens[:, :-1]) + self.places(places), 0.1)
        for block in self.blocks:
            x = self.run(block, x)
        logits = F.linear(self.norm(x), self.embedding.weight)
        return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


class Experts(nn.Module):
    """Eight experts, of which each token has two; an expert takes as many tokens as its capacity is."""

    def __init__(self, width: int, hidden: int, experts: int = 8) -> None:
        super().__init__()
        self.route = nn.Linear(width, experts, bias=False)
        self.up = nn.Parameter(torch.empty(experts, width, 2 * hidden))
        self.down = nn.Parameter(torch.empty(experts, hidden, width))

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, -2)
        scores = self.route(tokens).softmax(-1)
        capacity = 2 * len(tokens) // scores.shape[1]
        weights, chosen = scores.t().topk(capacity, dim=1)  # experts choose tokens
        taken = tokens[chosen]
        gate, up = torch.bmm(taken, self.up.to(taken.dtype)).chunk(2, dim=-1)
        given = torch.bmm(F.silu(gate) * up, self.down.to(taken.dtype)) * weights.unsqueeze(-1).to(taken.dtype)
        return torch.zeros_like(tokens).index_add(0, chosen.flatten(), given.flatten(0, 1)).view_as(x)


def mixture(run: Run) -> nn.Module:
    """A decoder whose every second block feeds experts; about 2B parameters, of which 0.7B are used for a token."""
    shape = Shape(layers=12, width=2048, hidden=4096, heads=16, shared_heads=4)
    model = Llama(shape, run)
    for block in model.blocks[1::2]:
        assert isinstance(block, Block)
        del block.gate, block.up, block.down
        block.experts = Experts(shape.width, shape.hidden)
        block.feed = block.experts.forward
    return model.to(torch.bfloat16)


# -- of images, without cuDNN, which the stand-in does not have -------------------------------------------------------


class Bottleneck(nn.Module):
    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        sizes = ((inputs, width, 1, 1), (width, width, 3, stride), (width, 4 * width, 1, 1))
        self.convolutions = nn.ModuleList(nn.Conv2d(a, b, size, by, size // 2, bias=False) for a, b, size, by in sizes)
        self.norms = nn.ModuleList(nn.BatchNorm2d(size[1]) for size in sizes)
        self.short = nn.Identity()
        if stride > 1 or inputs != 4 * width:
            short = nn.Conv2d(inputs, 4 * width, 1, stride, bias=False)
            self.short = nn.Sequential(short, nn.BatchNorm2d(4 * width))

    def forward(self, x: Tensor) -> Tensor:
        y = x
        for index, (convolution, norm) in enumerate(zip(self.convolutions, self.norms, strict=True)):
            y = norm(convolution(y))
            y = F.relu(y, inplace=True) if index < 2 else y
        return F.relu(y + self.short(x), inplace=True)


class ResNet(nn.Module):
    """ResNet-50."""

    def __init__(self, run: Run) -> None:
        super().__init__()
        self.run = run
        self.stem = nn.Sequential(nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU(inplace=True))
        self.blocks = nn.ModuleList()
        inputs = 64
        for stage, count in enumerate((3, 4, 6, 3)):
            for index in range(count):
                width = 64 << stage
                self.blocks.append(Bottleneck(inputs, width, 2 if stage and not index else 1))
                inputs = 4 * width
        self.head = nn.Linear(inputs, 1000)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = F.max_pool2d(self.stem(x), 3, 2, 1)
        for block in self.blocks:
            x = self.run(block, x)
        return F.cross_entropy(self.head(x.mean((2, 3))), y)


CHECKPOINTING = ("checkpointing", "ours + checkpointing")
MODELS = {
    "Llama 1B": Model(
        lambda run: Llama(Shape(shared_heads=8), run).to(torch.bfloat16),
        lambda: (words(1, 32_769),),
        (*CHECKPOINTING, "selective checkpointing", "ours, windows 256MiB", "ours, windows 2GiB", "ours, 30GiB"),
        is_mixed=False,
    ),
    "Llama 8B, adapters": Model(
        adapted_llama, lambda: (words(1, 8193),), (*CHECKPOINTING, "ours, 30GiB"), is_mixed=False
    ),
    "GPT 350M": Model(GPT, lambda: (words(16, 1025),), ("ours, 16GiB",)),
    "mixture of experts": Model(mixture, lambda: (words(4, 4097),), CHECKPOINTING, is_mixed=False),
    "ResNet-50": Model(ResNet, lambda: (images(128, 224), words(128)), ("ours, 4GiB",)),
}
