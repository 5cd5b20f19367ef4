"""What the scenarios of many ranks share: models, three steps, and what has to hold in every rank."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from eager_offload import OffloadStats
from tests.hazards.backends import DiskBackend
from tests.hazards.probes import Transfers
from tests.hazards.programs import REGIMES, Around, same_gradients
from tests.programs import leaf
from tests.programs.parts.blocks import ROWS, WIDTH, Block
from tests.ranks.launch import Ranks

#: Storages of weights, to which a program adds.
Storages: TypeAlias = list[torch.UntypedStorage]
Program: TypeAlias = Callable[[Around, Storages], object]

STEPS = 3
BROUGHT_BACK_EARLY, _, ONE_AT_A_TIME, _ = REGIMES


def blocks(number: int = 3) -> nn.Sequential:
    """The same model in every rank."""
    torch.manual_seed(0)
    return nn.Sequential(*(Block() for _ in range(number)))


class Checkpointed(nn.Module):
    """A block whose insides are computed again in backward."""

    def __init__(self, block: nn.Module, reentrant: bool) -> None:
        super().__init__()
        self.block, self.reentrant = block, reentrant

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.block, x, use_reentrant=self.reentrant)


def batch(ranks: Ranks, step: int, rows: int = ROWS) -> Tensor:
    """Data of this rank's own."""
    return leaf(rows, WIDTH, seed=100 * step + ranks.rank, grad=False)


def local(tensor: Tensor) -> Tensor:
    """What this rank has of ``tensor``."""
    tensor = tensor.detach()
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def steps(model: nn.Module, step: Callable[[int], Tensor]) -> list[object]:
    """Three steps of training: every loss and gradient, and the parameters at the end.

    Args:
        step: runs forward and backward and returns the loss.
    """
    trained = list(model.parameters())
    optimizer = torch.optim.AdamW([p for p in trained if p.requires_grad], lr=0.01, foreach=False)
    seen: list[object] = []
    for number in range(STEPS):
        loss = step(number)
        seen += [loss.detach().clone(), *(None if p.grad is None else local(p.grad).clone() for p in trained)]
        optimizer.step()
        optimizer.zero_grad()
    return [*seen, *(local(parameter).clone() for parameter in trained)]


def exact(ranks: Ranks, program: Program, **options: Any) -> list[OffloadStats]:
    """Asserts for this rank that ``program`` gives the same bits with offload as without, and moves no weight.

    Args:
        options: see ``same_gradients``.
    """
    regimes = REGIMES if ranks.thorough else (BROUGHT_BACK_EARLY, ONE_AT_A_TIME)
    with DiskBackend() as backend:

        def watched(offload: Around) -> object:
            weights: Storages = []
            with Transfers(backend.runtime) as transfers:
                seen = program(offload, weights)
                assert isinstance(offload, nullcontext) or weights, "the program names no weights"
                assert not any(map(transfers.read, weights)), "bytes of a weight were moved"
            return seen

        gathered = same_gradients(watched, backend, regimes=regimes, **options)
        for stats in gathered:
            assert stats.kept_bytes.get("parameter", 0) > 0, "no parameter was saved at all"
        backend.assert_nothing_is_held()
    return gathered
