"""Calls of a module that run in a ``with offload``, for frameworks that offer no place around forward.

[Note: Not by forward hooks] A forward hook registered with ``always_call=True`` is not called when a
``KeyboardInterrupt`` comes: the saved-tensor hooks would stay installed in a notebook whose cell was stopped. What
``module.compile()`` uses to call a module in another way lets a plain ``with`` do it, is left out of copies and pickles
by torch itself, and stands outside of the code of a compiled module, so that no graph breaks.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import nn

from eager_offload import ConfigError, Offload
from eager_offload._torch import module_call, offloaded_modules, own_call, set_module_call
from eager_offload.errors import warn

__all__ = ["OffloadedCalls", "is_training", "warn_of_what_hides"]


def is_training(module: nn.Module) -> bool:
    """Whether a forward of ``module`` is one that a backward may follow."""
    return module.training and torch.is_grad_enabled()


class OffloadedCalls:
    """From now on, calls of ``module`` run in ``with offload``, until :meth:`remove`.

    Args:
        module: the outermost of the model's wrappers: what ``DistributedDataParallel``, ``fully_shard`` or
            ``torch.compile`` returned. A module inside of one that is compiled with ``fullgraph=True`` does not work.
        offload: whose context is entered.
        when: asked at each call; the default is :func:`is_training`.

    Raises:
        ConfigError: for ``torch.nn.DataParallel``, which runs forward in threads that the context does not reach.
    """

    def __init__(self, module: nn.Module, offload: Offload, when: Callable[[nn.Module], bool] = is_training) -> None:
        if isinstance(module, nn.DataParallel):
            raise ConfigError(
                "model=DataParallel is not accepted: it runs forward in threads of its own, where nothing can be "
                "offloaded. Start one process for each device (`torchrun`, `accelerate launch`), or show the process "
                "one device alone (CUDA_VISIBLE_DEVICES)"
            )
        inner = module_call(module)
        active = self._active = [True]  # shared with the call: another's may stand around it when it is to go
        called = self._module = weakref.ref(module)  # or a module would hold itself

        @wraps(inner or type(module).forward)
        def call(*arguments: Any, **named: Any) -> Any:
            module = called()
            assert module is not None  # it is what is being called
            forward = inner or own_call(module)
            if not (active and when(module)):
                return forward(*arguments, **named)
            with offload:
                return forward(*arguments, **named)

        # The compiler is to look at what is called, and not at the `with` around it.
        ours: Any = torch.compiler.disable(call, recursive=False)  # type: ignore[no-untyped-call]  # torch's own
        # The module holds both, and this object neither: what `module.compile()` left there holds the module.
        ours.replaced = inner
        self._call: weakref.ref[Any] = weakref.ref(ours)
        set_module_call(module, ours)

    def remove(self) -> None:
        """Calls the module as before. Idempotent."""
        self._active.clear()
        module, ours = self._module(), self._call()
        if module is not None and ours is not None and id(module_call(module)) == id(ours):
            set_module_call(module, ours.replaced)


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
