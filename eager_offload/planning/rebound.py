"""Has the functions of a copied model reach the copy, and not the model.

[Note: functions]
``copy.deepcopy`` copies no function. A hook that closes over its model, or over a list or an object that has it, would
fill the features of the user's model from the copy, where nobody looks for them. So each function that a copy has, and
the loss, is copied with cells of its own, which two functions share where their originals do. What was copied has its
copy there; containers are copied too, so that what a hook notes, the loss finds and the user does not. The same holds
for the globals of a function, but only where they name what was copied. Keys of dictionaries are bound as values are,
and the ``id`` of a module or a parameter is its copy's, since hooks look up by both which module has called them.
"""

from __future__ import annotations

import copy
import random
import sys
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Iterable, Iterator
from contextlib import suppress
from functools import partial
from types import CellType, CodeType, FunctionType, MethodType, SimpleNamespace
from typing import Any
from weakref import WeakKeyDictionary, WeakSet, WeakValueDictionary

from torch import nn

from eager_offload.planning.numbers import CACHE, apart, is_library

_WEAK = (WeakKeyDictionary, WeakValueDictionary)
_CONTAINERS = (list, deque, set, WeakSet, dict, OrderedDict, defaultdict, Counter, *_WEAK)
#: Elements of a container that is copied.
_MOST = 100_000


class Rebound:
    """Binds what ``copy.deepcopy`` has made, as ``memo`` tells by the identity of the original."""

    def __init__(self, memo: dict[int, Any]) -> None:
        self._memo = memo
        self._ids = {key: id(one) for key, one in memo.items() if isinstance(one, nn.Module | nn.Parameter)}
        self._copies = {id(one): one for key, one in memo.items() if key not in (id(memo), id(one))}
        #: Cells and globals, each with its copy.
        self._cells: dict[int, tuple[CellType, CellType]] = {}
        self._spaces: dict[int, tuple[dict[str, Any], dict[str, Any]]] = {}
        self._originals: list[object] = []  # no identity is used twice
        for one in [*self._copies.values()]:
            self._bind(one)

    def of(self, one: Any) -> Any:
        """Returns ``one`` with copies in the place of what was copied; itself where there is nothing to replace."""
        if id(one) in self._memo:
            return self._memo[id(one)]
        kind = type(one)
        if kind in (int, str):
            return self._ids.get(one, one)
        if isinstance(one, tuple | frozenset):
            parts = [self.of(part) for part in one]
            if all(part is other for part, other in zip(parts, one, strict=True)):
                return one
            return kind._make(parts) if hasattr(kind, "_make") else kind(parts)
        if isinstance(one, MethodType):
            return MethodType(self.of(one.__func__), self.of(one.__self__))
        if id(one) in self._copies:
            return one
        if isinstance(one, FunctionType):
            return self._function(one) if self._is_copied(one, set()) else one
        if kind is partial or (kind in _CONTAINERS and len(one) <= _MOST) or self._is_owner(one):
            made: Any = one
            with suppress(Exception):  # an object that cannot be copied stays the user's
                made = one.copy() if kind is WeakSet else copy.copy(one)  # which has a weak set share what is in it
                self._know(one, made)
                self._bind(made)
            return made
        if isinstance(one, CACHE):
            return self._know(one, apart(one, self.of(one.__wrapped__)))
        return self._know(one, copy.deepcopy(one)) if _draws(one) else one

    def _know(self, one: object, made: Any) -> Any:
        self._memo[id(one)] = self._copies[id(made)] = made
        self._originals.append(one)
        return made

    def _bind(self, one: Any) -> None:
        """Replaces what a copy holds."""
        if isinstance(one, partial):
            one.__setstate__((self.of(one.func), self.of(one.args), {**self.of(one.keywords)}, vars(one)))  # type: ignore[attr-defined]  # in no stub
        elif isinstance(one, list | deque):
            _replace(one, enumerate([*one]), self.of)
        elif isinstance(one, set | WeakSet) and any(self.of(part) is not part for part in one):
            parts = [self.of(part) for part in one]
            one.clear()
            one.update(parts)
        if isinstance(one, dict | WeakKeyDictionary | WeakValueDictionary):
            items = _items(one)
            if any(self.of(key) is not key for key, _ in items):
                items = [(self.of(key), value) for key, value in items]  # all again, in their order
                one.clear()
                for key, value in items:
                    one[key] = value
            _replace(one, items, self.of)
        elif isinstance(one, nn.Module) or _is_users(type(one)):
            _replace(_dict_of(one), [*_dict_of(one).items()], self.of)

    def _is_owner(self, one: object) -> bool:
        """Whether an attribute of an object is what was copied, or a list or the like with it."""
        return _is_users(type(one)) and any(map(self._has, [*_dict_of(one).values()]))

    def _has(self, one: Any, levels: int = 2) -> bool:
        """Whether it has a copy, or is a list or the like with what has, so many levels down."""
        if id(one) in self._memo or (type(one) is int and one in self._ids):
            return True
        if not levels or not isinstance(one, (*_CONTAINERS, tuple, frozenset)) or len(one) > _MOST:
            return False
        parts = [part for item in _items(one) for part in item] if isinstance(one, (dict, *_WEAK)) else [*one]
        return any(self._has(part, levels - 1) for part in parts)

    def _function(self, one: FunctionType) -> FunctionType:
        cells, space = one.__closure__ or (), one.__globals__
        names = [name for name, value in _named(one) if self._is_named(value, set())]
        if names:
            _, space = self._spaces.setdefault(id(space), (space, {**space}))
        known = [self._cells.setdefault(id(cell), (cell, CellType())) for cell in cells]
        made = FunctionType(one.__code__, space, one.__name__, None, tuple([cell for _, cell in known]))
        self._know(one, made)
        for name in names:
            if space[name] is one.__globals__[name]:
                space[name] = self.of(space[name])
        for cell, own in known:
            if not [*_contents([own])]:  # or another function has filled it
                for content in _contents([cell]):
                    own.cell_contents = content  # while this is bound, it may be asked for
                    own.cell_contents = self.of(content)
        made.__defaults__, made.__kwdefaults__ = self.of(one.__defaults__), self.of(one.__kwdefaults__)
        made.__qualname__, made.__module__ = one.__qualname__, one.__module__
        vars(made).update(vars(one))
        return made

    def _is_named(self, value: object, seen: set[int]) -> bool:
        """Whether a global has a copy of its own."""
        is_copied = isinstance(value, FunctionType) and self._is_copied(value, seen)
        return is_copied or _draws(value) or self._has(value)

    def _is_copied(self, one: FunctionType, seen: set[int]) -> bool:
        """Whether a function is: one of the user's with cells, or one that has or names what was copied."""
        if id(one) in seen:
            return False
        seen.add(id(one))
        inside = [*_contents(one.__closure__ or ()), *(one.__defaults__ or ()), *(one.__kwdefaults__ or {}).values()]
        if one.__closure__ and not is_library(one.__module__):
            return True
        return any(self._is_named(value, seen) for value in (*inside, *(value for _, value in _named(one))))


