"""What the Python code of a step reaches outside of what is planned: noted before, and put back afterwards.

[Note: outside of the copy]
``copy.deepcopy`` copies a model with all that it has, but no function: what a hook, a loss or a method reaches through
a closure, a global, a default or an attribute of a class is the user's own in the copy too. Tensors there have
stand-ins (stand_ins.py). A step may also put tensors of its own there: into a cache, a list that a hook fills. So

1. before the step the containers are noted that the functions of the model and of the loss name, and those in these;
2. afterwards they are what they were, and a ``functools.lru_cache`` that has taken hold of a tensor is empty;
3. if any tensor of the step is alive then, whoever holds it is looked for among all objects of the process. It is taken
   out there, and ``PlanError`` names the place: what was there before nobody has noted.

Nobody knows which thread has changed a container: other threads should leave these alone meanwhile, and two plans are
never made at once. Step 2 is here, step 3 in leftovers.py.
"""

from __future__ import annotations

import functools
import random
import sys
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import cached_property, partial
from operator import is_
from types import (
    BuiltinFunctionType,
    CellType,
    CodeType,
    FrameType,
    FunctionType,
    MemberDescriptorType,
    MethodType,
    ModuleType,
)
from typing import Any

import torch
from torch import Tensor, nn

from eager_offload._torch import hooks_of, hooks_of_all_modules, tree_iter
from eager_offload.errors import PlanError

Cache: Any = type(functools.lru_cache(lambda: None))
#: They hold nothing that a step could change.
_ATOMS = (
    str,
    bytes,
    int,
    float,
    complex,
    type(None),
    BuiltinFunctionType,
    CodeType,
    ModuleType,
    FrameType,
    torch.dtype,
)
#: Packages whose functions name nothing of the user's.
_LIBRARIES = frozenset({*sys.stdlib_module_names, "torch", "numpy", "eager_offload"})
#: Modules of the standard library whose objects are containers.
_CONTAINERS = {"builtins", "collections", "types", "functools", "weakref", "_thread"}
#: Packages whose objects are not looked into.
_CLOSED = sys.stdlib_module_names - _CONTAINERS | {"eager_offload"}
_SEQUENCES: tuple[Any, ...] = (list, deque, set)
#: Objects that are noted at most.
_MOST = 200_000
#: Bytes of an array of numbers that is copied.
_MOST_COPIED = 1 << 20
_NOTHING: Any = object()


class _Slots:
    """What is in the slots of one container before a step: keys, attributes, names or the contents of a cell."""

    def __init__(self, read: Callable[[], dict[Any, Any]], write: Callable[[Any, Any], None]) -> None:
        self._read, self._write = read, write
        self.before = read()

    def put_back(self, is_others: Callable[[object], bool]) -> None:
        """Has the slots as they were, but for those that hold what ``is_others`` says another thread has put there."""
        now = self._read()
        for key in dict.fromkeys((*self.before, *now)):
            old, new = self.before.get(key, _NOTHING), now.get(key, _NOTHING)
            if old is not new and not is_others(new):
                self._write(key, old)

    def values(self) -> list[Any]:
        """What was there before the step."""
        return [*self.before.values()]

    def take_out(self, ids: set[int]) -> list[Any]:
        """Empties the slots that hold objects with those ids; returns which those are."""
        found = [key for key, one in self._read().items() if id(one) in ids]
        for key in found:
            self._write(key, _NOTHING)
        return found


class _Elements:
    """What is in a list, a deque or a set before a step."""

    def __init__(self, kind: Any, container: Any) -> None:
        # By the methods of the kind itself, in whose place a subclass may have others.
        self._kind, self._container, self._before = kind, container, [*kind.__iter__(container)]

    def put_back(self, is_others: Callable[[object], bool]) -> None:
        """Has the elements as they were, and behind them those that ``is_others`` says another thread has put there."""
        kind, container, before = self._kind, self._container, self._before
        now = [*kind.__iter__(container)]
        if len(now) == len(before) and all(map(is_, now, before)):
            return
        known = {id(one) for one in before}
        self._fill([*before, *[one for one in now if id(one) not in known and is_others(one)]])

    def values(self) -> list[Any]:
        """What was there before the step."""
        return self._before

    def take_out(self, ids: set[int]) -> list[Any]:
        """Takes the objects with those ids out; they have no names."""
        self._fill([one for one in self._kind.__iter__(self._container) if id(one) not in ids])
        return []

    def _fill(self, elements: list[Any]) -> None:
        kind, container = self._kind, self._container
        kind.clear(container)
        (kind.update if kind is set else kind.extend)(container, elements)


class _State:
    """What a generator of random numbers would draw next, or an array of numpy's holds."""

    def __init__(self, read: Callable[[], Any], write: Callable[[Any], object]) -> None:
        self._write, self._before = write, read()

    def put_back(self, _: object) -> None:
        """Has it as it was."""
        self._write(self._before)


