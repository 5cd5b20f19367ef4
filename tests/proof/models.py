"""Small models of the families that people train, with random weights and random batches."""

from __future__ import annotations

import abc
from collections.abc import Callable, Iterable
from enum import Enum
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

WIDTH, HEADS, KV_HEADS, LAYERS = 32, 4, 2, 2
HEAD = WIDTH // HEADS
VOCABULARY, LENGTH = 61, 24
EXPERTS, CHOSEN = 4, 2
SIZE, CHANNELS, CLASSES, LATENT = 16, 8, 10, 12


class Batch(NamedTuple):
    """What goes in, and what should come out."""

    inputs: Tensor
    targets: Tensor


class Checkpointing(Enum):
    """What becomes of what a block computes in forward."""

    NONE = "no checkpointing"
    REENTRANT = "reentrant"
    NON_REENTRANT = "non-reentrant"

    def run(self, block: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
        """The result of ``block``; what it saves is kept, or computed again in backward."""
        if self is Checkpointing.NONE:
            return block(*inputs)
        return checkpoint(block, *inputs, use_reentrant=self is Checkpointing.REENTRANT)


class Trainee(nn.Module, abc.ABC):
    """A model with its data and its loss: ``forward(inputs, targets)`` returns a scalar."""

    #: How every block is run.
    checkpointing = Checkpointing.NONE
    #: Whether an operator writes to what it has saved: BatchNorm does so to its running statistics.
    changes_what_it_saves = False

    @abc.abstractmethod
    def batch(self, seed: int) -> Batch:
        """Random data, the same for the same ``seed``."""


# -- language ---------------------------------------------------------------------------------------------------------


def tokens(seed: int, rows: int, length: int) -> Batch:
    """Sequences and what follows each of their tokens: (rows, length), int64."""
    drawn = torch.randint(VOCABULARY, (rows, length + 1), generator=torch.Generator().manual_seed(seed))
    return Batch(drawn[:, :-1], drawn[:, 1:])


class LanguageModel(Trainee):
    """Says of each token which one follows."""

    def __init__(self, blocks: Iterable[nn.Module], norm: nn.Module) -> None:
        super().__init__()
        self.tokens, self.blocks, self.norm = nn.Embedding(VOCABULARY, WIDTH), nn.ModuleList(blocks), norm
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def batch(self, seed: int) -> Batch:
        return tokens(seed, 3, LENGTH)

    def embed(self, inputs: Tensor) -> Tensor:
        """What the first block is given."""
        return self.tokens(inputs)

    def positions(self, length: int) -> tuple[Tensor, ...]:
        """What every block is given beside."""
        return ()

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        x, positions = self.embed(inputs), self.positions(inputs.shape[1])
        for block in self.blocks:
            x = self.checkpointing.run(block, x, *positions)
        return F.cross_entropy(self.head(self.norm(x)).float().flatten(0, 1), targets.flatten())


class LstmLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(WIDTH, WIDTH, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        h, _ = self.lstm(x)
        return F.dropout(h, 0.1)


class Recurrent(LanguageModel):
    """LSTM layers with dropout between them."""

    def __init__(self) -> None:
        super().__init__((LstmLayer() for _ in range(LAYERS)), nn.Identity())

    def batch(self, seed: int) -> Batch:
        return tokens(seed, 4, LENGTH // 2)


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


class LlamaBlock(nn.Module):
    def __init__(self, mlp: nn.Module) -> None:
        super().__init__()
        self.attention_norm, self.attention, self.mlp_norm, self.mlp = RmsNorm(), Attention(), RmsNorm(), mlp

    def forward(self, x: Tensor, turns: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), turns)
        return x + self.mlp(self.mlp_norm(x))


class Llama(LanguageModel):
    """Rotary positions, RMSNorm, SwiGLU, fewer heads for keys and values than for queries."""

    def __init__(self, mlp: Callable[[], nn.Module] = SwiGlu) -> None:
        super().__init__((LlamaBlock(mlp()) for _ in range(LAYERS)), RmsNorm())
        self.register_buffer("turns", rotations(LENGTH), persistent=False)

    def positions(self, length: int) -> tuple[Tensor, ...]:
        return (self.turns[:length],)


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


class MixtureOfExperts(Llama):
    """Lengths, and how many tokens each expert gets, change every step."""

    def __init__(self) -> None:
        super().__init__(Experts)

    def batch(self, seed: int) -> Batch:
        return tokens(seed, 2, 13 + 5 * (seed % 3) + seed % 7)

    def positions(self, length: int) -> tuple[Tensor, ...]:
        return (rotations(length),)


# -- images -----------------------------------------------------------------------------------------------------------


def images(seed: int, rows: int) -> Batch:
    """Images (rows, 3, SIZE, SIZE), float32, and the class of each, int64."""
    generator = torch.Generator().manual_seed(seed)
    return Batch(
        torch.randn(rows, 3, SIZE, SIZE, generator=generator), torch.randint(CLASSES, (rows,), generator=generator)
    )


class ResidualBlock(nn.Module):
    """Two convolutions beside a residual, which is projected where the shape changes."""

    def __init__(self, channels_in: int, channels: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(channels_in, channels, 3, stride, 1, bias=False)
        self.second = nn.Conv2d(channels, channels, 3, 1, 1, bias=False)
        self.first_norm, self.second_norm = nn.BatchNorm2d(channels), nn.BatchNorm2d(channels)
        self.beside = nn.Identity()
        if stride != 1 or channels_in != channels:
            self.beside = nn.Sequential(
                nn.Conv2d(channels_in, channels, 1, stride, bias=False), nn.BatchNorm2d(channels)
            )

    def forward(self, x: Tensor) -> Tensor:
        h = F.relu(self.first_norm(self.first(x)), inplace=True)
        h = self.second_norm(self.second(h))
        h += self.beside(x)
        return F.relu(h, inplace=True)


class ResNet(Trainee):
    """With BatchNorm."""

    changes_what_it_saves = True

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, CHANNELS, 3, 1, 1, bias=False), nn.BatchNorm2d(CHANNELS), nn.ReLU(inplace=True)
        )
        self.pool = nn.MaxPool2d(3, 2, 1)
        self.blocks = nn.ModuleList([ResidualBlock(CHANNELS, CHANNELS, 1), ResidualBlock(CHANNELS, 2 * CHANNELS, 2)])
        self.head = nn.Linear(2 * CHANNELS, CLASSES)

    def batch(self, seed: int) -> Batch:
        return images(seed, 4)

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        x = self.pool(self.stem(inputs))
        for block in self.blocks:
            x = self.checkpointing.run(block, x)
        return F.cross_entropy(self.head(x.mean((2, 3))), targets, label_smoothing=0.1)


class DoubleConvolution(nn.Sequential):
    def __init__(self, channels_in: int, channels: int) -> None:
        super().__init__(
            nn.Conv2d(channels_in, channels, 3, padding=1),
            nn.GroupNorm(2, channels),
            nn.SiLU(),
            nn.Conv2d(channels, channels, 3, padding=1),
            nn.GroupNorm(2, channels),
            nn.SiLU(),
        )


class UNet(Trainee):
    """Takes noise out of images, stored channels-last: what goes down is put beside what comes up."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList([DoubleConvolution(3, CHANNELS), DoubleConvolution(CHANNELS, 2 * CHANNELS)])
        self.middle = DoubleConvolution(2 * CHANNELS, 2 * CHANNELS)
        self.up = nn.ModuleList([DoubleConvolution(4 * CHANNELS, CHANNELS), DoubleConvolution(2 * CHANNELS, CHANNELS)])
        self.wider = nn.ModuleList(
            [nn.ConvTranspose2d(2 * CHANNELS, 2 * CHANNELS, 2, 2), nn.Upsample(scale_factor=2, mode="bilinear")]
        )
        self.head = nn.Conv2d(CHANNELS, 3, 1)
        self.to(memory_format=torch.channels_last)

    def batch(self, seed: int) -> Batch:
        clean, noise = (images(seed + shift, 2).inputs for shift in (0, 500))
        return Batch((clean + noise).to(memory_format=torch.channels_last), clean)

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        x, beside = inputs, []
        for number, block in enumerate(self.down):
            # The images need no gradient, and a reentrant checkpoint would pass none to the weights either.
            x = self.checkpointing.run(block, x) if number else block(x)
            beside.append(x)
            x = F.max_pool2d(x, 2)
        x = self.checkpointing.run(self.middle, x)
        for wider, block in zip(self.wider, self.up, strict=True):
            x = self.checkpointing.run(block, torch.cat([beside.pop(), wider(x)], 1))
        return F.mse_loss(self.head(x).float(), targets)


class Generator(nn.Module):
    """(rows, LATENT) to (rows, 3, SIZE, SIZE)."""

    def __init__(self) -> None:
        super().__init__()
        self.start = nn.Linear(LATENT, 2 * CHANNELS * 16)
        self.grow = nn.Sequential(
            nn.BatchNorm2d(2 * CHANNELS),
            nn.ReLU(),
            nn.ConvTranspose2d(2 * CHANNELS, CHANNELS, 4, 2, 1),
            nn.BatchNorm2d(CHANNELS),
            nn.ReLU(),
            nn.ConvTranspose2d(CHANNELS, 3, 4, 2, 1),
            nn.Tanh(),
        )

    def forward(self, latent: Tensor) -> Tensor:
        return self.grow(self.start(latent).unflatten(1, (2 * CHANNELS, 4, 4)))


class Discriminator(nn.Module):
    """(rows, 3, SIZE, SIZE) to (rows,): large for what looks real."""

    def __init__(self) -> None:
        super().__init__()
        self.shrink = nn.Sequential(
            nn.utils.parametrizations.spectral_norm(nn.Conv2d(3, CHANNELS, 4, 2, 1)),
            nn.LeakyReLU(0.2, inplace=True),
            nn.Conv2d(CHANNELS, 2 * CHANNELS, 4, 2, 1),
            nn.LeakyReLU(0.2),
        )
        self.judge = nn.Linear(2 * CHANNELS * 16, 1)

    def forward(self, images: Tensor) -> Tensor:
        return self.judge(self.shrink(images).flatten(1)).squeeze(1)

    def slope_penalty(self, images: Tensor) -> Tensor:
        """How steep the verdict is at ``images``: its gradient, squared, with a graph of its own."""
        images = images.detach().requires_grad_()
        (slope,) = torch.autograd.grad(self(images).sum(), images, create_graph=True)
        return slope.square().sum((1, 2, 3)).mean()


#: Every family that one optimizer trains with one loss.
FAMILIES: dict[str, Callable[[], Trainee]] = {
    "llama": Llama,
    "unet": UNet,
    "resnet": ResNet,
    "lstm": Recurrent,
    "experts": MixtureOfExperts,
}
