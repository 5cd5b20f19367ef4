"""The steps of a soak: what a week of training does, in any order."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

#: Runs forwards within what it is given, and returns whatever has to be the same with offload and without.
Work = Callable[["Model", AbstractContextManager[Any], random.Random], Sequence[Tensor]]

_WIDTH, _HEADS = 64, 4


class Crash(Exception):
    """Raised by a model on purpose."""


def _crash(gradient: Tensor) -> None:
    raise Crash("backward")


class Model(nn.Module):
    """A block of a language model, small enough for many steps a second."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(_WIDTH) for _ in range(2))
        self.qkv = nn.Linear(_WIDTH, 3 * _WIDTH)
        self.out = nn.Linear(_WIDTH, _WIDTH)
        self.up, self.down = nn.Linear(_WIDTH, 4 * _WIDTH), nn.Linear(4 * _WIDTH, _WIDTH)

    def forward(self, x: Tensor, *, crash: str = "", recompute: bool = False) -> Tensor:
        """``x``: batch x length x 64; returns as much."""
        x = x + self.attend(self.norms[0](x))
        if crash == "forward":
            raise Crash(crash)
        if crash == "backward":
            x.register_hook(_crash)
        hidden = self.norms[1](x)
        return x + (checkpoint(self.think, hidden, use_reentrant=False) if recompute else self.think(hidden))

    def attend(self, x: Tensor) -> Tensor:
        shape = (x.shape[0], x.shape[1], _HEADS, _WIDTH // _HEADS)
        q, k, v = (part.view(shape).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed.transpose(1, 2).reshape(x.shape))

    def think(self, x: Tensor) -> Tensor:
        return self.down(nn.functional.gelu(self.up(x)))

    def gradients(self) -> list[Tensor]:
        """What has come together; the next step begins with none."""
        found = [parameter.grad for parameter in self.parameters() if parameter.grad is not None]
        self.zero_grad(set_to_none=True)
        return found


def batch(chance: random.Random) -> Tensor:
    """Of any shape: no two steps are alike."""
    generator = torch.Generator().manual_seed(chance.randrange(1 << 30))
    return torch.randn(chance.randint(1, 8), chance.randint(1, 128), _WIDTH, generator=generator)


def forward(model: Model, around: AbstractContextManager[Any], x: Tensor, **how: Any) -> Tensor:
    """A loss."""
    with around:
        return model(x, **how).square().mean()


def train(model: Model, around: AbstractContextManager[Any], chance: random.Random) -> Sequence[Tensor]:
    """One step as most are."""
    forward(model, around, batch(chance), recompute=chance.random() < 0.2).backward()
    return model.gradients()


def accumulate(model: Model, around: AbstractContextManager[Any], chance: random.Random) -> Sequence[Tensor]:
    """Several forwards, then their backwards in any order."""
    losses = [forward(model, around, batch(chance)) for _ in range(3)]
    chance.shuffle(losses)
    while losses:
        losses.pop().backward()
    return model.gradients()


def twice(model: Model, around: AbstractContextManager[Any], chance: random.Random) -> Sequence[Tensor]:
    """One backward after the other through the same graph."""
    loss = forward(model, around, batch(chance))
    loss.backward(retain_graph=True)
    loss.backward()
    return model.gradients()


def evaluate(model: Model, around: AbstractContextManager[Any], chance: random.Random) -> Sequence[Tensor]:
    """A pass of which nothing is saved."""
    with torch.no_grad() if chance.random() < 0.5 else torch.inference_mode():
        return [forward(model, around, batch(chance))]


def forget(model: Model, around: AbstractContextManager[Any], chance: random.Random) -> Sequence[Tensor]:
    """A graph that is never run backward, and one of which half is."""
    x = batch(chance)
    forward(model, around, x)
    with around:
        one, two = model(x).square().mean(), model(x).tanh().sum()
    one.backward()
    del two
    return model.gradients()


def crash(model: Model, around: AbstractContextManager[Any], chance: random.Random) -> Sequence[Tensor]:
    """A step that ends in an exception, in forward or in backward."""
    x = batch(chance)
    try:
        forward(model, around, x, crash=chance.choice(["forward", "backward"])).backward()
    except Crash:
        model.zero_grad(set_to_none=True)
    return []


def in_thread(model: Model, around: AbstractContextManager[Any], chance: random.Random) -> Sequence[Tensor]:
    """A step of a thread that then ends."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(train, model, around, chance).result()


works: dict[str, Work] = {
    work.__name__: work for work in (train, accumulate, twice, evaluate, forget, crash, in_thread)
}


def expected(model: Model, work: Work, seed: int) -> Sequence[Tensor]:
    """What ``work`` gives without offload."""
    return work(model, nullcontext(), random.Random(seed))
