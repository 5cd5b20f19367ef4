"""Training of small models, also on the simulated runtime, whose clock goes by the numbers that the planner has."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

from torch import Tensor, nn

import eager_offload as eo
from benchmarks.simulation.stage import Stage, Step

__all__ = ["Stage", "Step", "followed", "gradients"]


def followed(
    stage: Stage, plan: eo.Plan, model: nn.Module, x: Tensor, steps: int
) -> tuple[list[Step], eo.OffloadStats]:
    """So many steps, each of which follows ``plan``, and what was counted; bytes move."""
    offload = stage.offload(plan=plan)
    found = [stage.step(offload, model, x, lambda: model(x)) for _ in range(steps)]
    stats = offload.stats(synchronize=True)
    offload.close()
    assert (stats.followed_forwards, stats.plan_misses) == (steps, {})
    assert stats.bytes_out > 0
    return found, stats


def gradients(model: nn.Module, loss_of: Callable[[], Tensor], around: Any = None) -> list[Tensor]:
    """Of all parameters, and the loss; ``around``: the forward."""
    model.zero_grad(set_to_none=True)
    with around or nullcontext():
        loss = loss_of()
    loss.backward()
    return [loss.detach(), *(one.grad for one in model.parameters() if one.grad is not None)]
