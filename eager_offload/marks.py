"""What a user says about tensors: regions in which nothing moves, and marks on single storages."""

from __future__ import annotations

import threading
import weakref
from contextlib import ContextDecorator
from enum import Enum
from types import TracebackType
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from eager_offload._torch import is_wrapper, weak_storage
from eager_offload.errors import OffloadError
from eager_offload.selection import plain_tensors
from eager_offload.tiers.forking import ForkSafeLock

__all__ = ["Mark", "clear_mark", "in_no_offload_region", "keep", "mark_of", "no_offload", "prefer_offload"]

T = TypeVar("T", bound=Tensor)


class Mark(Enum):
    """What was asked of one storage."""

    KEEP = "keep"
    PREFER = "prefer"


class _Marked(NamedTuple):
    """A mark, and the storage that it is on; the address that it is found by proves nothing."""

    storage: weakref.ref[torch.UntypedStorage]
    mark: Mark


class _Region(threading.local):
    depth = 0


_region = _Region()
_marks: dict[int, _Marked] = {}
_marks_lock = ForkSafeLock()


class no_offload(ContextDecorator):
    """Nothing that is saved inside moves; it is counted as kept with the reason ``region``.

    A context manager and a decorator, like ``torch.no_grad``; for the thread that enters it; may be nested.
    """

    def __enter__(self) -> None:
        _region.depth += 1

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        _region.depth -= 1


def in_no_offload_region() -> bool:
    """Whether the calling thread is inside :class:`no_offload`."""
    return _region.depth > 0


def keep(tensor: T) -> T:
    """Marks the storage of ``tensor`` to stay on its device, and returns ``tensor``.

    In force for every view of the storage until its copy has started; a mark that comes later changes nothing.
    A wrapper (a ``DTensor``) stands for the tensors inside it.

    Raises:
        OffloadError: ``tensor`` has no storage of its own (a sparse one, for instance).
    """
    return _mark(tensor, Mark.KEEP)


def prefer_offload(tensor: T) -> T:
    """Marks the storage of ``tensor`` to leave its device although it is small or new, and returns ``tensor``.

    A wrapper (a ``DTensor``) stands for the tensors inside it.

    In force until its copy has started. Parameters and layouts that cannot move stay all the same.

    Raises:
        OffloadError: ``tensor`` has no storage of its own (a sparse one, for instance).
    """
    return _mark(tensor, Mark.PREFER)


def mark_of(storage: torch.UntypedStorage) -> Mark | None:
    """The mark on ``storage``."""
    marked = _marks.get(storage._cdata)
    return None if marked is None or marked.storage() is not storage else marked.mark


def clear_mark(storage: torch.UntypedStorage) -> None:
    """Ends a mark: the storage's copy has started."""
    with _marks_lock.lock:
        _marks.pop(storage._cdata, None)


def any_marks() -> bool:
    """Whether there is any mark at all: the common case is none, and then no storage has to be looked up."""
    return bool(_marks)


def _mark(tensor: T, mark: Mark) -> T:
    if is_wrapper(tensor):
        for inner in plain_tensors(tensor):
            _mark(inner, mark)
        return tensor
    try:
        storage = tensor.untyped_storage()
    except (NotImplementedError, RuntimeError) as error:
        raise OffloadError(
            f"a {tensor.layout} tensor of type {type(tensor).__name__} has no storage that could be marked: "
            "mark the plain tensors that it is made of"
        ) from error
    with _marks_lock.lock:
        for key in [key for key, marked in _marks.items() if marked.storage() is None]:
            del _marks[key]
        _marks[storage._cdata] = _Marked(weak_storage(storage), mark)
    return tensor
