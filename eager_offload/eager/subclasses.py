"""Wrapper subclasses: a saved tensor without bytes of its own, made of plain tensors that have them.

[Note: the tensors inside]
Autograd hands the pack hook the wrapper (a ``DTensor``, a quantized tensor), never what is inside. Its handle holds the
wrapper's ``detach()``: autograd's own way to make the same wrapper again, which keeps whatever else belongs to it
(mesh, placements, scales), shares its version counter and is part of no cycle. The plain tensors inside that are new
objects over the same bytes, so their ``.data`` can be emptied once each has a handle like any plain saved tensor. To
unpack, they are filled from those handles for as long as it takes to ``detach()`` once more.

    saved wrapper ---- detach() ---> held by the handle ---- detach() ---> what backward is given
         | inside                         | inside
    plain tensor ----- pack -----> handle: emptied, but for that moment

No wrapper is ever built from its parts, so none can be built wrongly. A tensor inside that ``detach()`` hands on as it
is (a scale, the offsets of a ragged batch) is the saved wrapper's as well: it stays, for the reason ``layout``.

[Note: versions of a wrapper]
Operators on the wrapper count on the wrapper's own version counter, and that is compared at unpack, as autograd does.
The counters of the tensors inside grow only when somebody reaches inside (``local.add_()``). Autograd does not see that
and would go on with other values than were saved; here it raises.

[Note: sharing what is inside]
The tensors inside never require grad and do not know the wrapper's version, so a lane cannot tell that what it has
copied is still what they hold. The wrapper can: one that requires grad was final at its pack, so a save of the same
bytes through a view of the same wrapper, at the same version, means what the earlier one meant.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Hashable
from typing import Protocol

import torch
from torch import Tensor

from eager_offload._torch import detached, finish_collective, is_wrapper
from eager_offload.eager.handles import KeptTensor, SavedView, modified
from eager_offload.selection import plain_tensors, root_of
from eager_offload.stats import Accounts, KeepReason

__all__ = ["Packer", "WrappedTensor", "Wrappers"]


class Packer(Protocol):
    """What a wrapper needs of the hooks, for the tensors inside it. Both methods count."""

    def pack(self, tensor: Tensor) -> KeptTensor | SavedView | WrappedTensor:
        """The handle of a saved tensor."""

    def again(self, view: SavedView, tensor: Tensor) -> SavedView | None:
        """One more save of the final bytes that ``view`` has; ``None`` where it is not to leave."""


class _Part:
    """A plain tensor inside the wrapper that a handle holds, and the handle of its bytes."""

    __slots__ = ("__weakref__", "handle", "root", "tensor", "version")

    def __init__(self, tensor: Tensor, handle: SavedView, wrapper: Tensor) -> None:
        self.tensor = tensor
        self.handle = handle
        #: The wrapper that the saved one is a view of, and its version then.
        self.root = weakref.ref(root_of(wrapper))
        self.version = wrapper._version

    def fill(self, tensor: Tensor) -> None:
        self.tensor.data = tensor

    def empty(self) -> None:
        self.tensor.data = torch.empty(0, dtype=self.tensor.dtype, device=self.tensor.device)

    def has_bytes_of(self, tensor: Tensor, wrapper: Tensor) -> bool:
        """Whether ``tensor``, inside ``wrapper``, still has the bytes that were saved here."""
        return (
            self.handle.storage.origin() is tensor.untyped_storage()
            and self.root() is root_of(wrapper)
            and self.version == wrapper._version
        )


class WrappedTensor:
    """The handle of a wrapper, made of the handles of the tensors inside it."""

    __slots__ = ("_lock", "_parts", "_version", "_wrapper")

    def __init__(self, wrapper: Tensor, parts: list[_Part]) -> None:
        self._wrapper = wrapper
        self._parts = parts
        self._version = wrapper._version
        self._lock = threading.Lock()

    def views(self) -> list[SavedView]:
        """The handles of those tensors inside that were taken."""
        return [part.handle for part in self._parts]

    def unpack(self) -> Tensor:
        wrapper = self._wrapper
        if wrapper._version != self._version:
            raise modified(wrapper, wrapper.size(), self._version)
        returned = [part.handle.unpack() for part in self._parts]  # these may wait, so not under the lock
        with self._lock:  # one graph may be run backward by two threads
            try:
                for part, tensor in zip(self._parts, returned, strict=True):
                    part.fill(tensor)
                return detached(wrapper)
            finally:
                for part in self._parts:
                    part.empty()


class Wrappers:
    """Packs the wrappers that one ``Offload`` sees."""

    def __init__(self, accounts: Accounts) -> None:
        self._accounts = accounts
        #: The latest save of each plain tensor inside wrappers that were final when they were saved.
        self._latest: weakref.WeakValueDictionary[Hashable, _Part] = weakref.WeakValueDictionary()

    def pack(self, wrapper: Tensor, packer: Packer) -> WrappedTensor | None:
        """The handle of a wrapper, with all that is inside counted; ``None``, and nothing counted, if it stays."""
        if not is_wrapper(wrapper):
            return None
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
                with self._accounts.lock:
                    self._accounts.tally.kept(KeepReason.LAYOUT, theirs.numel() * theirs.element_size())
            elif (handle := self._handle(theirs, wrapper, packer)) is not None:
                part = _Part(ours, handle, wrapper)
                part.empty()
                parts.append(part)
                if wrapper.requires_grad:
                    self._latest[_name(theirs)] = part
        return WrappedTensor(held, parts)

    def _handle(self, tensor: Tensor, wrapper: Tensor, packer: Packer) -> SavedView | None:
        """The handle of a tensor inside ``wrapper``; ``None`` where it stays."""
        if tensor.layout is torch.strided and not tensor.is_nested:
            latest = self._latest.get(_name(tensor))
            if latest is not None and latest.has_bytes_of(tensor, wrapper):
                handle = packer.again(latest.handle, tensor)
                if handle is not None:
                    return handle
        packed = packer.pack(tensor)
        return packed if isinstance(packed, SavedView) else None


def _finish_collectives(wrapper: Tensor) -> None:
    """Somebody reads ``wrapper`` now, or it would not be saved: what still fills it is waited for a moment early."""
    finish_collective(wrapper)
    names, _ = wrapper.__tensor_flatten__()  # type: ignore[attr-defined]
    for inner in (getattr(wrapper, name) for name in names):
        if is_wrapper(inner):
            _finish_collectives(inner)


def _name(tensor: Tensor) -> Hashable:
    return (
        tensor.untyped_storage()._cdata,
        tensor.storage_offset(),
        tensor.size(),
        tensor.stride(),
        tensor.dtype,
        tensor.is_conj(),
        tensor.is_neg(),
    )
