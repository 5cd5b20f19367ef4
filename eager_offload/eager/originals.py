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
    """A weak reference to a saved tensor that does not require grad, and its type and attributes.

    Args:
        inside: the values of a wrapper, whose bytes are to leave. As attributes they go with the wrapper.
    """

    __slots__ = ("_attributes", "_inside", "_kind", "_slots")

    def __new__(cls, tensor: Tensor, inside: Sequence[object] = ()) -> Original:
        return super().__new__(cls, tensor, _let_go if inside else None)

    def __init__(self, tensor: Tensor, inside: Sequence[object] = ()) -> None:
        self._attributes, self._kind = attributes_of(tensor), type(tensor)
        parts = set(map(id, inside))
        self._inside = [name for name, value in self._attributes.items() if id(value) in parts] if parts else ()
        self._slots: dict[str, Any] = {} if self._kind is Tensor else _slots_of(tensor)

    def like(self, tensor: Tensor) -> Tensor:
        """Returns ``tensor``, a plain one with the bytes of the original, as the original was."""
        made = tensor if self._kind is Tensor else made_a(self._kind, tensor)
        object.__setattr__(made, "__dict__", self._attributes)
        for name, value in self._slots.items():
            object.__setattr__(made, name, value)
        return made

    def complete(self, wrapper: Tensor) -> None:
        """Gives ``wrapper``, a ``detach()`` of the original, the attributes that it lacks."""
        for name, value in self._attributes.items():
            attributes_of(wrapper).setdefault(name, value)


def _let_go(original: Original) -> None:
    """A wrapper has gone: what is inside of it does too, and its other attributes stay. Runs as a finalizer does."""
    for name in original._inside:
        original._attributes.pop(name, None)


def _slots_of(tensor: Tensor) -> dict[str, Any]:
    """The values of those attributes of a subclass that its ``__slots__`` name."""
    state = object.__getstate__(tensor)
    return state[1] if isinstance(state, tuple) else {}
