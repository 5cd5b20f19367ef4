"""What Python knows of a saved tensor, and what owns the one that backward is given.

[Note: attributes of saved tensors]
Of a saved tensor that requires grad autograd makes an alias, a plain tensor, whatever a hook returns for it. Any other
reaches backward, a custom function or a checkpoint that recomputes, as the unpack hook returns it. Without hooks that
is the tensor that was saved. So:

    it lives              it is given out
    it has gone           what is given out has its type, and its very ``__dict__``: what was set on the tensor after it
                          was saved is there, and what is set on what was given out is there at the next unpack

A handle holds the dictionary, as a saved variable without hooks holds the tensor that has it. What a program puts there
lives as long as it does without offload; an attribute that leads to a result of the same graph keeps that graph, as it
does there, until backward or the program releases what the graph has saved.

A subclass without a ``__torch_dispatch__`` has memory like any tensor, so its tensors are taken and rebuilt as plain
ones: none of its own code runs, no ``__init__``, no ``__torch_function__``, no ``__setattr__``. A wrapper is made anew
by its own ``detach()`` (see ``subclasses.py``), and is given what that has left out.

[Note: gradients that are saved tensors]
The backward of a custom function may return a saved tensor as a gradient, and so may a hook that reads one from a node
(``node._saved_self``). Autograd then takes it for ``.grad`` as it is, or adds other gradients into it, if nothing else
owns the tensor; else it makes a clone. Without hooks the saved variable owns what it gives out, until the engine
releases the node's saved variables, which it does before it passes the gradients on, unless the graph is retained. A
tensor that an unpack hook makes has no such owner, and what autograd took would be memory that the next unpack, or
another handle of the same storage, still gives out. So:

    the saved tensor itself lives      it is given out, and is owned by the one that keeps it alive
    anything else                      its handle owns it too, as a saved variable does

The second kind would stay in memory for as long as a graph is retained. So only what custom functions and hooks asked
for is owned, since torch's own formulas never return a saved tensor, and only until it has no other owner any more.

A saved tensor that requires grad is out of reach: of what any hook returns for one, autograd makes an alias.
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
        """Returns ``tensor``, a plain one with the bytes of the original, as the original was."""
        if self.kind is Tensor:
            tensor.__dict__ = self.attributes
            return tensor
        made = made_a(self.kind, tensor)
        object.__setattr__(made, "__dict__", self.attributes)
        for name, value in self.slots.items():
            object.__setattr__(made, name, value)
        return made

    def complete(self, wrapper: Tensor) -> None:
        """Gives ``wrapper``, a ``detach()`` of the original, the attributes that it lacks."""
        for name, value in self.attributes.items():
            attributes_of(wrapper).setdefault(name, value)


def original_of(tensor: Tensor) -> Original:
    """Returns what is to be known of a tensor that has memory of its own."""
    original = Original(tensor)
    original.kind = kind = type(tensor)
    if kind is Tensor:
        original.attributes = tensor.__dict__
    else:
        original.attributes, state = attributes_of(tensor), object.__getstate__(tensor)
        original.slots = state[1] if isinstance(state, tuple) else {}
    return original


def original_wrapper(wrapper: Tensor, inside: Sequence[object]) -> Original:
    """Returns what is to be known of a wrapper of ``inside``: the bytes of that are to leave, so it is not held."""
    original, parts = Original(wrapper, _let_go), set(map(id, inside))
    original.attributes = attributes = attributes_of(wrapper)
    original.inside = [name for name, value in attributes.items() if id(value) in parts]
    return original


def _let_go(original: weakref.ref[Tensor]) -> None:
    """A wrapper has gone: what is inside it goes too, and its other attributes stay. Runs as a finalizer does."""
    assert isinstance(original, Original)
    for name in original.inside:
        original.attributes.pop(name, None)


class StorageOwner(Protocol):
    """What the handles of one storage share."""

    #: What it has given out and owns.
    given: tuple[Tensor, ...]


#: Those that own something, by the backward that it was given to.
_owners: dict[int, list[weakref.ref[StorageOwner]]] = {}
_lock = ForkSafeLock()


def own_until_taken(owner: StorageOwner, tensor: Tensor) -> None:
    """Makes ``owner`` one of the owners of ``tensor``, if the node that asks for it may return it as a gradient."""
    if not asker_may_return_it():
        return
    if _lock.is_held():
        raise reentered()
    backward = current_backward()
    dropped: list[Tensor] = []  # outlives the lock: what is told of a tensor's end may come back here
    with _lock.lock:
        for earlier in list(_owners):  # that of a backward that failed has no end
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
    """Ends the ownership of what a backward was given, but for what may become a gradient as long as it is not over."""
    remaining = []
    for ref in _owners.pop(backward, ()):
        if (owner := ref()) is not None and owner.given:
            stays = () if over else with_other_owners(owner.given)
            dropped += owner.given
            owner.given = stays
            remaining += [ref] if stays else []
    if remaining:
        _owners[backward] = remaining
