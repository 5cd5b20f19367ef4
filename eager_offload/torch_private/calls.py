"""Operators, the modes that see them, and the calls of modules."""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from types import FrameType, FunctionType
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch._ops import HigherOrderOperator, OpOverload
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from eager_offload.torch_private import Patch, if_imported

# -- modes that the caller is in --------------------------------------------------------------------------------------

#: Runs operators out of sight of the dispatch modes that the caller has active.
without_dispatch_modes: Callable[[], AbstractContextManager[object]] = _disable_current_modes

#: Runs operators out of sight of the caller's function modes and of ``__torch_function__`` of subclasses.
without_torch_function: Callable[[], AbstractContextManager[object]] = torch.DisableTorchFunction

#: Return the number of dispatch modes, and of function modes, that the calling thread is in.
dispatch_modes: Callable[[], int] = torch._C._len_torch_dispatch_stack
function_modes: Callable[[], int] = torch._C._len_torch_function_stack

#: Returns a mode of the calling thread by its index, the outermost at 0.
mode_at: Callable[[int], TorchDispatchMode] = torch._C._get_dispatch_stack_at


def is_tracing() -> bool:
    """Returns whether the calling thread's operators are traced, so that tensors may stand for others or have no bytes.

    Tracers identify values by the tensor objects that operators returned, not by aliases.
    """
    return any(mode_at(number).is_infra_mode() for number in range(dispatch_modes()))


def is_proxied() -> bool:
    """Returns whether the calling thread is being traced into a graph of operators."""
    tracer = if_imported("torch.fx.experimental.proxy_tensor", "get_proxy_mode")
    return tracer is not None and tracer() is not None


def without_caller_modes() -> AbstractContextManager[object]:
    """Runs operators out of sight of the caller's active modes: a count of operations, a tracer, a default device.

    Torch's CUDA sanitizer stays active, and so do modes with a true attribute ``sees_offloading``.

    [Note: modes and the library] A mode that counts, traces or replaces operators concerns the *program*'s computation,
    not the library's. The sanitizer checks the order in which *streams* access memory. The library's streams, events
    and allocations are reported to it even with modes off; without the accesses in between, it would miss a race of a
    copy with the program's kernels.
    """
    modes = [mode_at(number) for number in range(dispatch_modes())]
    checker = sanitizer() if modes else None
    seeing = [mode for mode in modes if mode is checker or getattr(mode, "sees_offloading", False)]
    return nullcontext() if len(seeing) == len(modes) and not function_modes() else _only(seeing)


def sanitizer() -> TorchDispatchMode | None:
    """Returns the mode of ``torch.cuda._sanitizer``, or ``None`` if the user has not enabled it."""
    found = if_imported("torch.cuda._sanitizer", "cuda_sanitizer")
    return found.dispatch if found is not None and found.enabled else None


def set_over(
    tensor: Tensor, storage: torch.UntypedStorage, offset: int, size: Sequence[int], stride: Sequence[int]
) -> Tensor:
    """Calls ``tensor.set_``, unseen by the sanitizer, which would take it for a kernel that writes to ``storage``."""
    if dispatch_modes() and sanitizer() is not None:
        with _disable_current_modes():
            return tensor.set_(storage, offset, size, stride)
    return tensor.set_(storage, offset, size, stride)


@contextmanager
def _only(seeing: list[TorchDispatchMode]) -> Iterator[None]:
    enter, leave = cast(Any, TorchDispatchMode.__enter__), cast(Any, TorchDispatchMode.__exit__)
    with without_torch_function(), _disable_current_modes(), ExitStack() as stack:
        for mode in seeing:  # by the base class, because a mode's own `__enter__` may begin another count
            enter(mode)
            stack.callback(leave, mode, None, None, None)
        yield


def dispatch_of(mode: Any) -> Any:
    """Returns the ``__torch_dispatch__`` of a class of modes for a derived class to call.

    torch wraps the method of each class in a call of Dynamo, which costs about as much as an operator; once is enough.
    """
    found = mode.__torch_dispatch__
    return found.__wrapped__ if getattr(found, "__code__", None) is _NO_DYNAMO.__code__ else found


_NO_DYNAMO: Any = getattr(torch, "_disable_dynamo")(is_tracing)  # noqa: B009  # not in torch's stubs

# -- operators --------------------------------------------------------------------------------------------------------


def schema_of(target: object) -> Any:
    """Returns the schema of an operator; ``None`` if ``target`` is not an operator."""
    return getattr(target, "_schema", None)


#: The attention operators of CUDA, and the one whose parts are separate operators.
flash_attention: Any = torch.ops.aten._scaled_dot_product_flash_attention
efficient_attention: Any = torch.ops.aten._scaled_dot_product_efficient_attention
attention_in_parts: Any = torch.ops.aten._scaled_dot_product_attention_math

#: Defines the operators of a namespace (``"DEF"``), or adds operators to one (``"FRAGMENT"``).
library: Callable[[str, str], Any] = torch.library.Library  # which has no types

# -- modules ----------------------------------------------------------------------------------------------------------


def _as_another(function: Any) -> Any:
    """Returns a copy of the function if Dynamo compares its identity."""
    known = getattr(sys.modules.get("torch._dynamo.utils"), "unpatched_nn_module_call", None)
    if function is not known or not isinstance(function, FunctionType):
        return function
    code, names, cells = function.__code__, function.__globals__, function.__closure__
    return functools.update_wrapper(FunctionType(code, names, None, function.__defaults__, cells), function)


#: Makes Dynamo trace replaced calls of modules. If ``nn.Module.__call__`` is torch's function, Dynamo goes straight to
#: the forward of a module without hooks.
replaced_calls_in_graphs = Patch(nn.Module, "__call__", _as_another)


def module_call(module: nn.Module) -> Callable[..., Any] | None:
    """Returns the replaced call of ``module``, as ``module.compile()`` sets it, or ``None``."""
    return module._compiled_call_impl


is_jit_tracing: Callable[[], bool] = torch.jit.is_tracing  # type: ignore[attr-defined]  # public, and in no stub


def own_call(module: nn.Module) -> Callable[..., Any]:
    """Returns the call of ``module`` if it is not replaced: forward and its hooks."""
    return module._call_impl


def set_module_call(module: nn.Module, call: Callable[..., Any] | None) -> None:
    """Replaces the call of ``module``, or restores it with ``None``. Copies and pickles leave the replacement out, and
    ``torch.jit.script`` does from now on, as it leaves out hooks."""
    ignored = getattr(getattr(torch.jit, "_recursive", None), "ignored_attributes", None)
    if ignored is not None and "_compiled_call_impl" not in ignored:
        ignored.append("_compiled_call_impl")
    if call is None and "_compiled_call_impl" in vars(module):
        del vars(module)["_compiled_call_impl"]
    else:
        vars(module)["_compiled_call_impl"] = call


def module_called_by(call: object) -> nn.Module | None:
    """Returns the module for which torch calls ``call``, or ``None``. To be called within ``call`` itself.

    torch calls the attribute of a module without the module. Code that copies attributes as they are (``copy.copy``,
    Accelerate's regional compilation, replicas) leaves several modules with one ``call``.
    """
    caller = sys._getframe(2).f_locals.get("self")
    is_called = isinstance(caller, nn.Module) and vars(caller).get("_compiled_call_impl") is call
    return caller if is_called else None
