"""Has the modules of a program offload that says nothing of offloading."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from eager_offload._torch import current_autograd_node, on_module_calls, top_pack_hook
from eager_offload.errors import OffloadError
from eager_offload.offload import Offload


@contextlib.contextmanager
def offload_modules(offload: Offload) -> Iterator[None]:
    """Inside, calls of outermost modules in training mode run in a ``with offload``.

    [Note: Outermost] The call of a module is the outermost one where no saved-tensor hooks are in force: inside of a
    module that is being called ours are, and where a script or a framework has put on its own, an ``Offload`` among
    them, it is left to these. What checkpointing computes again, in backward, belongs to hooks of torch's.
    """

    def around(inner: Callable[..., Any]) -> Callable[..., Any]:
        def call(self: nn.Module, *arguments: Any, **named: Any) -> Any:
            if torch.compiler.is_compiling() or not (self.training and torch.is_grad_enabled()):
                return inner(self, *arguments, **named)
            if top_pack_hook() is not None or current_autograd_node() is not None:
                return inner(self, *arguments, **named)
            if offload.patterns and next(self.parameters(), None) is not None:
                offload.skip_in(self)
            with contextlib.ExitStack() as stack:
                with contextlib.suppress(OffloadError):  # in a transform of torch.func, or while a graph is captured
                    stack.enter_context(offload)
                return inner(self, *arguments, **named)

        return call

    patch = on_module_calls(around)
    patch.put_on()
    try:
        yield
    finally:
        patch.take_off()
