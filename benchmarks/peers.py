"""Ways to train a model in less memory that are not ours."""

from __future__ import annotations

import functools
import importlib
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts


def plain(block: nn.Module, x: Tensor) -> Tensor:
    return block(x)


def checkpointed(block: nn.Module, x: Tensor) -> Tensor:
    return checkpoint(block, x, use_reentrant=False)


def checkpointed_on_cpu(block: nn.Module, x: Tensor) -> Tensor:
    """Checkpoints whose inputs go to the host and back by ``save_on_cpu``, as Transformers' ``offload=True`` has it."""
    with save_on_cpu(pin_memory=True):
        return checkpoint(block, x, use_reentrant=False)


def selectively_checkpointed(block: nn.Module, x: Tensor) -> Tensor:
    """Keeps attention and every second matrix product, and recomputes the rest."""
    products = {False: 0, True: 0}  # in forward, and in recomputation

    def policy(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        if operator in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default):
            products[context.is_recompute] += 1
            odd = products[context.is_recompute] % 2
            return CheckpointPolicy.MUST_SAVE if odd else CheckpointPolicy.PREFER_RECOMPUTE
        if "scaled_dot_product" in str(operator):
            return CheckpointPolicy.MUST_SAVE
        return CheckpointPolicy.PREFER_RECOMPUTE

    contexts = functools.partial(create_selective_checkpoint_contexts, policy)
    return checkpoint(block, x, use_reentrant=False, context_fn=contexts)


def saved_on_cpu() -> AbstractContextManager[Any]:
    return save_on_cpu(pin_memory=True)


def trl_offloading() -> AbstractContextManager[Any]:
    """TRL's ``OffloadActivations``."""
    context: AbstractContextManager[Any] = importlib.import_module(
        "trl.models.activation_offloading"
    ).OffloadActivations()
    return context
