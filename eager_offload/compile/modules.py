"""Compiled modules whose calls run in a ``with offload``, their copies included."""

from __future__ import annotations

from typing import Any

from torch import nn

from eager_offload.torch_private.inductor import OptimizedModule


class OffloadedModule(OptimizedModule):
    """What ``torch.compile`` makes of a module, in a ``with`` around each call.

    torch makes a copy of such a module anew, from what was compiled and how, and so this one makes it with a copy of
    the ``Offload``.
    """

    #: The ``Offload`` that serves its calls; this layer does not know the type.
    eager_offload: Any

    def __init__(self, module: nn.Module, compiler: Any, offload: Any) -> None:
        super().__init__(module, compiler)
        offload.skip_in(module)
        self._offload_calls(offload)

    def __reduce__(self) -> Any:
        (inside,) = self.children()
        return type(self), (inside, self.dynamo_ctx, self.eager_offload)

    def _offload_calls(self, offload: Any) -> None:
        vars(self)["eager_offload"] = offload  # what is set on such a module is set on the one inside
        self.forward = offload.around(self.forward)


def serve(compiled: nn.Module, offload: Any) -> nn.Module:
    """Has the calls of ``compiled``, which ``torch.compile`` has made, run in a ``with offload``."""
    compiled.__class__ = OffloadedModule
    assert isinstance(compiled, OffloadedModule)
    compiled._offload_calls(offload)
    return compiled