def _state_of(one: Any) -> _State | None:
    """The state of a generator of random numbers, torch's, Python's or numpy's, or of a small array; ``None`` for
    anything else."""
    if isinstance(one, torch.Generator):
        return _State(one.get_state, one.set_state)
    if isinstance(one, random.Random):
        return _State(one.getstate, one.setstate)
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(one, numpy.random.RandomState):
        return _State(one.get_state, one.set_state)
    if numpy is not None and isinstance(one, numpy.random.Generator):
        return _State(lambda: one.bit_generator.state, partial(setattr, one.bit_generator, "state"))
    if numpy is not None and isinstance(one, numpy.ndarray) and (one.nbytes <= _MOST_COPIED or one.dtype.hasobject):
        return _State(one.copy, partial(_write_array, one))
    return None


def _write_array(array: Any, before: Any) -> None:
    if array.tobytes() != before.tobytes():
        array[...] = before


class Outside:
    """What is reached from some functions, classes and objects.

    Args:
        roots: from where. Functions, and what they name, are followed; so is what is in objects and containers.
    """

    def __init__(self, roots: list[object]) -> None:
        self.caches: list[Any] = []
        self._places: list[_Slots | _Elements | _State] = []
        self._seen: dict[int, object] = {}
        self._todo = deque(roots)
        #: What functions name; an attribute of a class that nobody names is not followed.
        self._names: set[str] = set()
        self._classes: dict[type, set[str]] = {}
        self._globals: dict[int, tuple[dict[str, Any], set[str]]] = {}
        while self._todo:
            while self._todo and len(self._seen) < _MOST:
                self._follow(self._todo.popleft())
            self._todo = deque(() if len(self._seen) >= _MOST else self._named_of_classes())
        for space, names in self._globals.values():
            self._places.append(_of_dict(space, partial(_named, space, names)))

    def put_back(self, is_others: Callable[[object], bool]) -> None:
        """Has everything as it was, but for what ``is_others`` says another thread has made and put there.

        Raises:
            PlanError: some of it could not be put back; all else was.
        """
        failed: list[Exception] = []
        for place in self._places:
            try:
                place.put_back(lambda one: id(one) not in self._seen and is_others(one))
            except Exception as error:
                failed.append(error.with_traceback(None))  # its frames may hold what the step has made
        if failed:
            raise PlanError(
                f"what the step has changed outside of the model cannot be put back in {len(failed)} places, of which "
                f"the first says {type(failed[0]).__name__}: {failed[0]}. Leave that out while planning"
            ) from failed[0]

    # -- what is reached ----------------------------------------------------------------------------------------------

    def _follow(self, one: Any) -> None:
        if isinstance(one, _ATOMS) or id(one) in self._seen:
            return
        self._seen[id(one)] = one
        if isinstance(one, FunctionType):
            self._follow_function(one)
        elif isinstance(one, MethodType):
            self._todo += [one.__func__, one.__self__]
        elif isinstance(one, staticmethod | classmethod):
            self._todo.append(one.__func__)
        elif isinstance(one, property | cached_property):
            self._todo.append(one.fget if isinstance(one, property) else one.func)
        elif isinstance(one, partial):
            self._todo += [one.func, *one.args, one.keywords]
        elif isinstance(one, Cache):
            self.caches.append(one)
            self._todo.append(one.__wrapped__)
        elif isinstance(one, type):
            self._classes.update((kind, set()) for kind in one.__mro__ if not _is_of_library(kind))
        elif isinstance(one, tuple | frozenset):
            self._todo += one
        else:
            self._follow_object(one)

    def _follow_object(self, one: Any) -> None:
        """A container, or an object with attributes."""
        if (state := _state_of(one)) is not None:
            self._places.append(state)
            return
        kind = type(one)
        is_closed = str(kind.__module__).partition(".")[0] in _CLOSED
        for place in places_of(one, has_attributes=not is_closed):
            self._places.append(place)
            self._todo += place.values()
        if is_closed:
            return
        self._todo.append(kind)
        if isinstance(one, Tensor):
            self._todo += hooks_of(one)

    def _follow_function(self, function: FunctionType) -> None:
        if _is_of_library(function):
            return
        names = {*_names_in(function.__code__)}
        self._names |= names
        space = function.__globals__
        self._globals.setdefault(id(space), (space, set()))[1].update(names)
        for name in names & {*space}:
            found = space[name]
            self._todo.append(found)
            if isinstance(found, ModuleType) and not _is_of_library(found):
                self._globals.setdefault(id(vars(found)), (vars(found), set()))[1].update(names)
                self._todo += [vars(found)[one] for one in names & {*vars(found)}]
        self._todo += [*(function.__closure__ or ()), *(function.__defaults__ or ())]
        self._todo += [function.__kwdefaults__, vars(function)]

    def _named_of_classes(self) -> list[object]:
        """What functions name of classes, and was not followed yet."""
        found: list[object] = []
        for kind, followed in self._classes.items():
            if not followed:
                self._note_class(kind)
            new = (self._names | {"forward", "__call__", "__getattr__"}) & {*vars(kind)} - followed
            followed |= new | {""}
            found += [vars(kind)[name] for name in new]
        return found

    def _note_class(self, kind: type) -> None:
        self._places.append(_Slots(partial(_attributes, kind), partial(_write_slot, kind)))


