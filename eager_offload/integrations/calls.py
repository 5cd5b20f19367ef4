"""Calls of a module that run in a ``with offload``, for frameworks that offer no place around forward."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn

from eager_offload import ConfigError, Offload
from eager_offload._torch import offloaded_modules, run_uncompiled
from eager_offload.errors import FORKED, warn
from eager_offload.module_calls import ModuleCall, show_to_compilers


def is_training(module: nn.Module) -> bool:
    """Whether a forward of ``module`` is one that a backward may follow."""
    return module.training and torch.is_grad_enabled()


_NOT_TRACED = (
    "eager_offload offloads around the calls of this module, and what it does there is no part of a graph. Call "
    "module.compile(...) on it, which may have fullgraph=True; or torch.compile without fullgraph"
)


class OffloadedCalls:
    """From now on, calls of ``module`` run in ``with offload``, until :meth:`remove`.

    Args:
        module: the outermost of the model's wrappers: what ``DistributedDataParallel``, ``fully_shard`` or
            ``torch.compile`` returned. A module inside of one that is compiled with ``fullgraph=True`` does not work.
        offload: whose context is entered.
        when: asked at each call for which :func:`is_training` holds; nothing moves in others.

    Raises:
        ConfigError: for ``torch.nn.DataParallel`` on several devices, which runs forward in threads that the context
            does not reach.
    """

    def __init__(self, module: nn.Module, offload: Offload, when: Callable[[nn.Module], bool] = is_training) -> None:
        if isinstance(module, nn.DataParallel) and len(module.device_ids) > 1:
            raise ConfigError(
                "model=DataParallel is not accepted: it runs forward in threads of its own, where nothing can be "
                "offloaded. Start one process for each device (`torchrun`, `accelerate launch`), or show the process "
                "one device alone (CUDA_VISIBLE_DEVICES)"
            )
        called = weakref.ref(module)  # or a module would hold itself
        process, said_of_fork = os.getpid(), list[bool]()

        def offloaded(call: Callable[..., Any], arguments: tuple[Any, ...], named: Mapping[str, Any]) -> Any:
            module = called()
            assert module is not None  # it is what is being called
            if os.getpid() != process:
                if not said_of_fork:
                    said_of_fork.append(True)
                    warn(FORKED.format(where="after its parent had prepared this model"))
                return call(*arguments, **named)
            with offload if when(module) else nullcontext():
                return call(*arguments, **named)

        # The compiler is to look at what is called, and not at the `with` around it.
        unseen = torch.compiler.disable(offloaded, recursive=False, reason=_NOT_TRACED)  # type: ignore[no-untyped-call]
        for method in (Offload.__enter__, Offload.__exit__):
            run_uncompiled(method)

        def around(call: Callable[..., Any], arguments: tuple[Any, ...], named: Mapping[str, Any]) -> Any:
            module = called()
            if module is None or not is_training(module):
                return call(*arguments, **named)
            return unseen(call, arguments, named)

        # Held by the module alone: what `module.compile()` left there, which it goes on to call, holds the module.
        self._call = weakref.ref(ModuleCall.begin(module, around))
        show_to_compilers()

    def remove(self) -> None:
        """Calls the module as before. Idempotent."""
        if (call := self._call()) is not None:
            call.end()


def warn_of_what_hides(model: nn.Module, instead: str) -> None:
    """Warns of modules that torch's ``offload_wrapper`` stands around: the innermost hooks alone see a saved tensor.

    Those that are checkpointed and no more hide nothing: what is kept of them, their inputs, is offloaded.

    Args:
        model: that is about to train.
        instead: how it is left out in the caller's framework.
    """
    if names := offloaded_modules(model):
        warn(
            f"offload_wrapper stands around modules of this model ({len(names)}, {names[0]!r} the first "
            f"of them) and hides from us what is saved there. Leave it out: {instead}. What checkpointing keeps, the "
            "inputs of what is checkpointed, we move"
        )
