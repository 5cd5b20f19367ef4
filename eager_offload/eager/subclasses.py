"""Wrapper subclasses: a saved tensor without bytes of its own, made of plain tensors that have them.

[Note: the tensors inside]
Autograd passes the wrapper (e.g. a ``DTensor`` or a quantized tensor) to the pack hook. Its handle holds the wrapper's
``detach()``, which keeps all other parts (mesh, placements, scales), shares the version counter and is in no cycle. The
plain tensors inside are new objects over the same bytes, so their ``.data`` is emptied once each has a handle like any
plain saved tensor. Unpack fills them from their handles, calls ``detach()`` again, and empties them.

    saved wrapper ---- detach() ---> held by the handle ---- detach() ---> returned to backward
         | inside                         | inside
    plain tensor ----- pack -----> handle: empty, except during unpack

Wrappers are rebuilt by ``detach()`` alone. Inner tensors that it passes through unchanged (e.g. a scale, or the offsets
of a ragged batch) also belong to the saved wrapper, so they are kept, for the reason ``layout``.

[Note: versions of a wrapper]
Operators on the wrapper change the wrapper's version counter, which unpack compares, as autograd does. The counters of
inner tensors change only if a program modifies them directly (``local.add_()``). Autograd would not notice; here it
raises.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from eager_offload.core.selection import inner_values, plain_tensors
from eager_offload.eager.handles import KeptTensor, SavedView, modified
from eager_offload.eager.originals import original_wrapper, own_until_taken
from eager_offload.errors import reentered
from eager_offload.stats import Accounts, KeepReason
from eager_offload.tiers.forking import reentrant_lock
from eager_offload.torch_private.calls import without_torch_function
from eager_offload.torch_private.fsdp import finish_collective
from eager_offload.torch_private.memory import detached, is_fake, is_wrapper, unseen_version, version_of


class _Part(NamedTuple):
    """A plain tensor inside the wrapper that a handle holds, and the handle of its bytes."""

    tensor: Tensor
    handle: SavedView

    def empty(self) -> None:
        self.tensor.data = torch.empty(0, dtype=self.tensor.dtype, device=self.tensor.device)


class WrappedTensor:
    """The handle of a wrapper, made of the handles of the tensors inside it."""

    __slots__ = ("_lock", "_original", "_parts", "_version", "_wrapper")

    def __init__(self, original: Tensor, wrapper: Tensor, parts: list[_Part]) -> None:
        #: The saved wrapper; ``None`` if autograd would return an alias.
        self._original = None if original.requires_grad else original_wrapper(original, inner_values(original))
        self._wrapper = wrapper
        self._parts = parts
        self._version = unseen_version(wrapper)
        self._lock = reentrant_lock()

    def views(self) -> list[SavedView]:
        return [part.handle for part in self._parts]

    def unpack(self) -> Tensor:
        wrapper = self._wrapper
        if self._lock._is_owned():  # see [Note: reentry] in tiers/forking.py
            raise reentered()
        if unseen_version(wrapper) != self._version:
            raise modified(wrapper, wrapper.size(), self._version)
        returned = [part.handle.unpack() for part in self._parts]  # outside of the lock: these may wait
        if self._original is not None and (original := self._original()) is not None:
            return original
        with self._lock, without_torch_function():  # one graph may be run backward by two threads
            try:
                for part, tensor in zip(self._parts, returned, strict=True):
                    part.tensor.data = tensor
                made = detached(wrapper)
            finally:
                for part in self._parts:
                    part.empty()
        if self._original is not None:
            self._original.complete(made)
            own_until_taken(self._parts[0].handle.storage, made)  # other handles of the same wrapper share it
        return made


def pack_wrapper(
    wrapper: Tensor, pack: Callable[[Tensor], object], accounts: Accounts
) -> WrappedTensor | KeptTensor | None:
    """Packs the tensors inside a wrapper and returns its handle; ``None``, without any count, to keep the wrapper."""
    if not is_wrapper(wrapper) or any(is_fake(type(inner)) for inner in plain_tensors(wrapper)):
        return None  # compilers make views of fake tensors outside of every mode
    _finish_collectives(wrapper)
    held = detached(wrapper)
    if type(held) is not type(wrapper):
        return None
    pairs = list(zip(plain_tensors(wrapper), plain_tensors(held), strict=True))
    if all(theirs is ours for theirs, ours in pairs):
        return None
    parts = []
    for theirs, ours in pairs:
        if theirs is ours:
            with accounts.lock:
                accounts.counters.kept(KeepReason.LAYOUT, theirs.numel() * theirs.element_size())
        elif isinstance(handle := pack(theirs), SavedView):
            parts.append(_Part(ours, handle))
            parts[-1].empty()
    if not parts:
        return KeptTensor(wrapper if wrapper.is_leaf else held, version_of(wrapper), KeepReason.LAYOUT)
    return WrappedTensor(wrapper, held, parts)


def _finish_collectives(wrapper: Tensor) -> None:
    """Waits for collectives that fill ``wrapper``: the operator that saves it is about to read it anyway."""
    finish_collective(wrapper)
    for inner in inner_values(wrapper):
        if is_wrapper(inner):
            _finish_collectives(inner)
