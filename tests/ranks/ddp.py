"""``DistributedDataParallel``: a whole model in each rank, and gradients that are averaged while backward runs."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from tests.ranks.launch import Ranks
from tests.ranks.training import Around, Block, Checkpointed, Storages, batch, blocks, exact, steps


def trained(
    ranks: Ranks,
    build: Callable[[], nn.Module] = blocks,
    accumulate: int = 1,
    around: Callable[[], Around] = nullcontext,
    **options: Any,
) -> None:
    """Trains a model under DDP with these ``options``, with offload and without.

    Args:
        accumulate: how many backwards there are in a step; gradients are averaged after the last.
        around: what else stands around each forward.
    """

    def program(offload: Around, weights: Storages) -> object:
        torch.manual_seed(0)
        parallel = DistributedDataParallel(build(), **options)

        def step(number: int) -> Tensor:
            for part in range(1, accumulate + 1):
                with parallel.no_sync() if part < accumulate else nullcontext():
                    with offload, around():
                        loss: Tensor = parallel(batch(ranks, 10 * number + part)).square().mean()
                    loss.backward()
            return loss

        weights += [parameter.untyped_storage() for parameter in parallel.parameters()]
        return steps(parallel, step)

    exact(ranks, program)


class Branches(nn.Module):
    """Ranks and steps use different parts of it."""

    def __init__(self) -> None:
        super().__init__()
        self.branches = nn.ModuleList(Block() for _ in range(3))
        self.tail = Block()

    def forward(self, x: Tensor) -> Tensor:
        used = int(x[0, 0].abs() * 1000) % 3
        return self.tail(self.branches[used](x))


def a_static_graph_with_checkpoints_of_both_kinds(ranks: Ranks) -> None:
    for reentrant in (False, True):
        # The first block is not checkpointed: a reentrant one wants an input that requires grad.
        def build(reentrant: bool = reentrant) -> nn.Module:
            first, *others = blocks()
            return nn.Sequential(first, *(Checkpointed(block, reentrant) for block in others))

        trained(ranks, build, static_graph=True)


def normalized() -> nn.Module:
    """Statistics and a collective are inside of forward, and buffers are broadcast before it."""
    return nn.Sequential(nn.Linear(32, 64), nn.BatchNorm1d(64), nn.GELU(), nn.Linear(64, 32))


SCENARIOS: dict[str, Callable[[Ranks], None]] = {
    "bits_are_those_without_offload": trained,
    "gradients_that_are_views_of_buckets": partial(trained, gradient_as_bucket_view=True, bucket_cap_mb=0.01),
    "accumulation_with_no_sync": partial(trained, accumulate=3),
    "parameters_that_are_not_used": partial(trained, build=Branches, find_unused_parameters=True),
    "a_static_graph": partial(trained, static_graph=True),
    "a_static_graph_with_checkpoints_of_both_kinds": a_static_graph_with_checkpoints_of_both_kinds,
    "batch_norm_over_all_ranks": partial(trained, build=normalized),
    # The casts of weights that it caches are no activations either.
    "autocast": partial(trained, accumulate=2, around=lambda: torch.autocast("cpu", torch.bfloat16)),
}
