"""Small models and steps that several hazards are run with."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager

import torch
from torch import Tensor, nn

from tests.programs import leaf

WIDTH, ROWS = 32, 16
#: Bytes of what goes from one block to the next.
BOUNDARY = WIDTH * ROWS * 4


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


def blocks(count: int = 4, seed: int = 0) -> nn.ModuleList:
    torch.manual_seed(seed)
    return nn.ModuleList(Block() for _ in range(count))


def trained(
    parameters: Iterable[Tensor],
    around: AbstractContextManager[object],
    forward: Callable[[int], Tensor],
    make: Callable[..., torch.optim.Optimizer] = torch.optim.SGD,
) -> list[Tensor]:
    """Three steps, each of which has the loss that ``forward`` makes of its number: the losses, and what is trained."""
    parameters, losses = [*parameters], []
    optimizer = make(parameters, lr=0.1)
    for step in range(3):
        with around:
            loss = forward(step)
        loss.backward()
        losses.append(loss.detach())
        del loss
        optimizer.step()
        optimizer.zero_grad()
    return [*losses, *(parameter.detach() for parameter in parameters)]


def gradients(model: nn.Module) -> list[Tensor | None]:
    return [parameter.grad for parameter in model.parameters()]


class Step:
    """A forward and its backward, to be run in pieces."""

    def __init__(self, seed: int) -> None:
        self.x, self.w = leaf(32, 32, seed=seed), leaf(32, 32, seed=seed + 100)
        self.loss: Tensor | None = None

    def forward(self, offload: AbstractContextManager[object]) -> Step:
        with offload:
            h = (self.x * 2).tanh()
            self.loss = ((h @ self.w).exp() * h).sin().sum()
        return self

    def backward(self) -> Step:
        self.loss.backward()
        self.loss = None
        return self

    @property
    def result(self) -> list[Tensor]:
        return [self.x.grad.clone(), self.w.grad.clone()]
