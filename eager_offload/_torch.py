"""Every private name of torch that the library uses, with what it is for. Nothing else imports one.

| name | seen in | without it |
| --- | --- | --- |
| ``torch.autograd._get_sequence_nr`` | 2.11 to 2.15 | the import fails: when a copy may start cannot be told |
| ``torch._C._current_autograd_node`` | 2.11 to 2.15 | a reentrant checkpoint's recomputation is offloaded again |
| ``torch._C._autograd._top_saved_tensors_default_hooks`` | 2.11 to 2.15 | an interrupted enter may leave its hooks |
| ``torch._neg_view`` | 2.11 to 2.15 | the import fails |
| ``torch._C.DisableTorchFunctionSubclass`` | 2.11 to 2.15 | the import fails |
| ``torch._subclasses.fake_tensor.FakeTensor`` | 2.11 to 2.15 | there are none |
| ``torch.distributed._functional_collectives.AsyncCollectiveTensor`` | 2.11 to 2.15 | there are none |
| ``torch._ops.OpOverload``, ``torch.utils._python_dispatch`` | 2.11 to 2.15 | the import fails |
| ``torch.cuda.cudart().cudaHostRegister`` | 2.11 to 2.15 | host memory is pinned by torch, which rounds sizes up |
| ``torch._C._AutoDispatchBelowAutograd`` | 2.11 to 2.15 | the import fails: compiled code could not be served |
| ``torch._functorch._aot_autograd.graph_compile._get_saved_tensor_hook_context`` | 2.11 to 2.15 | not inside graphs |
| ``torch._functorch.partitioners.min_cut_rematerialization_partition`` | 2.11 to 2.15 | compiling fails |
| ``torch._inductor.config``, ``torch._inductor.compile_fx.compile_fx`` | 2.11 to 2.15 | compiling fails |
| ``torch._inductor.custom_graph_pass.CustomGraphPass`` | 2.11 to 2.15 | compiling fails |
| ``torch._inductor.custom_graph_pass.CustomPartitionerFn`` | 2.11 to 2.15 | compiling fails |
| ``torch._inductor.custom_graph_pass.CustomInferenceAwareGraphPass`` | 2.13 on, not 2.11 | not told of inference |
| ``torch._inductor.fx_passes.control_dependencies.preserve_node_ordering`` | 2.11 to 2.15 | compiling fails |
| ``torch._inductor.ir``, ``torch._inductor.virtualized.V`` | 2.11 to 2.15 | compiling fails |
| ``torch._inductor.lowering.make_fallback``, ``torch.utils._ordered_set.OrderedSet`` | 2.11 to 2.15 | compiling fails |
| ``torch._prims_common.make_channels_last_strides_for`` | 2.11 to 2.15 | compiling fails |
| ``torch.utils.checkpoint._CachingTorchDispatchMode`` | 2.11 to 2.15 | what should go to the CPU is recomputed |
| ``torch.utils.checkpoint._CachedTorchDispatchMode`` | 2.11 to 2.15 | what should go to the CPU is recomputed |
| ``torch.utils.checkpoint._is_compiling`` | 2.11 to 2.15 | what should go to the CPU is recomputed |
| ``torch._C._SetExcludeDispatchKeyGuard`` | 2.11 to 2.15 | what should go to the CPU is recomputed |
| ``torch.utils.checkpoint._sac_storage_key`` | 2.13 on, not 2.11 | operators name their values themselves |
| ``torch.utils._pytree`` | 2.11 to 2.15 | the import fails |
| ``torch._C._dynamo.eval_frame.set_code_exec_strategy`` | 2.11 to 2.13 | broken graphs: the library is compiled too |
| ``torch.fx.Graph._codegen`` | 2.11 to 2.15 | copies of graphs take their inputs flat |
| ``torch.utils.checkpoint._checkpoint_hook`` | 2.11 to 2.15 | checkpointing counts as a foreign hook |
| ``torch.utils.checkpoint._recomputation_hook`` | 2.11 to 2.15 | checkpointing counts as a foreign hook |
| ``torch.nn.Module._compiled_call_impl`` | 2.11 to 2.15 | integrations through a module's calls fail |
| ``torch.nn.Module._call_impl`` | 2.11 to 2.15 | integrations through a module's calls fail |
| ``torch.distributed.algorithms._checkpoint.checkpoint_wrapper.OffloadWrapper`` | 2.11 to 2.15 | not told of |
| ``torch._C._current_graph_task_id`` | 2.11 to 2.15 | traces do not show backward |
| ``torch.autograd.Variable._execution_engine`` | 2.11 to 2.15 | a backward has no end in traces |
| ``torch.autograd.profiler._is_profiler_enabled`` | 2.11 to 2.15 | profiles have no ranges of the library |

The compiler's are imported when something is compiled, and eager code does not notice that they are not there. Without
the context of hooks compiled code is offloaded around its graphs. ``python -m eager_offload.doctor`` reads this table.
"""

