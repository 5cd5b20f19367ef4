"""What Python knows of a saved tensor: which object it is, of what type, with which attributes.

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
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from eager_offload._torch import attributes_of, made_a


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