def places_of(one: Any, *, has_attributes: bool = True) -> Iterator[_Slots | _Elements]:
    """The places of ``one`` itself: keys, elements, the contents of a cell, and where it ``has_attributes``, those."""
    if isinstance(one, CellType):
        yield _of_cell(one)
    if isinstance(one, dict):
        yield _of_dict(one)
    for container in _SEQUENCES:
        if isinstance(one, container):
            yield _Elements(container, one)
    if not has_attributes:
        return
    if isinstance(attributes := attributes_in(one), dict):
        yield _of_dict(attributes)
    if slots := _slots_of(type(one)):
        yield _Slots(partial(_read_slots, one, slots), partial(_write_slot, one))


def _of_dict(container: dict[Any, Any], read: Callable[[], dict[Any, Any]] | None = None) -> _Slots:
    # By the methods of the kind itself, in whose place a subclass may have others.
    kind: Any = OrderedDict if isinstance(container, OrderedDict) else dict

    def write(key: object, value: object) -> None:
        if value is _NOTHING:
            kind.pop(container, key, None)
        else:
            kind.__setitem__(container, key, value)

    return _Slots(partial(_contents, container) if read is None else read, write)


def _of_cell(cell: CellType) -> _Slots:
    def read() -> dict[Any, Any]:
        try:
            return {"": cell.cell_contents}
        except ValueError:  # empty
            return {}

    def write(_: object, value: object) -> None:
        if value is _NOTHING:
            del cell.cell_contents
        else:
            cell.cell_contents = value

    return _Slots(read, write)


def roots_of(model: nn.Module, loss: object) -> list[object]:
    """What runs in a step of a copy: functions of the classes of all that is copied, and those that are no copies."""
    roots = [*hooks_of_all_modules(), *([] if isinstance(loss, nn.Module) else [loss])]
    for part in (model, loss):
        for module in part.modules() if isinstance(part, nn.Module) else ():
            roots.append(type(module))
            for value in vars(module).values():
                for one in value.values() if isinstance(value, dict) else tree_iter(value):
                    roots.append(one if isinstance(one, FunctionType | partial | Cache) else type(one))
    return roots


def _contents(container: dict[Any, Any]) -> dict[Any, Any]:
    """Reads a dictionary past a ``__getitem__`` of its class, which ``dict.copy`` would call."""
    return dict(dict.items(container))


def _named(space: dict[str, Any], names: set[str]) -> dict[str, Any]:
    return {name: space[name] for name in names & {*space}}


def _is_of_library(one: Any) -> bool:
    module = one.__name__ if isinstance(one, ModuleType) else getattr(one, "__module__", None)
    return str(module).partition(".")[0] in _LIBRARIES


def _names_in(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for one in code.co_consts:
        if isinstance(one, CodeType):
            yield from _names_in(one)


def attributes_in(owner: object) -> Any:
    """Returns the dictionary of an object, past what its class has in place of reading; ``None`` where it has none."""
    try:
        return object.__getattribute__(owner, "__dict__")
    except AttributeError:
        return None


def _slots_of(kind: type) -> list[str]:
    """Names of what objects of ``kind`` have in slots, where Python code has said so; as it has mangled them."""
    kinds = [one for one in kind.__mro__ if not _is_of_library(one)]
    return [name for one in kinds for name, slot in vars(one).items() if isinstance(slot, MemberDescriptorType)]


def _read_slots(owner: object, names: list[str]) -> dict[str, Any]:
    """Reads the slots that are not empty, past what the class has in place of reading."""
    found = {}
    for name in names:
        with suppress(AttributeError):
            found[name] = object.__getattribute__(owner, name)
    return found


def _write_slot(owner: object, name: str, value: object) -> None:
    """Writes or empties a slot, or an attribute of a class, past what the class has in place of writing."""
    kind: Any = type if isinstance(owner, type) else object
    if value is _NOTHING:
        kind.__delattr__(owner, name)
    else:
        kind.__setattr__(owner, name, value)


def _attributes(kind: type) -> dict[str, Any]:
    return {name: one for name, one in vars(kind).items() if not (name.startswith("__") and name.endswith("__"))}