from __future__ import annotations

import copy
import importlib
import inspect
import sys
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
import torch.utils.checkpoint
from torch import Tensor, nn
from torch._ops import HigherOrderOperator, OpOverload
from torch.fx import Graph
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _disable_current_modes,
    is_traceable_wrapper_subclass,
)
from torch.utils._pytree import tree_iter

if TYPE_CHECKING:
    import torch._inductor.config as inductor_config
    import torch._inductor.ir as inductor_ir
    from torch._functorch.partitioners import min_cut_rematerialization_partition
    from torch._inductor.compile_fx import compile_fx
    from torch._inductor.custom_graph_pass import CustomGraphPass, CustomInferenceAwareGraphPass, CustomPartitionerFn
    from torch._inductor.fx_passes.control_dependencies import preserve_node_ordering
    from torch._inductor.lowering import make_fallback
    from torch._inductor.virtualized import V
    from torch._prims_common import make_channels_last_strides_for as channels_last_strides
    from torch.utils._ordered_set import OrderedSet

__all__ = [
    "CustomGraphPass",
    "CustomInferenceAwareGraphPass",
    "CustomPartitionerFn",
    "HigherOrderOperator",
    "HostRegistration",
    "OpOverload",
    "OrderedSet",
    "TorchDispatchMode",
    "V",
    "after_backward",
    "autograd_sequence",
    "below_autograd",
    "channels_last_strides",
    "checkpoint_hooks",
    "checkpoint_is_traced",
    "checkpoint_modes",
    "checkpoint_store_key",
    "compile_fx",
    "compiler_asks_hooks",
    "compiler_is_loaded",
    "configure_inductor",
    "current_autograd_node",
    "current_backward",
    "detached",
    "fake_mode_of",
    "finish_collective",
    "has_compiled",
    "hide_from_compilers",
    "host_registration",
    "inductor_config",
    "inductor_ir",
    "inductor_options",
    "is_fake",
    "is_plain_fake",
    "is_wrapper",
    "keep_side_effects",
    "library",
    "make_fallback",
    "min_cut_rematerialization_partition",
    "module_call",
    "neg_view",
    "node_sequence",
    "offloaded_modules",
    "own_call",
    "preserve_node_ordering",
    "profiled",
    "profiler_is_on",
    "replace_checkpoint_modes",
    "require_torch",
    "saved_tensor_hook_context",
    "set_module_call",
    "share_calling_convention",
    "sharing_versions",
    "top_pack_hook",
    "tree_iter",
    "weak_storage",
    "without_dispatch_modes",
]

_OLDEST = (2, 11)
_profiler: Any = torch.autograd.profiler


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


def sharing_versions() -> AbstractContextManager[object]:
    """Has ``detach`` share the version counter in a dispatch mode, as it does everywhere else."""
    guard: AbstractContextManager[object] = torch._C._SetExcludeDispatchKeyGuard(
        torch._C.DispatchKey.ADInplaceOrView, False
    )
    return guard


class CheckpointModes(NamedTuple):
    """The classes of the dispatch modes of selective checkpointing."""

    caching: type
    """In force in the forward: keeps what the policy says."""
    cached: type
    """In force when the forward runs again: gives it out."""


def checkpoint_modes() -> CheckpointModes | None:
    """What selective checkpointing uses now; ``None`` where this torch has other ways."""
    module: Any = torch.utils.checkpoint
    caching, cached = (getattr(module, name, None) for name in _CHECKPOINT_MODES)
    if caching is None or cached is None or not hasattr(module, "_is_compiling"):
        return None
    if not hasattr(torch._C, "_SetExcludeDispatchKeyGuard"):
        return None
    takes = list(inspect.signature(caching).parameters)
    return CheckpointModes(caching, cached) if takes[:2] == ["policy_fn", "storage"] else None


