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
from eager_offload._torch import module_call, own_call, set_module_call

__all__ = ["OffloadedCalls", "is_training"]


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
        self._module: nn.Module | None = module
        inner = self._inner = module_call(module)
        active = self._active = [True]  # shared with the call: another's may stand around it when it is to go
        called = weakref.ref(module)  # or a module would hold itself

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
        self._call = torch.compiler.disable(call, recursive=False)  # type: ignore[no-untyped-call]  # torch's own
        set_module_call(module, self._call)

    def remove(self) -> None:
        """Calls the module as before. Idempotent."""
        module, self._module = self._module, None
        if module is None:
            return
        self._active.clear()
        if module_call(module) is self._call:
            set_module_call(module, self._inner)
