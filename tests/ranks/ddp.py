"""``DistributedDataParallel``: a whole model in each rank, and gradients that are averaged while backward runs."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from tests.ranks.launch import Ranks
from tests.ranks.training import Around, Block, Storages, batch, blocks, exact, steps


def trained(
    ranks: Ranks, model: nn.Module, accumulate: int = 1, around: Callable[[], Around] = nullcontext, **options: Any
) -> None:
    """Trains ``model`` under DDP with these ``options``, with offload and without.

    Args:
        accumulate: how many backwards there are in a step; gradients are averaged after the last.
        around: what else stands around each forward.
    """
    fresh = {name: value.clone() for name, value in model.state_dict().items()}

    def program(offload: Around, weights: Storages) -> object:
        model.load_state_dict(fresh)
        parallel = DistributedDataParallel(model, **options)

        def step(number: int) -> Tensor:
            for part in range(accumulate - 1):
                with parallel.no_sync():
                    with offload, around():
                        loss = parallel(batch(ranks, 10 * number + part)).square().mean()
                    loss.backward()
            with offload, around():
                loss = parallel(batch(ranks, 10 * number + accumulate)).square().mean()
            loss.backward()
            return loss

        weights += [parameter.untyped_storage() for parameter in parallel.parameters()]
        seen = steps(parallel, step)
        model.zero_grad()
        return seen

    exact(ranks, program)


def bits_are_those_without_offload(ranks: Ranks) -> None:
    trained(ranks, blocks())


def gradients_that_are_views_of_buckets(ranks: Ranks) -> None:
    trained(ranks, blocks(), gradient_as_bucket_view=True, bucket_cap_mb=0.01)


def accumulation_with_no_sync(ranks: Ranks) -> None:
    trained(ranks, blocks(), accumulate=3)


class Branches(nn.Module):
    """Ranks and steps use different parts of it."""

    def __init__(self) -> None:
        super().__init__()
        self.branches = nn.ModuleList(Block() for _ in range(3))
        self.tail = Block()

    def forward(self, x: Tensor) -> Tensor:
        used = int(x[0, 0].abs() * 1000) % 3
        return self.tail(self.branches[used](x))


def parameters_that_are_not_used(ranks: Ranks) -> None:
    torch.manual_seed(0)
    trained(ranks, Branches(), find_unused_parameters=True)


class Checkpointed(nn.Module):
    """Blocks whose insides are computed again in backward."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.blocks, self.reentrant = blocks(), reentrant

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks[0](x)
        for block in self.blocks[1:]:
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        return x


def a_static_graph(ranks: Ranks) -> None:
    trained(ranks, blocks(), static_graph=True)


def a_static_graph_with_checkpoints_of_both_kinds(ranks: Ranks) -> None:
    for reentrant in (False, True):
        trained(ranks, Checkpointed(reentrant), static_graph=True)


def batch_norm_over_all_ranks(ranks: Ranks) -> None:
    """Its statistics and a collective are inside of forward, and buffers are broadcast before it."""
    torch.manual_seed(0)
    trained(ranks, nn.Sequential(nn.Linear(32, 64), nn.BatchNorm1d(64), nn.GELU(), nn.Linear(64, 32)))


def autocast(ranks: Ranks) -> None:
    """The casts of weights that it caches are no activations either."""
    trained(ranks, blocks(), accumulate=2, around=lambda: torch.autocast("cpu", torch.bfloat16))