def replace_checkpoint_modes(caching: type, cached: type) -> None:
    """Has selective checkpointing use these."""
    for name, mode in zip(_CHECKPOINT_MODES, (caching, cached), strict=True):
        setattr(torch.utils.checkpoint, name, mode)


_CHECKPOINT_MODES = ("_CachingTorchDispatchMode", "_CachedTorchDispatchMode")


def checkpoint_is_traced(func: object, args: object, kwargs: object) -> bool:
    """Whether a compiler is tracing what runs under selective checkpointing."""
    module: Any = torch.utils.checkpoint
    return bool(module._is_compiling(func, args, kwargs))


def checkpoint_store_key(func: object, args: object) -> object:
    """Under what selective checkpointing keeps the results of the operator ``func``."""
    key = getattr(torch.utils.checkpoint, "_sac_storage_key", None)
    return func if key is None else key(func, args)


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


#: Has operators run by what lies below autograd.
below_autograd: Callable[[], AbstractContextManager[object]] = torch._C._AutoDispatchBelowAutograd


def keep_side_effects(operation: OpOverload) -> None:
    """Tells graphs that calls of ``operation`` do something even if nobody uses the result."""
    torch.fx.has_side_effect(operation)


def saved_tensor_hook_context() -> dict[str, Any] | None:
    """While AOTAutograd traces saved-tensor hooks on the calling thread: which value it asks about, in which graphs.

    ``_node``, ``_fw_graph`` and ``_bw_graph``.
    """
    module = sys.modules.get("torch._functorch._aot_autograd.graph_compile")  # what was not imported traces nothing
    context = getattr(module, "_get_saved_tensor_hook_context", None)
    return None if context is None else context()


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


def library(namespace: str, kind: str = "DEF") -> Any:
    """Defines operators: those of a ``namespace``, or as a ``"FRAGMENT"`` more of one that is defined elsewhere."""
    return torch.library.Library(namespace, kind)  # type: ignore[no-untyped-call]  # torch declares no types for it


def is_fake(kind: type) -> bool:
    """Whether tensors of this type have no bytes, though their device looks real."""
    module = sys.modules.get("torch._subclasses.fake_tensor")  # never imported: there are none
    fake = getattr(module, "FakeTensor", None)
    return fake is not None and issubclass(kind, fake)


def is_plain_fake(value: Tensor) -> bool:
    """Whether ``value`` is what tracers put in the place of a plain tensor."""
    return type(value) is Tensor or is_fake(type(value))


def share_calling_convention(graph: Graph, other: Graph) -> None:
    """Has ``graph`` take its inputs and give its outputs as ``other`` does: flat, or nested."""
    codegen = getattr(other, "_codegen", None)
    if codegen is not None:
        graph.set_codegen(copy.copy(codegen))


def fake_mode_of(value: Tensor) -> AbstractContextManager[object]:
    """Makes fake tensors of the kind that ``value`` is."""
    return getattr(value, "fake_mode", None) or nullcontext()


def finish_collective(tensor: Tensor) -> None:
    """Makes the current stream wait for the functional collective that fills ``tensor``, if it is of that kind.

    Whoever reads such a tensor does the same first; it may be done any number of times.
    """
    module = sys.modules.get("torch.distributed._functional_collectives")  # never imported: it has made no tensor
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


#: Where the names of the compiler are. Importing it takes a second, so nobody does before something is compiled.
_OF_THE_COMPILER = {
    "CustomGraphPass": "torch._inductor.custom_graph_pass",
    "CustomInferenceAwareGraphPass": "torch._inductor.custom_graph_pass",
    "CustomPartitionerFn": "torch._inductor.custom_graph_pass",
    "OrderedSet": "torch.utils._ordered_set",
    "V": "torch._inductor.virtualized",
    "channels_last_strides": "torch._prims_common",
    "compile_fx": "torch._inductor.compile_fx",
    "inductor_config": "torch._inductor.config",
    "inductor_ir": "torch._inductor.ir",
    "make_fallback": "torch._inductor.lowering",
    "min_cut_rematerialization_partition": "torch._functorch.partitioners",
    "preserve_node_ordering": "torch._inductor.fx_passes.control_dependencies",
}
#: What torch calls some of them.
_OTHER_NAMES = {"channels_last_strides": "make_channels_last_strides_for"}


