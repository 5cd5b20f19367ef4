"""Tensors, storages and nested values: memory, aliases and owners."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils._pytree import TreeSpec, keystr, tree_flatten_with_path, tree_iter, tree_map, tree_unflatten

from eager_offload.torch_private import if_imported

# -- tensors and storages ---------------------------------------------------------------------------------------------


def is_out_of_memory(error: Exception) -> bool:
    """Returns whether a device or the CPU had no memory for a tensor; torch has its own error for devices only."""
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or "DefaultCPUAllocator" in str(error)


_without_torch_function: Callable[[], AbstractContextManager[object]] = torch.DisableTorchFunctionSubclass

#: Returns whether a value is a tensor of a wrapper subclass, which names its inner tensors.
is_wrapper: Callable[[object], bool] = is_traceable_wrapper_subclass


def has_own_memory(kind: type[Tensor]) -> bool:
    """Returns whether operators treat tensors of ``kind`` as plain ones: ``Tensor``, and subclasses without dispatch.

    Such subclasses add methods, attributes and a ``__torch_function__``. A class with a ``__torch_dispatch__`` may have
    other tensors in place of memory.
    """
    return kind is Tensor or kind.__torch_dispatch__ is Tensor.__torch_dispatch__


#: Returns an alias of a type that shares the version counter of a tensor; runs no code of the type.
made_a: Callable[[type[Tensor], Tensor], Tensor] = Tensor._make_subclass

#: Returns a view of a real tensor with the negative bit set.
neg_view: Callable[[Tensor], Tensor] = torch._neg_view

#: The reference count of a tensor that only a tuple holds; a loop adds references, as many as the interpreter does.
_ALONE = next(sys.getrefcount(tensor) for tensor in (torch.empty(0),))
_use_count: Callable[[Tensor], int] = Tensor._use_count  # type: ignore[attr-defined]  # in no stub


def with_other_owners(tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Returns the tensors that have another owner besides this tuple."""
    with _without_torch_function():
        return tuple(tensor for tensor in tensors if _use_count(tensor) > 1 or sys.getrefcount(tensor) > _ALONE)


#: Returns a reference that names a storage by identity without keeping its bytes. torch keeps the Python object of a
#: storage exactly as long as anything in C++ has the storage, which ``_require_storage_identity`` checks.
weak_storage: Callable[[torch.UntypedStorage], weakref.ref[torch.UntypedStorage]] = weakref.ref
#: Returns a number that no other storage has while this one lives.
storage_key: Callable[[torch.UntypedStorage], int] = id

#: Returns the base of a view, as autograd knows it.
base_of: Callable[[Tensor], Tensor | None] = attrgetter("_base")
#: Returns the version counter: the number of changes in place of a tensor and its views.
version_of: Callable[[Tensor], int] = attrgetter("_version")


def attributes_of(tensor: Tensor) -> dict[str, Any]:
    """Returns ``vars(tensor)``, without a call of a subclass."""
    found: dict[str, Any] = object.__getattribute__(tensor, "__dict__")
    return found


def unseen_version(tensor: Tensor) -> int:
    """Returns the version of a tensor, without a call of a subclass."""
    with _without_torch_function():
        return tensor._version


def storage_of(tensor: Tensor) -> torch.UntypedStorage | None:
    """Returns the storage of ``tensor``; ``None`` for a sparse layout or a wrapper inside a transform, without one."""
    try:
        if type(tensor) is Tensor:
            return tensor.untyped_storage()
        with _without_torch_function():
            return tensor.untyped_storage()
    except (NotImplementedError, RuntimeError):
        return None


def detached(tensor: Tensor) -> Tensor:
    """Returns autograd's own ``tensor.detach()``, which shares the version counter, without a call of a subclass."""
    with _without_torch_function():
        return Tensor.detach(tensor)


def is_fake(kind: type) -> bool:
    """Returns whether tensors of this type have no bytes although their device looks real."""
    fake = if_imported("torch._subclasses.fake_tensor", "FakeTensor")
    return fake is not None and issubclass(kind, fake)


def is_plain_fake(value: Tensor) -> bool:
    """Returns whether ``value`` is a plain tensor or a tracer's stand-in for one."""
    return type(value) is Tensor or is_fake(type(value))


def _require_storage_identity() -> None:
    tensor = torch.empty(1)
    storage, alias = weakref.ref(tensor.untyped_storage()), tensor.detach()
    del tensor
    survives = storage() is alias.untyped_storage()
    del alias
    if not survives or storage() is not None:
        raise ImportError(
            "eager_offload needs a torch that keeps a storage's Python object exactly as long as the storage; "
            f"{torch.__version__} does not"
        )


_require_storage_identity()

# -- nested values and sizes ------------------------------------------------------------------------------------------


def flatten_with_names(tree: Any) -> tuple[list[str], list[Any], TreeSpec]:
    """Returns the paths (such as ``[0]['mask']``) and the leaves of tuples, lists and dicts, and their structure."""
    found, structure = tree_flatten_with_path(tree)
    return [keystr(path) for path, _ in found], [leaf for _, leaf in found], structure


#: The inverse.
unflatten = tree_unflatten


def tensors_in(values: object) -> list[Tensor]:
    """Returns the tensors among an operator's arguments or results, which are nested in lists, tuples and dicts."""
    if isinstance(values, Tensor):
        return [values]
    if isinstance(values, list | tuple):
        return [tensor for one in values for tensor in tensors_in(one)]
    return tensors_in([*values.values()]) if isinstance(values, dict) else []


def hint(number: int | torch.SymInt, default: int = 8192) -> int:
    """Returns a number, for a symbol the one seen while tracing: ``int(symbol)`` would make the symbol a constant.

    For a size that depends on data (``nonzero``, ``mark_unbacked``) returns ``default``, a large size as in Inductor.
    """
    if isinstance(number, int):
        return number
    if number.node.has_hint():
        return int(number.node.hint)
    expression = getattr(number.node, "expr", None)  # ragged lengths have no expression
    return default if expression is None else int(expression.xreplace(dict.fromkeys(expression.free_symbols, default)))


def fake_mode_of(value: Tensor | None) -> AbstractContextManager[object]:
    """Returns the mode that makes fake tensors like ``value``."""
    return getattr(value, "fake_mode", None) or nullcontext()


def span_of(value: Tensor) -> int:
    """Returns the bytes from the first to the last element of ``value``, with hints for symbolic sizes."""
    if hint(value.numel()) == 0:
        return 0
    pairs = zip(value.size(), value.stride(), strict=True)
    return (1 + sum((hint(size) - 1) * hint(stride) for size, stride in pairs)) * value.itemsize
