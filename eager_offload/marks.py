"""Regions in which nothing moves, and marks on single storages.

[Note: traced marks]
A traced tensor has no bytes, but it has a storage, which the values of a graph that share memory share. So a mark in
compiled code is an operator that acts while it is traced: it marks the traced storage, and the pass that chooses the
graph's offloads finds the mark there. When the graph runs, the operator does nothing. A region is an annotation, which
tracers write on every node inside and on the node's backward.

The on-disk caches of compilers identify a graph by its operators, without annotations. So an operator marks the begin
of a region, and one its end. Both decompose into nothing when the graph is traced further.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ContextDecorator, contextmanager
from enum import Enum
from inspect import isasyncgenfunction, isclass, iscoroutinefunction, isgeneratorfunction
from types import TracebackType
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.fx.traceback import annotate
from torch.library import register_fake

from eager_offload.core.selection import plain_tensors
from eager_offload.errors import OffloadError
from eager_offload.tiers.forking import FinalizerRecord
from eager_offload.torch_private.calls import library
from eager_offload.torch_private.memory import is_wrapper, storage_key

F = TypeVar("F", bound=Callable[..., Any])
T = TypeVar("T", bound=Tensor)


class Mark(Enum):
    """A user's mark on one storage."""

    KEEP = "keep"
    PREFER = "prefer"


class _Marked(FinalizerRecord[torch.UntypedStorage]):
    """A weak reference to a storage, with its mark. By now the address may belong to another storage."""

    __slots__ = ("address", "mark")
    address: int
    mark: Mark


class _Inside(threading.local):
    #: Open regions; those of generators need not nest.
    keeps = 0
    #: Running calls of modules that ``only`` selects.
    opens = 0

    def has_to_stay(self, is_limited: bool) -> bool:
        """Returns whether saves stay here; ``is_limited``: ``only`` is set, so saves outside its modules stay."""
        return self.keeps > 0 or (is_limited and not self.opens)


#: The key in the ``meta["custom"]`` of a node that was traced inside a region.
REGION_NOTE = "eager_offload_keeps"
#: Likewise for a node that was traced in a call of a module that ``only`` selects.
ONLY_NOTE = "eager_offload_opens"
#: The call that makes a region, for error texts.
_WRITTEN = "eager_offload.no_offload()"

inside = _Inside()
# No lock: each is changed only by operations that are atomic in Python.
#: The marks by address, including those of storages that have died since the last ``_forget_gone``.
standing: dict[int, _Marked] = {}
_gone: deque[_Marked] = deque()


class Region(ContextDecorator):
    """A region of eager code: keeps the saves of the calling thread while it is open."""

    def __enter__(self) -> None:
        if torch.compiler.is_compiling():
            raise OffloadError(f"a region of compiled code has to be made there: write `with {_WRITTEN}:`")
        inside.keeps += 1

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not inside.keeps:
            raise OffloadError("this region is left in a thread that has not entered one: use one `with` for both")
        inside.keeps -= 1

    def __call__(self, func: F) -> F:
        if any(is_one(func) for is_one in (isclass, isgeneratorfunction, iscoroutinefunction, isasyncgenfunction)):
            raise OffloadError(
                f"{_WRITTEN} decorates functions that have finished when they return, and "
                f"{getattr(func, '__name__', func)} is not such a function: write `with {_WRITTEN}:` inside of it"
            )
        return super().__call__(func)

    def _recreate_cm(self) -> Region:
        # `ContextDecorator` calls this for each call of a decorated function, which may be traced.
        return no_offload()


def no_offload() -> Region:
    """Keeps everything that is saved inside on the device, counted with the reason ``region``.

    A context manager for the calling thread, which may be nested, and a decorator of plain functions (no generators or
    coroutines). Inside compiled code it breaks no graph. Around a call of compiled code it has no effect, since the
    graph was made before, and a warning says so.

        with eager_offload.no_offload():
            x = block(x)
    """
    if torch.compiler.is_compiling():
        return _traced_region(REGION_NOTE)  # type: ignore[return-value]  # no decorator while it is traced
    return Region()