def __getattr__(name: str) -> Any:
    """Imports a name of the compiler when it is first asked for."""
    module = _OF_THE_COMPILER.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value: Any = importlib.import_module(module)
    if name == "CustomInferenceAwareGraphPass" and not hasattr(value, name):
        value = type(name, (value.CustomGraphPass,), {})  # a kind that nobody else's pass is of
    elif not name.startswith("inductor_"):  # those are modules
        value = getattr(value, _OTHER_NAMES.get(name, name))
    globals()[name] = value
    return value


def configure_inductor(name: str, value: object) -> None:
    """Sets an option of Inductor for all threads: autograd compiles backward graphs on threads of its own.

    2.11 has one value for the process; later ones have one for each context, and a default that new threads begin with.
    """
    config = importlib.import_module("torch._inductor.config")
    setattr(config, name, value)
    entry: Any = getattr(config, "_config", {}).get(name)
    if isinstance(getattr(entry, "user_override", None), ContextVar):
        entry.default = value


def inductor_options() -> frozenset[str]:
    """The names of all options that Inductor has."""
    return frozenset(importlib.import_module("torch._inductor.config").get_config_copy())


def compiler_asks_hooks() -> bool:
    """Whether AOTAutograd puts saved-tensor hooks into its graphs and tells them what they are asked about."""
    try:
        module = importlib.import_module("torch._functorch._aot_autograd.graph_compile")
    except ImportError:
        return False
    return hasattr(module, "_get_saved_tensor_hook_context")


def has_compiled() -> bool:
    """Whether anything in this process has been compiled: autograd then has nodes of which no saved tensor is seen."""
    module = sys.modules.get("torch._dynamo.utils")
    return module is not None and module.counters["stats"]["unique_graphs"] > 0


def compiler_is_loaded() -> bool:
    """Whether anything in this process may have been compiled."""
    return "torch._dynamo" in sys.modules


def hide_from_compilers(function: Callable[..., Any]) -> None:
    """Has Dynamo leave the code of ``function`` alone, and all that it calls: where a graph is broken, it would compile
    whatever autograd calls. Closures share their code."""
    frames: Any = getattr(getattr(torch._C, "_dynamo", None), "eval_frame", None)
    try:
        as_it_is = frames._FrameExecStrategy(frames._FrameAction.SKIP, frames._FrameAction.SKIP)
        frames.set_code_exec_strategy(function.__code__, as_it_is)
    except AttributeError:
        pass  # what the table says


def offloaded_modules(model: nn.Module) -> list[str]:
    """The names of the modules in ``model`` that torch's ``offload_wrapper`` stands around: all that is saved inside of
    them goes to host memory."""
    wrappers = sys.modules.get("torch.distributed.algorithms._checkpoint.checkpoint_wrapper")  # never imported: none
    wrapper = getattr(wrappers, "OffloadWrapper", ())
    return [name for name, module in model.named_modules() if isinstance(module, wrapper)]


def profiler_is_on() -> bool:
    """Whether a profiler of torch's runs."""
    return getattr(_profiler, "_is_profiler_enabled", False)


def profiled(what: str) -> AbstractContextManager[object]:
    """A range of the running profiler."""
    return torch.autograd.profiler.record_function(f"eager_offload::{what}")


#: Names the backward that this thread is running, -1 outside.
current_backward: Callable[[], int] = getattr(torch._C, "_current_graph_task_id", lambda: -1)


def after_backward(call: Callable[[], None]) -> None:
    """Has ``call`` called when the backward that this thread is running is over; it must not raise."""
    engine: Any = getattr(torch.autograd.Variable, "_execution_engine", None)
    if engine is not None:
        engine.queue_callback(call)


def node_sequence(node: Any) -> int:
    """When an autograd node was made: its number in the count of the thread that made it."""
    return int(node._sequence_nr())


def module_call(module: nn.Module) -> Callable[..., Any] | None:
    """What is called for ``module`` in place of its own way, such as what ``module.compile()`` has put there."""
    return module._compiled_call_impl


def own_call(module: nn.Module) -> Callable[..., Any]:
    """What torch calls for ``module`` where nothing has been put in its place: forward and its hooks."""
    return module._call_impl


def set_module_call(module: nn.Module, call: Callable[..., Any] | None) -> None:
    """Has ``call`` called for ``module``; ``None`` for the module's own way. Copies and pickles of it leave it out."""
    if call is None and "_compiled_call_impl" in vars(module):
        del vars(module)["_compiled_call_impl"]
    else:
        vars(module)["_compiled_call_impl"] = call
