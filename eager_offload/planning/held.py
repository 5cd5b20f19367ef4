"""Finds what holds a tensor of a trace when the trace is over.

[Note: outside of the copy]
A step may put a tensor into whatever its functions reach, such as a list that a hook fills. The tensor has no numbers,
so it must not stay there unnoticed; and what is the user's is not the library's to change.
"""

from __future__ import annotations

import gc
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from types import CellType, FrameType, FunctionType, ModuleType, TracebackType
from typing import Any
from weakref import ref

from torch import Tensor, nn

from eager_offload.errors import PlanError
from eager_offload.planning.blocks import Blocks
from eager_offload.planning.numbers import CACHE
from eager_offload.torch_private.calls import without_torch_function

#: Holders whose own holders are looked for, so many levels.
_FOLLOWED, _LEVELS = (tuple, list, set, frozenset, CellType, FunctionType), 4
#: A dictionary of which nobody tells whose it is.
_A_DICT = "a dict"


class Made:
    """What a trace was given and has made, held weakly: storages of tensors, and copies of modules."""

    def __init__(self) -> None:
        self.blocks, self.modules = Blocks(), list[ref[nn.Module]]()

    def is_alive(self) -> bool:
        return self.blocks.are_alive() or any(weak() is not None for weak in self.modules)


@contextmanager
def nothing_held(made: Made) -> Iterator[None]:
    """Looks afterwards for what holds any of what the ``with`` has ``made``, which nothing of the caller's may hold.

    Raises:
        PlanError: something does. An error of the ``with`` itself has a note in its place.
    """
    seen = [sys.exception()]
    try:
        yield
    except BaseException as error:
        found: BaseException | None = error
        while found is not None and found not in seen:  # their frames would hold tensors as long as the errors live
            seen.append(found)
            traceback.clear_frames(found.__traceback__)
            found = found.__cause__ or found.__context__
        if names := _holders(made):
            error.add_note(f"eager_offload: {_said(names)}")
        raise
    names = _holders(made)
    if made.is_alive():
        raise PlanError(_said(names or ["something that Python cannot see"]))


def _said(names: list[str]) -> str:
    return (
        f"a tensor of the plan's trace is held by {', '.join(names)}, where it has no numbers: plan in a process of "
        "its own, by python -m eager_offload plan, or have the model keep it in an attribute, which its copy has"
    )


def _holders(made: Made) -> list[str]:
    """Names what holds tensors of the trace."""
    if not made.is_alive():
        return []
    is_frozen = gc.get_freeze_count() > 0
    try:
        gc.unfreeze()  # what is frozen is neither collected nor seen
        gc.collect()
        with without_torch_function():  # tensors of all kinds of classes are among what is looked at
            return _found(made) if made.is_alive() else []
    finally:
        if is_frozen:
            gc.freeze()


def _found(made: Made) -> list[str]:
    targets: list[Any] = [one for weak in made.modules if (one := weak()) is not None]
    own = {id(part) for one in targets for part in (one, vars(one), *vars(one).values())}
    targets += [one for one in gc.get_objects() if issubclass(type(one), Tensor) and made.blocks.has(one)]
    names, last = dict[str, None](), list[Any]()
    for _ in range(_LEVELS + 1):
        own |= {id(targets), id(last)}
        found = [one for one in gc.get_referrers(*targets) if id(one) not in own]
        ids, last = {*map(id, targets)}, [one for one in found if isinstance(one, _FOLLOWED)] or last
        others = (one for one in found if not isinstance(one, (*_FOLLOWED, FrameType, TracebackType)))
        names |= dict.fromkeys(_named(one, ids) for one in others)
        if last is targets:
            break
        targets, own = last, {*own, id(found)}
    # A function that nothing else holds is that of a frame, such as a comprehension's.
    return [*names] or [*dict.fromkeys(f"a {type(one).__name__}" for one in last if type(one) is not FunctionType)]


def _named(holder: Any, ids: set[int], levels: int = 2) -> str:
    """Names what holds objects with those ids, and where; of a dictionary, whose it is, so many levels up."""
    if not isinstance(holder, dict):
        return f"a {type(holder).__name__}"
    keys = ", ".join(repr(key) for key, one in [*dict.items(holder)] if id(one) in ids and type(key) is str)
    keys = keys or "a value"
    owners = gc.get_referrers(holder)
    for owner in owners:
        if isinstance(owner, type | ModuleType | CACHE):
            return (
                f"{keys} of {owner.__module__ if isinstance(owner, CACHE) else type(owner).__name__} {owner.__name__}"
            )
        if type(owner).__dictoffset__ and object.__getattribute__(owner, "__dict__") is holder:
            return f"{keys} of a {type(owner).__name__}"
    for owner in owners if levels else ():
        found = ""
        if isinstance(owner, dict):
            found = _named(owner, {id(holder)}, levels - 1)
        elif isinstance(owner, CellType):
            found = _variable(owner)
        if found and not found.endswith(_A_DICT):
            return f"{keys} of {found}"
    return f"{keys} of {_A_DICT}"


def _variable(cell: CellType) -> str:
    """Names the variable that functions close over by ``cell``."""
    for closure in gc.get_referrers(cell):
        for function in gc.get_referrers(closure) if type(closure) is tuple else ():
            cells = function.__closure__ if isinstance(function, FunctionType) else None
            if cells is not None and cells is closure:
                names = (name for name, one in zip(function.__code__.co_freevars, cells, strict=True) if one is cell)
                return f"{next(names)!r} of function {function.__qualname__}"
    return ""
