"""Type, attributes and ownership of unpacked tensors.

[Note: attributes of saved tensors]
For a saved tensor that requires grad autograd makes a plain alias of the tensor that the unpack hook returns. For any
other, backward, a custom function or a recomputing checkpoint receives the hook's tensor itself. Without hooks that is
the tensor that was saved. So unpack returns:

    the saved tensor, if it is alive
    else a tensor of its type with its very ``__dict__``, so that attributes set before or after unpack are on both

The handle holds the dictionary, as a saved variable without hooks holds the tensor. Attributes live as long as without
offload: e.g. one that leads to a result of the same graph keeps the graph until its saved tensors are released.

A subclass without ``__torch_dispatch__`` has memory of its own. Its tensors are saved and rebuilt as plain tensors, and
none of its code runs: no ``__init__``, ``__torch_function__`` or ``__setattr__``. A wrapper is rebuilt by its own
``detach()`` (see ``subclasses.py``), and missing attributes are added.

[Note: gradients that are saved tensors]
A custom function's backward may return a saved tensor as a gradient, and so may a hook that reads ``node._saved_self``.
Autograd uses a gradient as ``.grad`` itself, or adds other gradients into it in place, if the tensor has no other
owner; otherwise it makes a clone. Without hooks the saved variable is an owner until the engine releases the node's
saved variables, which happens before gradients are passed on, unless the graph is retained. A tensor from an unpack
hook has no such owner, and autograd would write into memory that the next unpack, or another handle of the same
storage, returns. So:

    the saved tensor, if alive      has the owner that keeps it alive
    any other tensor                is owned by its handle, as by a saved variable

The second kind would stay in memory while a graph is retained. So only tensors for custom functions and hooks get an
owner, because torch's own formulas never return saved tensors, and only until no other owner is left.

Saved tensors that require grad need nothing: autograd makes an alias of any hook's result.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from functools import partial
from typing import Any, Protocol

from torch import Tensor

from eager_offload.errors import reentered
from eager_offload.tiers.forking import ForkSafeLock
from eager_offload.torch_private.autograd import after_backward, asker_may_return_it, current_backward
from eager_offload.torch_private.memory import attributes_of, made_a, with_other_owners


class Original(weakref.ref[Tensor]):
    """A weak reference to a saved tensor that does not require grad, and its type and attributes."""

    __slots__ = ("attributes", "inside", "kind", "slots")
    kind: type[Tensor]
    attributes: dict[str, Any]
    #: The values of attributes that its ``__slots__`` name.
    slots: dict[str, Any]
    #: The attributes of a wrapper that are the tensors inside it.
    inside: list[str]

    def like(self, tensor: Tensor) -> Tensor:
        """Returns ``tensor``, a plain tensor with the original's bytes, with its type and attributes."""
        if self.kind is Tensor:
            tensor.__dict__ = self.attributes
            return tensor
        made = made_a(self.kind, tensor)
        object.__setattr__(made, "__dict__", self.attributes)
        for name, value in self.slots.items():
            object.__setattr__(made, name, value)
        return made

    def complete(self, wrapper: Tensor) -> None:
        """Adds the original's attributes that ``wrapper``, a ``detach()`` of it, lacks."""
        for name, value in self.attributes.items():
            attributes_of(wrapper).setdefault(name, value)


def original_of(tensor: Tensor) -> Original:
    """Returns the record of a tensor that has memory of its own."""
    original = Original(tensor)
    original.kind = kind = type(tensor)
    if kind is Tensor:
        original.attributes = tensor.__dict__
    else:
        original.attributes, state = attributes_of(tensor), object.__getstate__(tensor)
        original.slots = state[1] if isinstance(state, tuple) else {}
    return original


def original_wrapper(wrapper: Tensor, inside: Sequence[object]) -> Original:
    """Returns the record of a wrapper, without references to the tensors ``inside``, which are offloaded."""
    original, parts = Original(wrapper, _let_go), set(map(id, inside))
    original.attributes = attributes = attributes_of(wrapper)
    original.inside = [name for name, value in attributes.items() if id(value) in parts]
    return original


def _let_go(original: weakref.ref[Tensor]) -> None:
    """Drops the inner tensors of a dead wrapper and keeps its other attributes. Runs as a finalizer: takes no lock."""
    assert isinstance(original, Original)
    for name in original.inside:
        original.attributes.pop(name, None)


class StorageOwner(Protocol):
    """The object that the handles of one storage share."""

    #: The unpacked tensors that it owns.
    given: tuple[Tensor, ...]


#: The owners of unpacked tensors, by backward.
_owners: dict[int, list[weakref.ref[StorageOwner]]] = {}
_lock = ForkSafeLock()


def own_until_taken(owner: StorageOwner, tensor: Tensor) -> None:
    """Makes ``owner`` an owner of ``tensor``, if the unpacking node may return the tensor as a gradient."""
    if not asker_may_return_it():
        return
    if _lock.is_held():
        raise reentered()
    backward = current_backward()
    dropped: list[Tensor] = []  # freed after the lock is released: a finalizer may call this function
    with _lock.lock:
        for earlier in list(_owners):  # a failed backward has no end
            _disown(earlier, dropped, over=False)
        if backward not in _owners:
            after_backward(partial(_end, backward))
        owner.given = (*owner.given, tensor)
        _owners.setdefault(backward, []).append(weakref.ref(owner))


def _end(backward: int) -> None:
    dropped: list[Tensor] = []
    with _lock.lock:
        _disown(backward, dropped, over=True)


def _disown(backward: int, dropped: list[Tensor], *, over: bool) -> None:
    """Ends the ownership of a backward's tensors; before its end only of those that have no other owner."""
    remaining = []
    for ref in _owners.pop(backward, ()):
        if (owner := ref()) is not None and owner.given:
            stays = () if over else with_other_owners(owner.given)
            dropped += owner.given
            owner.given = stays
            remaining += [ref] if stays else []
    if remaining:
        _owners[backward] = remaining
