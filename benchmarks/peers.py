"""Ways to train a model in less memory, ours and others', behind one call."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import eager_offload as eo
from benchmarks.llama import Run

__all__ = ["VARIANTS", "Method", "Variant"]


@dataclass(frozen=True)
class Method:
    """How a model is run: what calls each block, what stands around forward, and our object where it is ours."""

    run: Run
    around: Callable[[], AbstractContextManager[Any]]
    offload: eo.Offload | None = None


@dataclass(frozen=True)
class Variant:
    """A named method; ``make`` returns ``None`` where it is not installed."""

    make: Callable[[torch.device], Method | None]
    #: The variant without offload that computes the same.
    base: str = "none"
    ours: bool = False


def _plain(block: nn.Module, x: Tensor) -> Tensor:
    return block(x)


def _checkpointed(block: nn.Module, x: Tensor) -> Tensor:
    return checkpoint(block, x, use_reentrant=False)


def _selectively(block: nn.Module, x: Tensor) -> Tensor:
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


def _without(run: Run) -> Callable[[torch.device], Method]:
    return lambda device: Method(run, nullcontext)


def _save_on_cpu(device: torch.device) -> Method:
    pin_memory = device.type != "cpu"
    return Method(_plain, lambda: torch.autograd.graph.save_on_cpu(pin_memory=pin_memory))


def _ours(run: Run) -> Callable[[torch.device], Method]:
    def make(device: torch.device) -> Method:
        offload = eo.Offload()
        return Method(run, lambda: offload, offload)

    return make


def _activations(module: str) -> Callable[[torch.device], Method | None]:
    """The ``OffloadActivations`` of a library, which moves nothing on a CPU."""

    def make(device: torch.device) -> Method | None:
        if device.type == "cpu":
            return None
        try:
            kind = importlib.import_module(module).OffloadActivations
        except (ImportError, AttributeError):
            return None
        return Method(_plain, kind)

    return make


VARIANTS = {
    "none": Variant(_without(_plain)),
    "save_on_cpu": Variant(_save_on_cpu),
    "checkpointing": Variant(_without(_checkpointed), base="checkpointing"),
    "selective checkpointing": Variant(_without(_selectively), base="selective checkpointing"),
    "ours": Variant(_ours(_plain), ours=True),
    "ours + checkpointing": Variant(_ours(_checkpointed), base="checkpointing", ours=True),
    "torchtune": Variant(_activations("torchtune.training")),
    "TRL": Variant(_activations("trl.models.activation_offloading")),
}
