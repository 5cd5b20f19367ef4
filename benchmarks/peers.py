"""Ways to train a model in less memory, ours and others', behind one call."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch._functorch.config as functorch_config
from torch import Tensor, nn
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch.fx import Graph
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import eager_offload as eo
from benchmarks.models import Run


@dataclass(frozen=True)
class Method:
    """How a model is run: what calls each block, what stands around forward, and our object where it is ours."""

    run: Run
    around: Callable[[], AbstractContextManager[Any]] = nullcontext
    offload: eo.Offload | None = None
    #: Makes of the model what is called in its place.
    compiled: Callable[[nn.Module], Callable[..., Any]] = lambda model: model


@dataclass(frozen=True)
class Variant:
    """A named method; ``make`` returns ``None`` where it is not installed."""

    make: Callable[[torch.device], Method | None]
    #: The variant without offload that computes the same.
    base: str = "none"
    ours: bool = False

    @property
    def is_compiled(self) -> bool:
        return self.base.startswith("compiled")


def plain(block: nn.Module, x: Tensor) -> Tensor:
    return block(x)


def checkpointed(block: nn.Module, x: Tensor) -> Tensor:
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
    return lambda device: Method(run)


def _save_on_cpu(device: torch.device) -> Method:
    pin_memory = device.type != "cpu"
    return Method(plain, lambda: torch.autograd.graph.save_on_cpu(pin_memory=pin_memory))


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
        return Method(plain, kind)

    return make


def _compiled(run: Run, **options: Any) -> Callable[[torch.device], Method | None]:
    """Compiled by Inductor, with options of AOTAutograd; ``None`` where torch has no such option."""

    def make(device: torch.device) -> Method | None:
        for name, value in options.items():
            if not hasattr(functorch_config, name):
                return None
            setattr(functorch_config, name, value)
        return Method(run, compiled=lambda model: torch.compile(model, dynamic=False))

    return make


class _MarkAll(CustomGraphPass):
    """Asks torch's own pass to move every large value, as ours would; what it can move it finds out itself."""

    def __call__(self, graph: Graph) -> None:
        for node in graph.nodes:
            value = node.meta.get("val")
            if node.op == "call_function" and isinstance(value, Tensor) and value.nbytes >= 1 << 20:
                node.meta["should_offload"] = True

    def uuid(self) -> object:
        return "mark all"


def _torch_offloads(device: torch.device) -> Method | None:
    """Torch's own offloading in compiled code."""
    method = _compiled(plain, enable_activation_offloading=True, activation_offload_separate_stream=True)(device)
    if method is None:
        return None
    options = {"joint_custom_post_pass": _MarkAll()}
    return Method(plain, compiled=lambda model: torch.compile(model, dynamic=False, options=options))


def _ours_compiled(device: torch.device) -> Method:
    offload = eo.Offload()
    return Method(plain, nullcontext, offload, lambda model: offload.compile(model, dynamic=False))


VARIANTS = {
    "none": Variant(_without(plain)),
    "save_on_cpu": Variant(_save_on_cpu),
    "checkpointing": Variant(_without(checkpointed), base="checkpointing"),
    "selective checkpointing": Variant(_without(_selectively), base="selective checkpointing"),
    "ours": Variant(_ours(plain), ours=True),
    "ours + checkpointing": Variant(_ours(checkpointed), base="checkpointing", ours=True),
    "torchtune": Variant(_activations("torchtune.training")),
    "compiled": Variant(_compiled(plain), base="compiled"),
    "compiled, ours": Variant(_ours_compiled, base="compiled", ours=True),
    "compiled, torch's own pass": Variant(_torch_offloads, base="compiled"),
    "compiled, checkpointing": Variant(_compiled(checkpointed), base="compiled, checkpointing"),
    "compiled, budget 0.5": Variant(_compiled(plain, activation_memory_budget=0.5), base="compiled"),
    "TRL": Variant(_activations("trl.models.activation_offloading")),
}
