"""What is left of a traced step when it is over: see [Note: outside of the copy] in outside.py."""

from __future__ import annotations

import gc
import sys
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from types import CellType, FrameType, ModuleType, TracebackType
from typing import Any, cast
from weakref import ref

import torch
from torch import Tensor, nn

from eager_offload._torch import hooks_of_all_modules, is_fake, without_torch_function
from eager_offload.errors import PlanError
from eager_offload.planning.blocks import Blocks
from eager_offload.planning.outside import Cache, Outside, attributes_in, places_of, roots_of

#: How many holders of holders are looked for.
_DEEP = 8
#: Two steps that reach the same objects would put back each other's tensors.
_lock = threading.RLock()


class Made:
    """What a traced step was given and has made, held weakly: its tensors, and the copies of modules."""

    def __init__(self) -> None:
        self.blocks = Blocks()
        self._modules: dict[int, ref[nn.Module]] = {}

    def add(self, module: nn.Module) -> None:
        """``module`` is a copy, and so are those in it."""
        self._modules.update((id(one), ref(one)) for one in module.modules())

    def has(self, one: object) -> bool:
        """Whether ``one`` is of the step."""
        if issubclass(type(one), Tensor):
            return self.blocks.has(cast(Tensor, one))
        return (weak := self._modules.get(id(one))) is not None and weak() is one

    def modules(self) -> list[nn.Module]:
        """The copies that are alive."""
        return [one for weak in self._modules.values() if (one := weak()) is not None]

    def is_gone(self) -> bool:
        """Whether nothing of it is alive."""
        return not self.blocks.are_alive() and not self.modules()


@contextmanager
def left_as_it_was(model: nn.Module, loss: object, made: Made) -> Iterator[None]:
    """What a traced step of ``model`` reaches outside of its copy is afterwards what it was: see [Note: outside of the
    copy]. ``made`` is what the step makes; nothing inside of the ``with`` may hold it when it is left.

    Raises:
        PlanError: something that was not reached held tensors of the step.
    """
    with _lock:
        outside, handled = Outside(roots_of(model, loss)), sys.exception()
        try:
            yield
        except BaseException as error:
            _let_go(error, handled)
            _leave(outside, made)
            raise
        held, failure = _leave(outside, made)
    if failure is not None:
        raise failure
    if held:
        raise PlanError(
            f"a tensor of the step was put into {', '.join(held)}, outside of the model: it has no numbers, so it was "
            "taken out where that can be done. What was there before is not known. Put such things into attributes of "
            "the model, where the copy has them that is traced, or leave it out while planning"
        )


@contextmanager
def reached_put_back(model: nn.Module, loss: object) -> Iterator[None]:
    """What a real step of ``model`` itself reaches is afterwards what it was, but for the numbers of tensors."""
    with _lock:
        outside = Outside([*hooks_of_all_modules(), model, loss])
        try:
            yield
        finally:
            outside.put_back(lambda one: False)


def _leave(outside: Outside, made: Made) -> tuple[list[str], PlanError | None]:
    """Puts all back; returns the places where something had to be taken out, and the error of what is not as it was."""
    failure = None
    try:
        outside.put_back(lambda one: issubclass(type(one), Tensor) and not is_fake(type(one)) and not made.has(one))
    except PlanError as error:
        failure = error.with_traceback(None)
    return _taken_out_of_others(outside, made), failure


def _taken_out_of_others(outside: Outside, made: Made) -> list[str]:
    if made.is_gone():
        return []
    for cache in outside.caches:
        if any(made.has(one) for one in _inside(cache)):
            cache.cache_clear()
    if made.is_gone():
        return []
    gc.collect()
    if made.is_gone():
        return []
    held = _take_out(made)
    gc.collect()
    if held or made.is_gone() or _is_cast():
        return held
    return ["something that cannot be looked into"]


def _is_cast() -> bool:
    """Whether the caller is in an autocast, whose cache holds casts until it is left."""
    device = torch.accelerator.current_accelerator()
    return torch.is_autocast_enabled("cpu") or (device is not None and torch.is_autocast_enabled(device.type))


def _let_go(error: BaseException, handled: BaseException | None) -> None:
    """Has the frames of an error hold nothing, which would hold the tensors of the step as long as it lives; those of
    the one that was ``handled`` before are the caller's."""
    found: BaseException | None = error
    seen: set[int] = set()
    while found is not None and found is not handled and id(found) not in seen:
        seen.add(id(found))
        traceback.clear_frames(found.__traceback__)
        found = found.__cause__ or found.__context__


def _inside(container: object, depth: int = _DEEP) -> Iterator[object]:
    """What the collector sees in ``container``, and in what is in it."""
    for one in gc.get_referents(container):
        yield one
        if depth and isinstance(one, dict | list | tuple | set | frozenset):
            yield from _inside(one, depth - 1)


def _take_out(made: Made) -> list[str]:
    """Looks for the holders of what a step has made, and takes it out of them; returns their names."""
    is_frozen = gc.get_freeze_count() > 0
    if is_frozen:
        gc.unfreeze()  # or they are not seen
    try:
        with without_torch_function():  # tensors of all kinds of classes are among what is looked at
            return _taken_out_of_all(made)
    finally:
        if is_frozen:
            gc.collect()
            gc.freeze()


def _taken_out_of_all(made: Made) -> list[str]:
    held: dict[str, None] = {}
    modules = made.modules()
    own = {id(part) for module in modules for part in (module, vars(module), *vars(module).values())}
    targets = list[Any]()
    for one in gc.get_objects():
        if made.has(one):
            targets.append(one)
        elif issubclass(type(one), Tensor) and _of_tensor(one, "is_leaf") and made.has(_of_tensor(one, "grad")):
            object.__setattr__(one, "grad", None)
            held[f"the gradient of a tensor of the shape {tuple(one.shape)}"] = None
    for _ in range(_DEEP):
        if not targets:
            break
        ids, ours, above = {*map(id, targets)}, {id(targets), id(modules)}, []
        for holder in gc.get_referrers(*targets):
            if id(holder) in ours or id(holder) in own or isinstance(holder, FrameType | TracebackType):
                continue
            name = _taken_out(holder, ids)
            if name is None:
                above.append(holder)
            else:
                held[name] = None
        del holder
        targets = above
    return [*held]


def _of_tensor(tensor: object, name: str) -> Any:
    """Reads what every tensor has, past what its class has in place of reading."""
    return object.__getattribute__(tensor, name)


def _taken_out(holder: Any, ids: set[int]) -> str | None:
    """Takes the objects with those ids out of ``holder``, and returns its name; ``None`` where its own holders are to
    be asked."""
    if isinstance(holder, Cache):
        holder.cache_clear()
        return f"the cache of {holder.__module__}.{holder.__qualname__}"
    owners = gc.get_referrers(holder) if isinstance(holder, dict) else []
    for cache in owners:
        if isinstance(cache, Cache):
            return _taken_out(cache, ids)
    names = ", ".join([repr(key) for place in places_of(holder) for key in place.take_out(ids)])
    if isinstance(holder, CellType):
        return "a variable of a closure"
    where = f"a {type(holder).__qualname__}"
    if isinstance(holder, dict):
        owner = next((one for one in owners if attributes_in(one) is holder), None)
        if owner is None:
            return f"{where} at {names}"
        is_module = isinstance(owner, ModuleType)
        where = f"module {owner.__name__}" if is_module else f"a {type(owner).__qualname__}"
    if not names and isinstance(holder, tuple | frozenset):
        return None
    return f"{names} of {where}" if names else where