def _contents(cells: Iterable[CellType]) -> Iterator[Any]:
    for cell in cells:
        with suppress(ValueError):  # it is empty
            yield cell.cell_contents


def _is_users(kind: type) -> bool:
    """Whether objects of a class have what a user has put there."""
    return kind is SimpleNamespace or not is_library(kind.__module__)


def _items(one: Any) -> list[tuple[Any, Any]]:
    return [*(dict.items(one) if isinstance(one, dict) else one.items())]


def _replace(container: Any, items: Any, of: Any) -> None:
    for key, value in items:
        if (made := of(value)) is not value:
            container[key] = made


def _named(one: FunctionType) -> Iterator[tuple[str, Any]]:
    """Yields the globals that a function names; those of libraries are of no user's."""
    if not is_library(one.__module__):
        space = one.__globals__
        yield from ((name, space[name]) for name in {*_names_in(one.__code__)} & {*space})


def _names_in(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for one in code.co_consts:
        if isinstance(one, CodeType):
            yield from _names_in(one)


def _dict_of(one: object) -> dict[str, Any]:
    found = object.__getattribute__(one, "__dict__") if type(one).__dictoffset__ else {}
    return found if isinstance(found, dict) else {}


def _draws(one: object) -> bool:
    """Whether it draws random numbers, Python's or numpy's, that can be drawn again."""
    numpy = sys.modules.get("numpy")
    return type(one) is random.Random or (
        numpy is not None and isinstance(one, numpy.random.Generator | numpy.random.RandomState)
    )
