"""A model with known saves, and a step of it, for the tests of what can be seen."""

from __future__ import annotations

from contextlib import AbstractContextManager

import torch
from torch import Tensor, nn

from eager_offload.trace_file import Slice

DEPTH = 4
WIDTH = 64
#: Bytes of one activation.
NBYTES = WIDTH * WIDTH * 4


class Layer(nn.Module):
    """Saves its input, ``tanh``'s result and ``exp``'s, and its weight, which is a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x).tanh().exp()


class Net(nn.Module):
    """Layers, and a sum of squares outside of all of them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([Layer() for _ in range(DEPTH)])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


def inputs() -> Tensor:
    return torch.linspace(-1, 1, WIDTH * WIDTH).reshape(WIDTH, WIDTH)


def step(net: Net, around: AbstractContextManager[object]) -> list[Tensor]:
    """Forward and backward; the gradients."""
    net.zero_grad()
    with around:
        loss = net(inputs())
    loss.backward()
    return [parameter.grad.clone() for parameter in net.parameters() if parameter.grad is not None]


def nested(slices: list[Slice]) -> bool:
    """Whether of any two of a track one is over before the other begins, or contains it."""
    ends: list[float] = []
    for one in sorted(slices, key=lambda one: (one.start, -one.seconds)):
        while ends and ends[-1] <= one.start + 2e-9:
            ends.pop()
        if ends and one.stop > ends[-1] + 2e-9:
            return False
        ends.append(one.stop)
    return True