@contextmanager
def moving() -> Iterator[None]:
    """Lets saves of the calling thread move although ``only`` keeps the others."""
    if torch.compiler.is_compiling():
        with _traced_region(ONLY_NOTE):
            yield
        return
    inside.opens += 1
    try:
        yield
    finally:
        inside.opens -= 1


def keep(tensor: T) -> T:
    """Marks the storage of ``tensor`` to stay on its device, and returns ``tensor``.

    The mark applies to every view of the storage. It has no effect once the copy has started. In compiled code it
    applies to the whole graph, and breaks no graph. A mark on a wrapper (e.g. a ``DTensor``) marks the tensors inside.

    Raises:
        OffloadError: ``tensor`` is not a tensor, or has no storage of its own (e.g. a sparse tensor).
    """
    return _mark(tensor, Mark.KEEP)


def prefer_offload(tensor: T) -> T:
    """Marks the storage of ``tensor`` to leave its device even if it is small or new, and returns ``tensor``.

    The mark ends when the copy starts. Parameters and layouts that cannot move stay. A mark on a wrapper (e.g. a
    ``DTensor``) marks the tensors inside.

    Raises:
        OffloadError: ``tensor`` is not a tensor, or has no storage of its own (e.g. a sparse tensor).
    """
    return _mark(tensor, Mark.PREFER)


def mark_of(storage: torch.UntypedStorage) -> Mark | None:
    """Returns the mark on ``storage``. Callers may skip the call while ``standing`` is empty, as it usually is."""
    if _gone:
        _forget_gone()
    marked = standing.get(storage_key(storage))
    return None if marked is None or marked() is not storage else marked.mark


def clear_mark(storage: torch.UntypedStorage) -> None:
    """Removes the mark of a storage whose copy has started."""
    standing.pop(storage_key(storage), None)


def _forget_gone() -> None:
    while _gone:
        try:
            gone = _gone.popleft()
        except IndexError:  # another thread took it
            return
        if standing.get(gone.address) is gone:  # else the address has a new owner, or the mark was removed
            standing.pop(gone.address, None)


def _mark(tensor: T, mark: Mark) -> T:
    if not isinstance(tensor, Tensor):
        raise OffloadError(f"only a tensor can be marked, and this is {tensor!r}: mark the tensors in it one by one")
    if torch.compiler.is_compiling():
        mark_operator(tensor, mark.value)
    else:
        _mark_storage(tensor, mark)
    return tensor


def _mark_storage(tensor: Tensor, mark: Mark) -> None:
    if is_wrapper(tensor):
        for inner in plain_tensors(tensor):
            _mark_storage(inner, mark)
        return
    try:
        storage = tensor.untyped_storage()
    except (NotImplementedError, RuntimeError) as error:
        raise OffloadError(
            f"a {tensor.layout} tensor of type {type(tensor).__name__} has no storage that could be marked: "
            "mark the plain tensors that it is made of"
        ) from error
    if _gone:
        _forget_gone()
    marked = _Marked(storage, _gone.append)
    marked.address, marked.mark = storage_key(storage), mark
    standing[marked.address] = marked


# See [Note: traced marks].

_library = library("eager_offload", "FRAGMENT")
_library.define("mark(Tensor tensor, str mark) -> ()")
mark_operator = torch.ops.eager_offload.mark.default
torch.fx.has_side_effect(mark_operator)


_library.define("region(str border) -> ()")
region_operator = torch.ops.eager_offload.region.default
torch.fx.has_side_effect(region_operator)


@contextmanager
def _traced_region(note: str) -> Iterator[None]:
    region_operator(f"begins {note}")
    try:
        with annotate({note: True}):
            yield
    finally:
        region_operator("ends")


# Composite: tracers see the body instead of the operator.
_library.impl("region", lambda border: None, "CompositeImplicitAutograd")
_library.impl("mark", lambda tensor, mark: None, "CompositeExplicitAutograd")
register_fake("eager_offload::mark", lambda tensor, mark: _mark_storage(tensor, Mark(mark)), lib=_library)
