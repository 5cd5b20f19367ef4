"""What a user gives to ``python -m eager_offload check``."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn


def _blocks(*others: nn.Module) -> tuple[nn.Module, Tensor, Callable[[Tensor], Tensor]]:
    blocks = [nn.Sequential(nn.Linear(64, 64), nn.Dropout(0.1), nn.GELU()) for _ in range(4)]
    return nn.Sequential(*blocks, *others), torch.randn(256, 64), lambda out: out.square().mean()


def right() -> Any:
    return _blocks()


def has_a_buffer() -> Any:
    class Counts(nn.Module):
        count: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("count", torch.zeros(1), persistent=False)

        def forward(self, x: Tensor) -> Tensor:
            self.count += 1
            return x

    return _blocks(Counts())


def on_meta() -> Any:
    with torch.device("meta"):
        return _blocks()


def draws_from_the_system() -> Any:
    class Noisy(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + int.from_bytes(os.urandom(4))

    return _blocks(Noisy(64, 64))


def has_other_gradients_with_offload() -> Any:
    class Looks(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            out = super().forward(x)
            if os.environ["EAGER_OFFLOAD"] == "1":
                out.register_hook(lambda grad: grad * 2)
            return out

    return _blocks(Looks(64, 64, bias=False))


def is_killed() -> Any:
    os.kill(os.getpid(), signal.SIGKILL)
