"""Support for ``torch.autograd.graph.allow_mutation_on_saved_tensors``, which clones saved tensors before a change.

torch's context consists of hooks, which register saved tensors, and a dispatch mode, which clones a registered tensor
before an operator modifies it; tensors are found by address and version. Our hooks hide torch's, and register with the
mode themselves:

    context.original[handle] = an object with `clone`    the mode calls `clone` once
    context.cloned[handle]   = the clone                 unpack returns this from then on

torch keeps unmodified saved tensors alive. Ours may be offloaded, so that their address gets a new owner, perhaps with
the same version. If the new owner is modified, an offloaded tensor is cloned needlessly.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from eager_offload.contexts import unpack
from eager_offload.eager.handles import KeptTensor, SavedView
from eager_offload.eager.subclasses import WrappedTensor
from eager_offload.errors import SavedTensorModifiedError
from eager_offload.torch_private.autograd import address_and_version


class ChangeableTensor:
    """The handle of a saved tensor that may be modified; wraps the handle of its bytes."""

    __slots__ = ("__weakref__", "_context", "_handle")

    def __init__(self, tensor: Tensor, handle: KeptTensor | SavedView | WrappedTensor, context: Any) -> None:
        self._handle = handle
        self._context = context
        place = address_and_version(tensor)
        name = (id(self), *place)
        context.original[self] = _BeforeChange(handle)
        context.tid_to_weakhandle[name] = self
        context.sid_to_tid[place].add(name)

    def views(self) -> Sequence[SavedView]:
        """Returns the handles of offloaded tensors in it."""
        if isinstance(self._handle, KeptTensor):
            return ()
        return [self._handle] if isinstance(self._handle, SavedView) else self._handle.views()

    def unpack(self) -> Tensor:
        clone: Tensor | None = self._context.cloned.get(self)
        return self._handle.unpack() if clone is None else clone


class _BeforeChange:
    """The object that torch's mode clones."""

    __slots__ = ("_handle",)

    def __init__(self, handle: KeptTensor | SavedView | WrappedTensor) -> None:
        self._handle = handle

    def clone(self) -> Tensor | None:
        """Returns a copy of the saved tensor; ``None`` if it was modified before, unseen by the mode."""
        with contextlib.suppress(SavedTensorModifiedError):
            return unpack(self._handle).clone()
        return None
