"""Compiled modules whose calls run in a ``with offload``, their copies included."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from torch import nn

from eager_offload._torch import OptimizedModule, module_inside


class Around(Protocol):
    """An ``Offload``."""

    def around(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """A function that does ``call`` in a ``with`` of this object."""


class OffloadedModule(OptimizedModule):
    """What ``torch.compile`` makes of a module, in a ``with`` around each call.

    torch makes a copy of such a module anew, from what was compiled and how, and so this one makes it with a copy of
    the ``Offload``.
    """

    #: Which one offloads its calls.
    eager_offload: Around

    def __init__(self, module: nn.Module, compiler: Any, offload: Around) -> None:
        super().__init__(module, compiler)
        self._offload_calls(offload)

    def __reduce__(self) -> Any:
        return type(self), (module_inside(self), self.dynamo_ctx, self.eager_offload)

    def _offload_calls(self, offload: Around) -> None:
        vars(self)["eager_offload"] = offload  # what is set on such a module is set on the one inside
        self.forward = offload.around(self.forward)


def serve(compiled: nn.Module, offload: Around) -> nn.Module:
    """Has the calls of ``compiled``, which ``torch.compile`` has made, run in a ``with offload``."""
    compiled.__class__ = OffloadedModule
    assert isinstance(compiled, OffloadedModule)
    compiled._offload_calls(offload)
    return compiled
