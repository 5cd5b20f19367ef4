"""Training of small models on the simulated runtime, whose clock goes by the numbers that the planner has."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

from torch import Tensor, nn

from benchmarks.simulation.stage import Stage, Step

__all__ = ["Stage", "Step", "gradients"]


def gradients(model: nn.Module, loss_of: Callable[[], Tensor], around: Any = None) -> list[Tensor]:
    """Of all parameters, and the loss; ``around``: the forward."""
    model.zero_grad(set_to_none=True)
    with around or nullcontext():
        loss = loss_of()
    loss.backward()
    return [loss.detach(), *(one.grad for one in model.parameters() if one.grad is not None)]
