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

from lm.model import Block

WIDTH, HEADS = 64, 4
#: Runs forwards within what it is given, and returns whatever has to be the same with offload and without.
Work = Callable[[Block, AbstractContextManager[Any], random.Random], Sequence[Tensor]]


class Crash(Exception):
    """Raised by a model on purpose."""


def gradients(model: Block) -> list[Tensor]:
    """What has come together; the next step begins with none."""
    found = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    model.zero_grad(set_to_none=True)
    return found


def batch(chance: random.Random) -> Tensor:
    """Of any shape: no two steps are alike."""
    generator = torch.Generator().manual_seed(chance.randrange(1 << 30))
    return torch.randn(chance.randint(1, 8), chance.randint(1, 128), WIDTH, generator=generator)


def forward(model: Block, around: AbstractContextManager[Any], x: Tensor, *, recompute: bool = False) -> Tensor:
    """A loss."""
    with around:
        out = checkpoint(model, x, use_reentrant=False) if recompute else model(x)
        return out.square().mean()


def train(model: Block, around: AbstractContextManager[Any], chance: random.Random) -> Sequence[Tensor]:
    """One step as most are."""
    forward(model, around, batch(chance), recompute=chance.random() < 0.2).backward()
    return gradients(model)


def accumulate(model: Block, around: AbstractContextManager[Any], chance: random.Random) -> Sequence[Tensor]:
    """Several forwards, then their backwards in any order."""
    losses = [forward(model, around, batch(chance)) for _ in range(3)]
    chance.shuffle(losses)
    while losses:
        losses.pop().backward()
    return gradients(model)


def twice(model: Block, around: AbstractContextManager[Any], chance: random.Random) -> Sequence[Tensor]:
    """One backward after the other through the same graph."""
    loss = forward(model, around, batch(chance))
    loss.backward(retain_graph=True)
    loss.backward()
    return gradients(model)


def evaluate(model: Block, around: AbstractContextManager[Any], chance: random.Random) -> Sequence[Tensor]:
    """A pass of which nothing is saved."""
    with torch.no_grad() if chance.random() < 0.5 else torch.inference_mode():
        return [forward(model, around, batch(chance))]


def forget(model: Block, around: AbstractContextManager[Any], chance: random.Random) -> Sequence[Tensor]:
    """A graph that is never run backward, and one of which half is."""
    x = batch(chance)
    forward(model, around, x)
    with around:
        one, two = model(x).square().mean(), model(x).tanh().sum()
    one.backward()
    del two
    return gradients(model)


def crash(model: Block, around: AbstractContextManager[Any], chance: random.Random) -> Sequence[Tensor]:
    """A step that ends in an exception, in the midst of forward or of backward."""

    def fail(*_: Any) -> None:
        raise Crash

    def fail_later(_: nn.Module, arguments: tuple[Tensor]) -> None:
        arguments[0].register_hook(fail)

    x, hook = batch(chance), model.mlp_norm.register_forward_pre_hook(chance.choice([fail, fail_later]))
    try:
        forward(model, around, x).backward()
    except Crash:
        model.zero_grad(set_to_none=True)
    finally:
        hook.remove()
    return []


def in_thread(model: Block, around: AbstractContextManager[Any], chance: random.Random) -> Sequence[Tensor]:
    """A step of a thread that then ends."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(train, model, around, chance).result()


works: dict[str, Work] = {
    work.__name__: work for work in (train, accumulate, twice, evaluate, forget, crash, in_thread)
}


def expected(model: Block, work: Work, seed: int) -> Sequence[Tensor]:
    """What ``work`` gives without offload."""
    return work(model, nullcontext(), random.Random(seed))
