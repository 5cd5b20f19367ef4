"""What every model is: a module that makes its own batches, runs its blocks as it is told, and returns its loss."""

from __future__ import annotations

import abc
from collections.abc import Callable
from enum import Enum
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

VOCABULARY = 61


class Batch(NamedTuple):
    """What goes in, and what should come out."""

    inputs: Tensor
    targets: Tensor


class Checkpointing(Enum):
    """What becomes of what a block computes in forward."""

    NONE = "no checkpointing"
    REENTRANT = "reentrant"
    NON_REENTRANT = "non-reentrant"

    def run(self, block: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
        """The result of ``block``; what it saves is kept, or computed again in backward."""
        if self is Checkpointing.NONE:
            return block(*inputs)
        result = checkpoint(block, *inputs, use_reentrant=self is Checkpointing.REENTRANT)
        assert isinstance(result, Tensor)
        return result


class Trainee(nn.Module, abc.ABC):
    """A model with its data and its loss: ``forward(inputs, targets)`` returns a scalar."""

    #: How every block is run.
    checkpointing = Checkpointing.NONE
    #: Whether an operator writes to what it has saved: BatchNorm does so to its running statistics.
    changes_what_it_saves = False

    @abc.abstractmethod
    def batch(self, seed: int) -> Batch:
        """Random data, the same for the same ``seed``."""


def tokens(seed: int, rows: int, length: int) -> Batch:
    """Sequences and what follows each of their tokens: (rows, length), int64."""
    drawn = torch.randint(VOCABULARY, (rows, length + 1), generator=torch.Generator().manual_seed(seed))
    return Batch(drawn[:, :-1], drawn[:, 1:])


def images(seed: int, rows: int, channels: int, size: int, classes: int) -> Batch:
    """Images (rows, channels, size, size), float32, and the class of each, int64."""
    generator = torch.Generator().manual_seed(seed)
    return Batch(
        torch.randn(rows, channels, size, size, generator=generator),
        torch.randint(classes, (rows,), generator=generator),
    )
