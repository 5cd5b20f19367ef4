"""Every private name of torch that the library uses, with what it is for. Nothing else imports one.

| name | seen in | without it |
| --- | --- | --- |
| ``torch.autograd._get_sequence_nr`` | 2.11 to 2.15 | the import fails: when a copy may start cannot be told |
| ``torch._C._current_autograd_node`` | 2.11 to 2.15 | a reentrant checkpoint's recomputation is offloaded again |
| ``_top_saved_tensors_default_hooks`` | 2.11 to 2.15 | an interrupt while a context is entered may leave its hooks |
| ``torch._neg_view`` | 2.11 to 2.15 | the import fails |
| ``torch._C.DisableTorchFunctionSubclass`` | 2.11 to 2.15 | the import fails |
| ``torch._subclasses.fake_tensor.FakeTensor`` | 2.11 to 2.15 | there are none |
| ``AsyncCollectiveTensor`` | 2.11 to 2.15 | there is no tensor that a collective is still filling |
| ``torch._ops.OpOverload``, ``torch.utils._python_dispatch`` | 2.11 to 2.15 | the import fails |
| ``torch.cuda.cudart().cudaHostRegister`` | 2.11 to 2.15 | host memory is pinned by torch, which rounds sizes up |
| ``_checkpoint_hook``, ``_recomputation_hook`` | 2.11 to 2.15 | checkpointing counts as a foreign hook |
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import NamedTuple, cast

import torch
import torch.utils.checkpoint
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _disable_current_modes,
    is_traceable_wrapper_subclass,
)

__all__ = [
    "HostRegistration",
    "OpOverload",
    "TorchDispatchMode",
    "autograd_sequence",
    "checkpoint_hooks",
    "current_autograd_node",
    "detached",
    "finish_collective",
    "host_registration",
    "is_fake",
    "is_wrapper",
    "neg_view",
    "require_torch",
    "top_pack_hook",
    "weak_storage",
    "without_dispatch_modes",
]

_OLDEST = (2, 11)


def require_torch(version: str = torch.__version__) -> None:
    """Raises ``ImportError`` where torch is older than the library can work with."""
    release = tuple(int(part) for part in version.split("+")[0].split(".")[:2])
    if release < _OLDEST:
        raise ImportError(
            f"eager_offload needs torch {_OLDEST[0]}.{_OLDEST[1]} or newer, but {version} is installed: upgrade torch"
        )


require_torch()

#: The number of the next autograd node that this thread makes. It advances when an operator's node is made, which is
#: after the operator packed its inputs: a larger number at a later pack shows that the operator has run.
autograd_sequence: Callable[[], int] = torch.autograd._get_sequence_nr  # type: ignore[attr-defined]

#: The autograd node that this thread is running backward for, or ``None``.
current_autograd_node: Callable[[], object | None] = getattr(torch._C, "_current_autograd_node", lambda: None)

_top_hooks: Callable[[bool], tuple[object, object] | None] = getattr(
    torch._C._autograd, "_top_saved_tensors_default_hooks", lambda ignore_tracing: None
)

#: Runs operators out of sight of the dispatch modes that the caller has active.
without_dispatch_modes: Callable[[], AbstractContextManager[object]] = _disable_current_modes

_without_torch_function: Callable[[], AbstractContextManager[object]] = torch._C.DisableTorchFunctionSubclass

#: Whether something is a tensor of a subclass that says which tensors it is made of.
is_wrapper: Callable[[object], bool] = is_traceable_wrapper_subclass

#: A view of a real tensor with the negative bit set.
neg_view: Callable[[Tensor], Tensor] = torch._neg_view

#: The hooks that non-reentrant checkpointing installs inside others, by design.
checkpoint_hooks: tuple[type, ...] = tuple(
    cast(type, kind)
    for name in ("_checkpoint_hook", "_recomputation_hook")
    if (kind := getattr(torch.utils.checkpoint, name, None)) is not None
)


class HostRegistration(NamedTuple):
    """The driver's own calls that pin memory where it lies; each returns 0, or the number of an error."""

    #: Address, bytes and flags.
    register: Callable[[int, int, int], object]
    #: The address.
    unregister: Callable[[int], object]


def host_registration() -> HostRegistration | None:
    """How to pin memory that torch did not allocate, or ``None`` where this torch or this machine cannot."""
    if not torch.cuda.is_available():
        return None
    runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    register, unregister = (getattr(runtime, name, None) for name in ("cudaHostRegister", "cudaHostUnregister"))
    return None if register is None or unregister is None else HostRegistration(register, unregister)


def weak_storage(storage: torch.UntypedStorage) -> weakref.ref[torch.UntypedStorage]:
    """Names a storage by identity, without keeping its bytes: while they live, the reference gives the same object.

    torch keeps the Python object of a storage for as long as anything in C++ has the storage, and no longer. The import
    of this module has made sure of it.
    """
    return weakref.ref(storage)


def detached(tensor: Tensor) -> Tensor:
    """``tensor.detach()`` as autograd does it, whatever a subclass makes of the method: with one version counter."""
    with _without_torch_function():
        return tensor.detach()


def top_pack_hook() -> object | None:
    """The pack hook that the calling thread's saved tensors go to now."""
    hooks = _top_hooks(True)
    return None if hooks is None else hooks[0]


def is_fake(kind: type) -> bool:
    """Whether tensors of this type have no bytes, though their device looks real."""
    module = sys.modules.get("torch._subclasses.fake_tensor")  # never imported: there are none
    fake = getattr(module, "FakeTensor", None)
    return fake is not None and issubclass(kind, fake)


def finish_collective(tensor: Tensor) -> None:
    """Makes the current stream wait for the functional collective that fills ``tensor``, if it is of that kind.

    Whoever reads such a tensor does the same first; it may be done any number of times.
    """
    # What has never been imported has made no tensor either.
    module = sys.modules.get("torch.distributed._functional_collectives")
    kind = getattr(module, "AsyncCollectiveTensor", None)
    if kind is not None and isinstance(tensor, kind):
        tensor.trigger_wait()


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
