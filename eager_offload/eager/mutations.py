"""Inside of ``torch.autograd.graph.allow_mutation_on_saved_tensors``: what changes after it was saved is cloned first.

torch's context has hooks and a dispatch mode. The hooks, which ours hide, note what is saved. Before an operator
changes a tensor, the mode clones what was saved of it, by address and version. What our hooks save is noted likewise:

    context.original[handle] = something to clone        the mode calls its `clone`, and then forgets it
    context.cloned[handle]   = the clone                 what the handle gives out from then on

torch keeps what was saved alive as long as nothing changes it. Here it leaves like anything else, so an address may
have a new owner of the same version. If that changes, what has left is cloned for nothing.
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
    """The handle of a saved tensor that may be changed, around the handle of its bytes."""

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
        """The handles of what was taken."""
        if isinstance(self._handle, KeptTensor):
            return ()
        return [self._handle] if isinstance(self._handle, SavedView) else self._handle.views()

    def unpack(self) -> Tensor:
        clone: Tensor | None = self._context.cloned.get(self)
        return self._handle.unpack() if clone is None else clone


class _BeforeChange:
    """What torch's mode clones."""

    __slots__ = ("_handle",)

    def __init__(self, handle: KeptTensor | SavedView | WrappedTensor) -> None:
        self._handle = handle

    def clone(self) -> Tensor | None:
        """The saved tensor, in memory of its own; ``None`` if it was changed already where the mode did not see it."""
        with contextlib.suppress(SavedTensorModifiedError):
            return unpack(self._handle).clone()
        return None
