"""What owns a tensor that autograd was given: what makes a gradient a tensor of its own, or an alias of what was saved.

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
from functools import partial
from typing import Protocol

from torch import Tensor

from eager_offload._torch import after_backward, asker_may_return_it, current_backward, with_other_owners
from eager_offload.errors import reentered
from eager_offload.tiers.forking import ForkSafeLock


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
            _let_go(earlier, dropped, over=False)
        if backward not in _owners:
            after_backward(partial(_end, backward))
        owner.given = (*owner.given, tensor)
        _owners.setdefault(backward, []).append(weakref.ref(owner))


def _end(backward: int) -> None:
    dropped: list[Tensor] = []
    with _lock.lock:
        _let_go(backward, dropped, over=True)


def _let_go(backward: int, dropped: list[Tensor], *, over: bool) -> None:
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
