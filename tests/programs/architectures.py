"""Models of the families that people train, small, with random weights: three steps of an optimizer."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.programs import Flag, Run, leaf, program

STEPS = 3
WIDTH, HEADS, KV_HEADS = 32, 4, 2
HEAD = WIDTH // HEADS
VOCABULARY = 61
SIZE, CHANNELS, CLASSES = 16, 8, 10

#: Runs a block: as it is, or inside of a checkpoint.
Call = Callable[..., Tensor]


def as_it_is(block: Call, *inputs: Tensor) -> Tensor:
    return block(*inputs)


def checkpointed(block: Call, *inputs: Tensor, use_reentrant: bool = False) -> Tensor:
    return checkpoint(block, *inputs, use_reentrant=use_reentrant)


reentrant = partial(checkpointed, use_reentrant=True)


def state_of(*models: nn.Module) -> list[Tensor]:
    """All that training changes of models."""
    return [one.detach() for model in models for one in (*model.parameters(), *model.buffers())]


def trained(
    run: Run, model: nn.Module, batch: Callable[[int], tuple[Tensor, Tensor]], micro_batches: int, autocast: bool
) -> object:
    """The losses of three steps of AdamW, what they have made of the model, and what the optimizer keeps.

    Args:
        model: of a batch, returns a loss.
        batch: makes the inputs and targets of a number.
    """
    optimizer, forward, losses = torch.optim.AdamW(model.parameters(), lr=1e-2), run.forward(model), []
    for number in range(STEPS * micro_batches):
        cast: AbstractContextManager[Any] = torch.autocast("cpu", torch.bfloat16) if autocast else nullcontext()
        with run.around, cast:
            # The loop does not hold the batch: what it holds stays, once that is learnt.
            loss = forward(*batch(number)) / micro_batches
        loss.backward()
        losses.append(loss.detach())
        if (number + 1) % micro_batches == 0:
            optimizer.step()
            optimizer.zero_grad()
    return losses, state_of(model), [kept for state in optimizer.state.values() for kept in state.values()]


def _add(
    name: str,
    model: Callable[[], nn.Module],
    batch: Callable[[int], tuple[Tensor, Tensor]],
    *flags: Flag,
    micro_batches: int = 1,
    autocast: bool = False,
) -> None:
    program(name, *flags)(lambda run: trained(run, model(), batch, micro_batches, autocast))


# -- language ---------------------------------------------------------------------------------------------------------


def words(number: int, *, rows: int = 3, length: int = 24) -> tuple[Tensor, Tensor]:
    """Sequences, and what follows each of their tokens: (rows, length), int64."""
    generator = torch.Generator().manual_seed(number)
    drawn = torch.randint(VOCABULARY, (rows, length + 1), generator=generator, device="cpu")
    drawn = drawn.to(torch.get_default_device())
    return drawn[:, :-1], drawn[:, 1:]


class LanguageModel(nn.Module):
    """Says of each token which one follows. Blocks are given the positions besides, if ``turns`` makes any."""

    def __init__(self, blocks: Iterable[nn.Module], call: Call, turns: Callable[[int], Tensor] | None = None) -> None:
        super().__init__()
        self.tokens, self.blocks = nn.Embedding(VOCABULARY, WIDTH), nn.ModuleList(blocks)
        self.norm, self.head = RmsNorm(), nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.call, self.turns = call, turns

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        x = self.tokens(inputs)
        positions = [] if self.turns is None else [self.turns(inputs.shape[1])]
        for block in self.blocks:
            x = self.call(block, x, *positions)
        return F.cross_entropy(self.head(self.norm(x)).float().flatten(0, 1), targets.flatten())


def rotations(length: int) -> Tensor:
    """The unit complex number that turns each pair of channels at each position: (length, HEAD / 2)."""
    angles = torch.outer(torch.arange(length), 1.0 / 10_000 ** (torch.arange(0, HEAD, 2) / HEAD))
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
    """With fewer heads for keys and values than for queries."""

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


def llama(call: Call = as_it_is, mlp: Callable[[], nn.Module] = SwiGlu) -> nn.Module:
    return LanguageModel((LlamaBlock(mlp()) for _ in range(2)), call, rotations)


_add("llama", llama, words, Flag.NO_INDUCTOR)
_add("llama-in-bfloat16-checkpointed", partial(llama, checkpointed), words, Flag.EAGER, Flag.HOST, autocast=True)
_add("llama-accumulating-in-reentrant-checkpoints", partial(llama, reentrant), words, Flag.EAGER, micro_batches=2)


# -- images -----------------------------------------------------------------------------------------------------------


def images(number: int, rows: int = 4) -> tuple[Tensor, Tensor]:
    """Images (rows, 3, SIZE, SIZE), float32, and the class of each, int64."""
    return leaf(rows, 3, SIZE, SIZE, seed=number, grad=False), words(number, rows=rows, length=1)[0].flatten() % CLASSES


class ResidualBlock(nn.Module):
    """Two convolutions beside a residual, which is projected where the shape changes."""

    def __init__(self, channels_in: int, channels: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(channels_in, channels, 3, stride, 1, bias=False)
        self.second = nn.Conv2d(channels, channels, 3, 1, 1, bias=False)
        self.first_norm, self.second_norm = nn.BatchNorm2d(channels), nn.BatchNorm2d(channels)
        projected = stride != 1 or channels_in != channels
        self.beside = nn.Conv2d(channels_in, channels, 1, stride, bias=False) if projected else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        h = F.relu(self.first_norm(self.first(x)), inplace=True)
        h = self.second_norm(self.second(h))
        h += self.beside(x)
        return F.relu(h, inplace=True)


class ResNet(nn.Module):
    """With BatchNorm, which writes to the statistics that it has saved."""

    def __init__(self, call: Call = as_it_is) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, CHANNELS, 3, 1, 1, bias=False), nn.BatchNorm2d(CHANNELS), nn.ReLU(inplace=True)
        )
        self.pool, self.call, self.head = nn.MaxPool2d(3, 2, 1), call, nn.Linear(2 * CHANNELS, CLASSES)
        self.blocks = nn.ModuleList([ResidualBlock(CHANNELS, CHANNELS, 1), ResidualBlock(CHANNELS, 2 * CHANNELS, 2)])

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        x = self.pool(self.stem(inputs))
        for block in self.blocks:
            x = self.call(block, x)
        return F.cross_entropy(self.head(x.mean((2, 3))), targets, label_smoothing=0.1)


_add("resnet", ResNet, images, Flag.EAGER, Flag.SOURCES_CHANGE)
_add("resnet-checkpointed", partial(ResNet, reentrant), images, Flag.EAGER, Flag.SOURCES_CHANGE, micro_batches=2)
