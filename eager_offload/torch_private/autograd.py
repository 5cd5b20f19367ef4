"""Autograd: nodes and backwards, saved-tensor hooks, checkpoints, and profilers."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from types import FrameType
from typing import Any, TypeAlias

import torch
import torch.utils.checkpoint
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from eager_offload.torch_private import Patch
from eager_offload.torch_private.calls import dispatch_modes, mode_at, schema_of

# -- autograd: its nodes, its backwards -------------------------------------------------------------------------------

#: Returns the number of the next autograd node of this thread. An operator's node takes its number after the operator
#: has packed its inputs, so a larger number at a later pack shows that the operator has run.
autograd_sequence: Callable[[], int] = torch.autograd._get_sequence_nr  # type: ignore[attr-defined]  # in no stub

#: Returns the autograd node that this thread is running backward for, or ``None``.
current_autograd_node: Callable[[], object | None] = torch._C._current_autograd_node

#: Returns whether the backward that this thread runs keeps its graph; to be called within a backward only.
keeps_graph: Callable[[], bool] = torch._C._autograd._get_current_graph_task_keep_graph


def asker_may_return_it() -> bool:
    """Returns whether the unpack may be for code that can return the saved tensor as a gradient: a custom function or a
    hook.

    Nodes with a formula of torch's unpack from the engine: above the library's frames there is only torch's own call.
    """
    node = current_autograd_node()
    if node is None:  # no gradient outside of a backward
        return False
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and str(frame.f_globals.get("__name__")).startswith("eager_offload."):
        frame = frame.f_back
    by_engine = frame is None or frame.f_globals.get("__name__") == "torch.autograd.graph"
    return not by_engine or type(node).__name__ == "CppFunction"


#: Returns a number for the backward that this thread is running, -1 outside.
current_backward: Callable[[], int] = torch._C._current_graph_task_id


def after_backward(call: Callable[[], None]) -> None:
    """Calls ``call``, which must not raise, when the backward that this thread is running is over."""
    torch.autograd.Variable._execution_engine.queue_callback(call)


def node_sequence(node: Any) -> int:
    return int(node._sequence_nr())


# -- hooks for saved tensors ------------------------------------------------------------------------------------------

#: A pack and an unpack hook.
HookFunctions: TypeAlias = tuple[Callable[..., Any], Callable[..., Any]]


def on_backwards(around: Callable[[Any], Callable[..., Any]]) -> Patch:
    """Returns a patch for the function by which ``backward`` and ``grad`` run the engine."""
    return Patch(torch.autograd, "_engine_run_backward", around)


#: Returns the hooks that autograd calls now for saves of the calling thread. The argument is always true.
top_hooks: Callable[[bool], HookFunctions | None] = torch._C._autograd._top_saved_tensors_default_hooks
_put_on_hooks = saved_tensors_hooks.__enter__


def top_pack_hook() -> object | None:
    """Returns the pack hook that autograd calls now for saves of the calling thread."""
    hooks = top_hooks(True)
    return None if hooks is None else hooks[0]


def replace_hooks(change: Callable[[list[HookFunctions]], None]) -> None:
    """Calls ``change`` to edit the list of the calling thread's saved-tensor hooks, the innermost last.

    torch has a stack of hooks and exposes only its top.
    """
    hooks: list[HookFunctions] = []
    try:
        while (pair := top_hooks(True)) is not None:
            saved_tensors_hooks(*pair).__exit__()  # takes the innermost pair off, whoever owns it
            hooks.insert(0, pair)
        change(hooks)
    finally:
        for pair in hooks:
            _put_on_hooks(saved_tensors_hooks(*pair))


def allow_hooks_again() -> None:
    """Ends a ban on saved-tensor hooks, on the calling thread.

    If hooks are in force, ``torch.func`` imposes the ban before it raises its error. Eager code ends the ban
    afterwards; a compiler that traces the same lines does not.
    """
    torch._C._autograd._saved_tensors_hooks_enable()


#: Returns the key under which torch has the saves of a tensor that is changed.
address_and_version: Callable[[Tensor], tuple[int, int]] = torch.autograd.graph._get_sid


def allowing_changes() -> Any | None:
    """Returns the record of ``allow_mutation_on_saved_tensors``, if the calling thread is inside one."""
    for mode in map(mode_at, range(dispatch_modes())):
        if isinstance(mode, torch.autograd.graph._CloneArgBeforeMutateMode):
            return mode.ctx
    return None


# -- checkpointing ----------------------------------------------------------------------------------------------------


def sharing_versions() -> AbstractContextManager[object]:
    """Makes ``detach`` share the version counter in a dispatch mode, as it does everywhere else."""
    guard: AbstractContextManager[object] = torch._C._SetExcludeDispatchKeyGuard(
        torch._C.DispatchKey.ADInplaceOrView, False
    )
    return guard


def on_checkpoints(caching: Callable[[Any, Any, Any], None], cached: Callable[[Any, Any, Any], None]) -> list[Patch]:
    """Returns patches that report the modes of selective checkpointing when a forward begins; none for unknown modes.

    Args:
        caching: is called with the mode of each forward, which fills the store by the policy; the policy; the store.
        cached: is called likewise with the mode of the recomputation, which reads the store.
    """
    module = torch.utils.checkpoint
    kinds: list[type] = [module._CachingTorchDispatchMode, module._CachedTorchDispatchMode]
    if list(inspect.signature(kinds[0]).parameters)[:2] != ["policy_fn", "storage"]:
        return []

    def around(tell: Callable[[Any, Any, Any], None], init: Callable[..., None]) -> Callable[..., None]:
        def __init__(mode: Any, policy_fn: Any, storage: Any, *arguments: Any, **named: Any) -> None:
            init(mode, policy_fn, storage, *arguments, **named)
            tell(mode, policy_fn, storage)

        return __init__

    return [
        Patch(kind, "__init__", functools.partial(around, tell))
        for kind, tell in zip(kinds, (caching, cached), strict=True)
    ]


#: Whether a checkpoint saves its inputs by an autograd node of its own, as in torch 2.11.
checkpoints_have_nodes = hasattr(torch.utils.checkpoint, "_NoopSaveInputs")


def checkpoint_store_key(func: object, args: object) -> object:
    """Returns the key under which selective checkpointing stores the results of the operator ``func``."""
    key = getattr(torch.utils.checkpoint, "_sac_storage_key", None)
    return func if key is None or schema_of(func) is not None else key(func, args)  # for higher-order operators only


# -- profilers --------------------------------------------------------------------------------------------------------

#: Returns whether a profiler of torch runs. Called in each pack and unpack, so not a Python function.
profiler_is_on: Callable[[], bool] = functools.partial(getattr, torch.autograd.profiler, "_is_profiler_enabled")


def profiled(what: str) -> AbstractContextManager[object]:
    """Returns a range of the running profiler."""
    return torch.autograd.profiler.record_function(f"eager_offload::{what}")
