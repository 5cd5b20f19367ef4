"""The private names of torch that the library uses. No other module imports one.

The compiler's names are imported when code is compiled, so eager code works without them. If torch does not inline
hooks, compiled code is offloaded around its graphs.
"""

from __future__ import annotations

import copy
import functools
import importlib
import inspect
import pkgutil
import sys
import weakref
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from contextvars import ContextVar
from operator import attrgetter
from types import FrameType, FunctionType
from typing import TYPE_CHECKING, Any, NamedTuple, Self, TypeAlias, cast

import torch
import torch.utils.checkpoint
from torch import Tensor, nn
from torch._ops import HigherOrderOperator, OpOverload
from torch.autograd.graph import saved_tensors_hooks
from torch.fx import Graph, GraphModule, Node
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _disable_current_modes,
    is_traceable_wrapper_subclass,
)
from torch.utils._pytree import TreeSpec, keystr, tree_flatten_with_path, tree_iter, tree_map, tree_unflatten

if TYPE_CHECKING:
    import torch._inductor.config as inductor_config
    import torch._inductor.ir as inductor_ir
    from torch._dynamo.eval_frame import OptimizedModule
    from torch._inductor.compile_fx import compile_fx
    from torch._inductor.custom_graph_pass import CustomGraphPass, CustomInferenceAwareGraphPass
    from torch._inductor.fx_passes.control_dependencies import preserve_node_ordering
    from torch._inductor.lowering import make_fallback
    from torch._inductor.virtualized import V
    from torch._subclasses.fake_tensor import FakeTensorMode

#: Names that every torch from 2.11 to 2.15 has, in each build. Any other name is probed where it is used, and there is
#: a way without it.
NAMES = (
    "torch:_C._autograd._get_current_graph_task_keep_graph",
    "torch:_C._autograd._saved_tensors_hooks_disable",
    "torch:_C._autograd._saved_tensors_hooks_enable",
    "torch:_C._autograd._top_saved_tensors_default_hooks",
    "torch:_C._current_autograd_node",
    "torch:_C._current_graph_task_id",
    "torch:_C._get_dispatch_stack_at",
    "torch:_C._len_torch_dispatch_stack",
    "torch:_C._len_torch_function_stack",
    "torch:_C._SetExcludeDispatchKeyGuard",
    "torch:_neg_view",
    "torch:_ops.HigherOrderOperator",
    "torch:_ops.OpOverload",
    "torch:autograd._engine_run_backward",
    "torch:autograd._get_sequence_nr",
    "torch:autograd.graph._CloneArgBeforeMutateMode",
    "torch:autograd.graph._get_sid",
    "torch:autograd.profiler._is_profiler_enabled",
    "torch:autograd.Variable._execution_engine",
    "torch:cuda._compile_kernel",
    "torch:jit._recursive.ignored_attributes",
    "torch:nn.Module._call_impl",
    "torch:nn.Module._compiled_call_impl",
    "torch:ops.aten._scaled_dot_product_attention_math",
    "torch:ops.aten._scaled_dot_product_efficient_attention",
    "torch:ops.aten._scaled_dot_product_flash_attention",
    "torch:Tensor._base",
    "torch:Tensor._make_subclass",
    "torch:Tensor._use_count",
    "torch:Tensor._version",
    "torch:utils._python_dispatch._disable_current_modes",
    "torch:utils._pytree",
    "torch:utils.checkpoint._CachedTorchDispatchMode",
    "torch:utils.checkpoint._CachingTorchDispatchMode",
)

_OLDEST = (2, 11)


def require_torch(version: str = torch.__version__, names: Iterable[str] = NAMES) -> None:
    """Raises ``ImportError`` if torch is too old, or has not all ``names``."""
    if release_of(version) < _OLDEST:
        raise ImportError(
            f"eager_offload needs torch {_OLDEST[0]}.{_OLDEST[1]} or newer, but {version} is installed: upgrade torch"
        )
    for name in names:
        try:
            pkgutil.resolve_name(name)
        except (ImportError, AttributeError) as error:
            raise ImportError(
                f"eager_offload needs {name.replace(':', '.')}, which torch 2.11 to 2.15 have and {version} has not: "
                "install one of those"
            ) from error


def release_of(version: str) -> tuple[int, ...]:
    """Returns the first two numbers of a version."""
    return tuple(int(part) for part in version.split("+")[0].split(".")[:2])


require_torch()


# -- replaced attributes of torch -------------------------------------------------------------------------------------


class Patch:
    """A replacement for an attribute of torch, while it is put on.

    Args:
        owner: the module, the class or the object with the attribute, which may come from the object's class.
        around: makes the replacement from the present value: torch's own, or that of another library.
    """

    def __init__(self, owner: object, name: str, around: Callable[[Any], object]) -> None:
        self._owner, self._name, self._around = owner, name, around
        #: Made once, since it may refer to itself: a new one each time would be garbage in a cycle.
        self._ours: object = None
        self._theirs: object = None
        #: Whether the owner itself has the attribute, and not its class.
        self._is_own = True
        #: The replacement, while it is put on.
        self.active: object = None

    def put_on(self) -> None:
        """Puts the replacement in place."""
        current = getattr(self._owner, self._name)
        if current is not self._ours and (self._ours is None or current is not self._theirs):
            self._theirs, self._ours = current, self._around(current)
            self._is_own = self._name in vars(self._owner)
        self.active = self._ours
        setattr(self._owner, self._name, self._ours)

    def take_off(self) -> None:
        """Restores the attribute. If another library has wrapped ours meanwhile, its wrapper stays and goes on calling
        it."""
        self.active = None
        if getattr(self._owner, self._name) is not self._ours:
            return
        if self._is_own:
            setattr(self._owner, self._name, self._theirs)
        else:
            delattr(self._owner, self._name)


def if_imported(module: str, name: str) -> Any:
    """Returns a name of a module; ``None`` if nothing has imported it, so that no object of the kind can exist."""
    return getattr(sys.modules.get(module), name, None)


# -- autograd: its nodes, its backwards -------------------------------------------------------------------------------

#: Returns the number of the next autograd node of this thread. It grows when an operator's node is made, after the
#: operator has packed its inputs: a larger number at a later pack shows that the operator has run.
autograd_sequence: Callable[[], int] = torch.autograd._get_sequence_nr  # type: ignore[attr-defined]  # in no stub


#: Returns the autograd node that this thread is running backward for, or ``None``.
current_autograd_node: Callable[[], object | None] = torch._C._current_autograd_node

#: Returns whether the backward that this thread runs keeps its graph; to be called within a backward only.
keeps_graph: Callable[[], bool] = torch._C._autograd._get_current_graph_task_keep_graph


def asker_may_return_it() -> bool:
    """Returns whether the unpack may be for code that makes the saved tensor a gradient: a custom function or a hook.

    Nodes with a formula of torch's unpack from the engine, above which there is no Python frame but torch's own call.
    """
    node = current_autograd_node()
    if node is None:  # outside of a backward nothing is about to become a gradient
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
    """Returns the number that an autograd node had when its thread made it."""
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

    torch keeps them as a stack of which only the top can be seen and taken off.
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


# -- modes that the caller is in --------------------------------------------------------------------------------------

#: Runs operators out of sight of the dispatch modes that the caller has active.
without_dispatch_modes: Callable[[], AbstractContextManager[object]] = _disable_current_modes

#: Runs operators out of sight of the caller's function modes and of ``__torch_function__`` of subclasses.
without_torch_function: Callable[[], AbstractContextManager[object]] = torch.DisableTorchFunction

#: Return the number of dispatch modes, and of function modes, that the calling thread is in.
dispatch_modes: Callable[[], int] = torch._C._len_torch_dispatch_stack
function_modes: Callable[[], int] = torch._C._len_torch_function_stack

#: Returns that mode of the calling thread, the outermost at 0.
mode_at: Callable[[int], TorchDispatchMode] = torch._C._get_dispatch_stack_at


def is_tracing() -> bool:
    """Returns whether the calling thread's operators are traced, so that tensors may stand for others or have no bytes.

    Tracers know values by the very tensors that operators returned, and not by other aliases of them.
    """
    return any(mode_at(number).is_infra_mode() for number in range(dispatch_modes()))


def is_proxied() -> bool:
    """Returns whether the calling thread is being traced into a graph of operators."""
    tracer = if_imported("torch.fx.experimental.proxy_tensor", "get_proxy_mode")
    return tracer is not None and tracer() is not None


def without_caller_modes() -> AbstractContextManager[object]:
    """Runs operators out of sight of the caller's active modes: a count of operations, a tracer, a default device.

    Torch's CUDA sanitizer stays active, and so do modes with a true attribute ``sees_offloading``.

    [Note: who sees the library] A mode that counts, traces or replaces operators is about the *program*'s computation,
    of which the library is no part. The sanitizer is about the order in which *streams* access memory. The library's
    streams, events and allocations are reported to it whatever modes are off; without the accesses in between it could
    find no race of a copy with the program's kernels.
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
        for mode in seeing:  # by the base class: their own `__enter__` may begin another count, or the like
            enter(mode)
            stack.callback(leave, mode, None, None, None)
        yield


# -- tensors and storages ---------------------------------------------------------------------------------------------


def is_out_of_memory(error: Exception) -> bool:
    """Returns whether a device, or the CPU, had no memory for a tensor: torch has an error of its own for the former
    only."""
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
    """Returns the dictionary ``vars(tensor)`` itself, without a call of a subclass's code."""
    found: dict[str, Any] = object.__getattribute__(tensor, "__dict__")
    return found


def unseen_version(tensor: Tensor) -> int:
    """Returns the version of a tensor whose subclass is not to see the call."""
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


#: The inverse: builds the nested values from leaves and structure.
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

    A size that depends on data (``nonzero``, ``mark_unbacked``) has no such number; ``default`` stands for it, which is
    large, as in Inductor.
    """
    if isinstance(number, int):
        return number
    if number.node.has_hint():
        return int(number.node.hint)
    expression = getattr(number.node, "expr", None)  # the length of ragged rows is no expression
    return default if expression is None else int(expression.xreplace(dict.fromkeys(expression.free_symbols, default)))


def fake_mode_of(value: Tensor | None) -> AbstractContextManager[object]:
    """Returns the mode that makes fake tensors of the kind of ``value``."""
    return getattr(value, "fake_mode", None) or nullcontext()


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


def checkpoint_store_key(func: object, args: object) -> object:
    """Returns the key under which selective checkpointing stores the results of the operator ``func``."""
    key = getattr(torch.utils.checkpoint, "_sac_storage_key", None)
    return func if key is None or schema_of(func) is not None else key(func, args)  # it asks higher-order ones alone


# -- devices, streams, captured graphs --------------------------------------------------------------------------------


class HostRegistration(NamedTuple):
    """The driver's calls that pin existing memory; each returns 0, or the number of an error."""

    #: Address, bytes and flags.
    register: Callable[[int, int, int], object]
    #: The address.
    unregister: Callable[[int], object]


def host_registration() -> HostRegistration | None:
    """Returns the calls that pin memory not allocated by torch; ``None`` if this torch or this machine has none."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    # Devices of other makers have CUDA's call, or none.
    cudart = None if accelerator is None else getattr(torch.get_device_module(accelerator), "cudart", None)
    if cudart is None:
        return None
    runtime = cudart()
    register, unregister = (getattr(runtime, name, None) for name in ("cudaHostRegister", "cudaHostUnregister"))
    return None if register is None or unregister is None else HostRegistration(register, unregister)


def accelerator_in_use() -> bool:
    """Returns whether this process uses an accelerator already, without initializing one."""
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is None:
        return False
    module = torch.get_device_module(accelerator)
    return bool(getattr(module, "is_initialized", module.is_available)())


def is_capturing(index: int | None) -> bool:
    """Returns whether the calling thread's current stream is being captured into a graph.

    Args:
        index: the index of an accelerator in use; ``None`` for the selected one.
    """
    if hasattr(torch.Stream, "is_capturing"):
        return torch.accelerator.current_stream(index).is_capturing()
    asks: Callable[[], bool] = getattr(torch.get_device_module(), "is_current_stream_capturing", bool)
    return asks()


def stream_is_capturing(stream: torch.Stream) -> bool:
    """Returns whether ``stream``, of an accelerator in use, is being captured into a graph."""
    if hasattr(torch.Stream, "is_capturing"):
        return stream.is_capturing()
    before = torch.accelerator.current_stream(stream.device_index)
    selected = torch.accelerator.current_device_index()
    torch.accelerator.set_stream(stream)  # and its device
    try:
        return is_capturing(stream.device_index)
    finally:
        torch.accelerator.set_stream(before)
        torch.accelerator.set_device_index(selected)


@functools.cache
def graph_kind() -> type[Any] | None:
    """Returns the class of graphs for the accelerator of this process; ``None`` if this torch has none.

    It is ``torch.accelerator.Graph`` from 2.13 on if the backend has registered one (CUDA has not, to 2.13), else
    ``torch.cuda.CUDAGraph``.
    """
    kind: Any = getattr(torch.accelerator, "Graph", None)
    with suppress(RuntimeError, NotImplementedError):
        if kind is not None and kind() is not None:
            return cast(type[Any], kind)
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return torch.cuda.CUDAGraph if accelerator is not None and accelerator.type == "cuda" else None


def new_graph(keep: bool) -> Any:
    """Returns an empty graph. With ``keep`` it can be dumped, and its first replay instantiates it."""
    kind = graph_kind()
    assert kind is not None
    graph = kind(keep_graph=keep)
    if keep and graph_memory_pool() is None:  # on CUDA that is a mode of the process, in which graphs leak
        graph.enable_debug_mode()
    return graph


def graph_memory_pool() -> tuple[int, int] | None:
    """Returns a handle of memory that graphs share, for CUDA; other backends name it when a capture begins."""
    accelerator = torch.accelerator.current_accelerator()
    return torch.cuda.graph_pool_handle() if accelerator is not None and accelerator.type == "cuda" else None


def begin_graph(graph: Any, memory: tuple[int, int] | None, mode: str) -> None:
    """Begins to capture the current stream of the selected device into ``graph``."""
    if isinstance(graph, torch.cuda.CUDAGraph):
        graph.capture_begin(cast(Any, memory), mode)
    else:
        graph.graph_pool, graph.capture_error_mode = memory, mode
        graph.capture_begin()


def forget_workspaces() -> None:
    """Frees cuBLAS's workspaces: torch has one for each stream and thread of CUDA, and a graph keeps its address.

    If the first product of a capture finds no workspace, the graph has one of its own; if none is left behind the
    capture, no product of eager code or of another graph uses it. In 2.13 a graph that goes takes the workspace of its
    stream along, whichever graphs use it (pytorch#193402).
    """
    clear: Callable[[], None] | None = getattr(torch._C, "_cuda_clearCublasWorkspaces", None)
    if clear is not None:  # in builds for CUDA
        clear()


def release_failed_graph(graph: Any, index: int, memory: tuple[int, int] | None, *, ended: bool) -> None:
    """Gives back the memory of a graph whose capture has failed, at its end if ``ended``, else at its beginning.

    Up to 2.13 torch keeps the device memory of such a graph on CUDA for good (pytorch#180395, #190308). In 2.11 the
    allocator and the generator go on as if the capture were under way (pytorch#171263), and the generator refuses to
    draw in eager code. Builds for ROCm were fixed without a new version.
    """
    graph.reset()
    release = release_of(torch.__version__)
    if memory is None or torch.version.hip is not None or release > (2, 13):
        return
    with suppress(RuntimeError):
        torch._C._cuda_endAllocateToPool(index, memory)  # raises where the allocator knows that the capture is over
        ended = True
    if ended:
        with suppress(RuntimeError):
            torch._C._cuda_releasePool(index, memory)
    if release < (2, 13):
        _never_ended.append(graph)
        _end_capture_of_generator(index)


#: Graphs that must not be freed: torch's allocator of pinned memory asks them, by address, whether a stream is
#: captured.
_never_ended: list[Any] = []


def _end_capture_of_generator(index: int) -> None:
    """Captures a graph of one kernel, after which the generator of a device does not take a capture to be under way."""
    graph, of_cuda = torch.cuda.CUDAGraph(), cast(Any, torch.cuda)
    with suppress(RuntimeError), torch.cuda.stream(of_cuda.Stream(index)):
        cell = torch.empty(1, device=torch.device("cuda", index))
        graph.capture_begin(capture_error_mode="thread_local")
        cell.zero_()
        graph.capture_end()
    graph.reset()


@contextmanager
def overriding_stale_streams() -> Iterator[None]:
    """Makes a captured backward run on the stream of the capture, although a node, such as that of a parameter, was
    made on another stream earlier: to wait for that stream would invalidate the capture (pytorch#180090).
    """
    if not hasattr(torch._C, "_set_override_stale_capture_stream"):
        yield
        return
    before = torch._C._override_stale_capture_stream()
    torch._C._set_override_stale_capture_stream(True)
    try:
        yield
    finally:
        torch._C._set_override_stale_capture_stream(before)


# -- operators --------------------------------------------------------------------------------------------------------


def schema_of(target: object) -> Any:
    """Returns the schema of an operator; ``None`` if ``target`` is not an operator."""
    return getattr(target, "_schema", None)


#: The attentions of CUDA, and the one of which parts are operators of their own.
flash_attention: Any = torch.ops.aten._scaled_dot_product_flash_attention
efficient_attention: Any = torch.ops.aten._scaled_dot_product_efficient_attention
attention_in_parts: Any = torch.ops.aten._scaled_dot_product_attention_math


#: Defines operators: those of a namespace (``"DEF"``), or more of one that is defined elsewhere (``"FRAGMENT"``).
library: Callable[[str, str], Any] = torch.library.Library  # which has no types


# -- modules ----------------------------------------------------------------------------------------------------------

#: The code of frames in which a module is called.
_CALL = torch.nn.Module._call_impl.__code__
#: How many frames up to look for a module: mostly its forward calls the operator itself.
_MOST_FRAMES = 24


def module_called_in(frame: FrameType) -> torch.nn.Module | None:
    """Returns the module whose forward ``frame`` calls; ``None`` for any other frame.

    The locals of other frames are not read: that would keep them, the user's tensors, until the frame ends.
    """
    return frame.f_locals["self"] if frame.f_code is _CALL else None


def no_module() -> None:
    """Stands for a weak reference to a module that is not known."""


def module_reference() -> Callable[[], torch.nn.Module | None]:
    """Returns a weak reference to the innermost module whose forward the calling thread runs, if its frame is near."""
    frame: FrameType | None = sys._getframe(1)
    for _ in range(_MOST_FRAMES):
        if frame is None:
            break
        if frame.f_code is _CALL:
            return weakref.ref(frame.f_locals["self"])
        frame = frame.f_back
    return no_module


def _as_another(function: Any) -> Any:
    """Returns a function that does the same as the one that Dynamo knows, and is another object."""
    known = getattr(sys.modules.get("torch._dynamo.utils"), "unpatched_nn_module_call", None)
    if function is not known or not isinstance(function, FunctionType):
        return function
    code, names, cells = function.__code__, function.__globals__, function.__closure__
    return functools.update_wrapper(FunctionType(code, names, None, function.__defaults__, cells), function)


#: Has Dynamo look at the replaced calls of modules. It goes straight to the forward of a module that has no hooks, if
#: ``nn.Module.__call__`` is the function that it knows.
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


# -- models that are sharded or wrapped, collectives ------------------------------------------------------------------


class ShardedGroup(NamedTuple):
    """Parameters that ``fully_shard`` gathers together."""

    modules: tuple[nn.Module, ...]
    """Those that were sharded in one call."""
    parameters: tuple[Tensor, ...]
    """The shards."""
    frees: bool
    """Whether the gathered parameters are freed between forward and backward."""
    policy: Any
    """A ``torch.distributed.fsdp.MixedPrecisionPolicy``."""


def is_distributed(tensor: Tensor) -> bool:
    """Returns whether ``tensor`` is a ``DTensor``."""
    kind = if_imported("torch.distributed.tensor", "DTensor")
    return kind is not None and isinstance(tensor, kind)


def is_fully_sharded(module: nn.Module) -> bool:
    """Returns whether ``fully_shard`` was called with ``module``."""
    kind = if_imported("torch.distributed.fsdp", "FSDPModule")
    return kind is not None and isinstance(module, kind)


def sharded_groups(model: nn.Module) -> list[ShardedGroup]:
    """Returns the groups of parameters of ``model`` that ``fully_shard`` gathers, in the order of its modules."""
    groups: dict[int, Any] = {}
    for module in model.modules():
        if is_fully_sharded(module):
            group = cast(Any, module)._get_fsdp_state()._fsdp_param_group
            if group is not None:  # modules inside have all of its parameters
                groups[id(group)] = group
    return [
        ShardedGroup(
            tuple(group.modules),
            tuple(one.sharded_param for one in group.fsdp_params),
            group.post_forward_mesh_info is not None,
            group.mp_policy,
        )
        for group in groups.values()
    ]


def without_sharding(module: nn.Module) -> tuple[nn.Module, dict[str, Any]]:
    """Returns a bare module of the class that ``module`` had before ``fully_shard``, and the attributes of ``module``
    without those of ``fully_shard``, its hooks on forward among them."""
    kept = dict(vars(module))
    kept.pop("_compiled_call_impl", None)  # which calls `module`, and a plan runs what it compiles as it is written
    for name, one in kept.items():
        if isinstance(one, OrderedDict):  # hooks, or states of functions such as `fully_shard`
            kept[name] = OrderedDict(
                (key, value)
                for key, value in one.items()
                if isinstance(value, nn.Module)
                or not str(getattr(value, "__module__", "")).startswith("torch.distributed.fsdp.")
            )
    kind: type[nn.Module] = type(module).__mro__[2]
    return kind.__new__(kind), kept


def offloaded_modules(model: nn.Module) -> list[str]:
    """Returns the names of the modules in ``model`` with torch's ``offload_wrapper``, which moves all their saves to
    host memory."""
    wrapper = if_imported("torch.distributed.algorithms._checkpoint.checkpoint_wrapper", "OffloadWrapper")
    return [name for name, module in model.named_modules() if wrapper is not None and isinstance(module, wrapper)]


def is_collective(tensor: Tensor) -> bool:
    """Returns whether ``tensor`` is the result of a functional collective for which nothing has waited yet."""
    kind = if_imported("torch.distributed._functional_collectives", "AsyncCollectiveTensor")
    return kind is not None and isinstance(tensor, kind)


def finish_collective(tensor: Tensor) -> None:
    """Makes the current stream wait for the functional collective that fills ``tensor``, if there is one.

    Every reader of such a tensor waits first; repeated waits do nothing.
    """
    if is_collective(tensor):
        cast(Any, tensor).trigger_wait()


# -- profilers --------------------------------------------------------------------------------------------------------

#: Returns whether a profiler of torch runs. Each pack and unpack asks, so it is not a Python function.
profiler_is_on: Callable[[], bool] = functools.partial(getattr, torch.autograd.profiler, "_is_profiler_enabled")


def profiled(what: str) -> AbstractContextManager[object]:
    """Returns a range of the running profiler."""
    return torch.autograd.profiler.record_function(f"eager_offload::{what}")


# -- the compiler -----------------------------------------------------------------------------------------------------

#: The same for the compiler, by the names here: they are imported on first use, since that takes a second.
NAMES_OF_COMPILER = {
    "CustomGraphPass": "torch._inductor.custom_graph_pass:CustomGraphPass",
    "FakeTensorMode": "torch._subclasses.fake_tensor:FakeTensorMode",
    "OptimizedModule": "torch._dynamo.eval_frame:OptimizedModule",
    "V": "torch._inductor.virtualized:V",
    "compile_fx": "torch._inductor.compile_fx:compile_fx",
    "get_decompositions": "torch._decomp:get_decompositions",
    "inductor_config": "torch._inductor.config",
    "inductor_ir": "torch._inductor.ir",
    "make_fallback": "torch._inductor.lowering:make_fallback",
    "preserve_node_ordering": "torch._inductor.fx_passes.control_dependencies:preserve_node_ordering",
}


def __getattr__(name: str) -> Any:
    """Imports a name of the compiler on first use."""
    if name == "CustomInferenceAwareGraphPass":  # 2.11 has none; then a class of which no other library has a pass
        theirs = importlib.import_module("torch._inductor.custom_graph_pass")
        value: Any = getattr(theirs, name, None) or type(name, (theirs.CustomGraphPass,), {})
    elif (dotted := NAMES_OF_COMPILER.get(name)) is not None:
        require_torch(names=[dotted])
        value = pkgutil.resolve_name(dotted)
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
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


def order_recomputed_kernels(is_ours: Callable[[], bool]) -> None:
    """Keeps the order of a kernel behind changes in place of its inputs when Inductor recomputes its loops for a
    fusion.

    In 2.11 and 2.13 Inductor forgets such changes then, and runs the kernel before the wait for the tensor that it
    reads.

    Args:
        is_ours: returns whether the graph that is being compiled has waits.
    """
    scheduler = importlib.import_module("torch._inductor.scheduler")
    node, added = scheduler.SchedulerNode, (scheduler.WeakDep, scheduler.StarDep)
    original = node.recompute_size_and_body

    @functools.wraps(original)
    def recompute_size_and_body(self: Any, *args: Any, **named: Any) -> None:
        if not is_ours():
            original(self, *args, **named)
            return
        extra = [dep for dep in self.read_writes.reads if isinstance(dep, added)]
        original(self, *args, **named)
        reads = self.read_writes
        for dep in extra:
            reads = reads.with_read(dep)
        self.set_read_writes(reads.rename(self.mutation_renames))

    node.recompute_size_and_body = recompute_size_and_body


def leave_out_of_peak(is_elsewhere: Callable[[Any], bool], is_ours: Callable[[], bool]) -> None:
    """Leaves buffers out of Inductor's estimate of a graph's peak, by which it orders kernels and reuses buffers.

    The estimate counts all buffers that a graph returns as memory of the graph, whatever their device.

    Args:
        is_elsewhere: returns whether the buffer of an IR node takes no memory of the device.
        is_ours: returns whether the graph that is being compiled has such buffers.
    """
    memory: Any = importlib.import_module("torch._inductor.memory")
    sizes = getattr(memory, "compute_size_for_scheduler_buffer", None)
    if sizes is None:
        return  # then Inductor reuses and reorders for a higher peak than there is

    @functools.wraps(sizes)
    def compute_size_for_scheduler_buffer(buffers: Any, *args: Any, **named: Any) -> Any:
        found = sizes(buffers, *args, **named)
        if not is_ours():
            return found
        return {name: (0, 0) if is_elsewhere(buffers[name].node) else size for name, size in found.items()}

    memory.compute_size_for_scheduler_buffer = compute_size_for_scheduler_buffer


def leave_inputs_out_of_peak(lowered: Any, names: Collection[str]) -> None:
    """Makes that estimate count the inputs ``names`` of one graph as nothing, while Inductor lowers it."""
    kind, graph = type(lowered), weakref.ref(lowered)
    if not hasattr(kind, "get_dep_size_hint"):
        return  # likewise

    def get_dep_size_hint(dep: Any, *args: Any, **named: Any) -> int:
        return 0 if dep.name in names else kind.get_dep_size_hint(graph(), dep, *args, **named)

    lowered.get_dep_size_hint = get_dep_size_hint


def leave_out_of_cuda_graphs(lowered: Any, reason: str, tell: Callable[[], None]) -> None:
    """Makes Inductor compile and run a graph that it lowers without cudagraphs, whatever its options say.

    The same holds for its backward and for the cache entries of both, which Inductor handles by the reason. Options are
    read once more for code generation, where with cudagraphs a graph is split at each operator that none may hold, and
    nodes are reordered for fewer parts.

    Args:
        reason: the reason that Inductor keeps with the compiled graph, and logs.
        tell: called when the graph is compiled, if cudagraphs were asked for.
    """
    lowered.disable_cudagraphs_reason = reason
    config = importlib.import_module("torch._inductor.config")
    kind, graph = type(lowered), weakref.ref(lowered)

    def codegen(*args: Any, **named: Any) -> Any:
        one: Any = graph()
        if not config.triton.cudagraphs:
            return kind.codegen(one, *args, **named)
        if "cuda" in one.device_types:  # no other device has cudagraphs
            tell()
        with config.patch({"triton.cudagraphs": False}):
            return kind.codegen(one, *args, **named)

    lowered.codegen = codegen


#: The function with which AOTAutograd traces hooks that are graph modules into a forward and a backward.
_HOOK_INLINING = "maybe_inline_graph_saved_tensors_hooks"


def on_splits(ours: Callable[[GraphModule, GraphModule, int, Sequence[int]], bool]) -> list[Patch]:
    """Returns the patch that calls ``ours`` for each forward and backward of AOTAutograd; none if torch has no place.

    ``ours`` is given the two graphs, the number of the user's outputs, and the indices of parameters and buffers among
    the inputs, as far as this torch tells them. It returns ``False`` to have AOTAutograd trace the hooks as always.
    That traces one value after another, leaves out values if a graph has effect tokens (it counts them as saved values,
    and raises ``IndexError``), and needs one name for a value on both sides. ``ours`` edits the graphs themselves.
    """

    def around(theirs: Callable[..., None]) -> Callable[..., None]:
        def call(
            fw_module: GraphModule, bw_module: GraphModule, num_inner_fwd_outputs: int, *rest: Any, **named: Any
        ) -> None:
            meta = rest[0] if rest else named.get("inner_meta")
            if if_imported("torch._dynamo.compiled_autograd", "in_compiled_autograd_region") or not ours(
                fw_module, bw_module, num_inner_fwd_outputs, getattr(meta, "static_input_indices", None) or ()
            ):
                theirs(fw_module, bw_module, num_inner_fwd_outputs, *rest, **named)

        return call

    try:
        module = importlib.import_module("torch._functorch._aot_autograd.graph_compile")
    except ImportError:
        return []  # then compiled code is offloaded around its graphs
    return [Patch(module, _HOOK_INLINING, around)] if hasattr(module, _HOOK_INLINING) else []


def on_bans_of_hooks(ours: Callable[[], bool]) -> list[Patch]:
    """Makes Dynamo trace a ban on saved-tensor hooks, as of ``torch.func``, although hooks are in force.

    Dynamo imposes the ban while it traces, and again whenever the graph runs. torch refuses a ban over hooks, because
    they would be called for the saves of a transform. A ban that is not refused keeps them from being called.

    Args:
        ours: returns whether the hooks in force on the calling thread need not be called.
    """
    try:
        kind: Any = importlib.import_module("torch._dynamo.variables.ctx_manager").DisabledSavedTensorsHooksVariable
        _, ban = kind._call_func, torch._C._autograd._saved_tensors_hooks_disable
    except (ImportError, AttributeError):
        return []  # then torch.func raises in compiled code

    def around(theirs: Callable[..., None]) -> Callable[..., None]:
        def call(self: Any, tracer: Any, messages: Sequence[str | None]) -> None:
            (message,) = messages
            if message is None or not ours():
                theirs(self, tracer, messages)
            else:
                tracer.output.create_node("call_function", ban, (message, False), {})
                ban(message, False)

        return call

    return [Patch(kind, "_call_func", around)]


def leave_out_of_precompile(reason: str) -> None:
    """Keeps the code that this thread is compiling out of Dynamo's ``caching_precompile``.

    Its entries are found by the name and the line of a function, without a guard on hooks.
    """
    tracer = getattr(if_imported("torch._dynamo.symbolic_convert", "tls"), "current_tx", None)
    bypass = getattr(getattr(tracer, "output", None), "bypass_package", None)
    if bypass is not None:
        bypass(reason)


def unpack_before_compiled_backwards(is_ours: Callable[[object], bool]) -> None:
    """Unpacks saved tensors of eager code right before a backward that autograd compiles runs.

    Dynamo traces the unpack hooks that such a backward calls, and breaks the graph at a hook that it cannot trace. So
    the unpacked tensors take the place of the handles, and the identity takes the place of the hooks: graph and kernels
    are those without hooks.

    Args:
        is_ours: returns whether an unpack hook is to be called beforehand.
    """
    try:
        kind: Any = importlib.import_module("torch._dynamo.compiled_autograd").AutogradCompilerInstance
        original = kind.end_capture
    except (ImportError, AttributeError):
        return  # then the hooks break the graph of such a backward

    @functools.wraps(original)
    def end_capture(self: Any, *args: Any) -> tuple[Callable[..., Any], Any]:
        run, compiled = original(self, *args)
        unpacks = [
            (hook.args[1], data.args[1])
            for call in self.fx_tracer.graph.nodes
            if call.op == "call_function" and call.kwargs.get("hook_type") == "unpack_hook"
            for hook, data in [call.args]
        ]

        @functools.wraps(run)
        def unpack_and_run(
            compiled_fn: Any, inputs: Any, sizes: Any, scalars: Any, hooks: Sequence[Any], packed: Sequence[Any]
        ) -> Any:
            hooks, packed = list(hooks), list(packed)
            for hook, data in unpacks:
                if is_ours(hooks[hook]):
                    packed[data] = hooks[hook](packed[data])
                    hooks[hook] = _as_it_is
            return run(compiled_fn, inputs, sizes, scalars, hooks, packed)

        return (unpack_and_run if unpacks else run), compiled

    kind.end_capture = end_capture


def _as_it_is(unpacked: Tensor) -> Tensor:
    return unpacked


def on_first_compile(prepare: Callable[[], None]) -> Patch:
    """Returns a patch for ``torch.compile``, which loads the compiler: ``prepare`` is called before."""

    def around(theirs: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(theirs)
        def compile(*args: Any, **named: Any) -> Any:
            prepare()
            return theirs(*args, **named)

        return compile

    return Patch(torch, "compile", around)


def compiler_is_loaded() -> bool:
    """Returns whether anything in this process may have been compiled."""
    return "torch._dynamo" in sys.modules


def is_compiled(one: object) -> bool:
    """Returns whether a call of ``one``, a module or a function, runs code of ``torch.compile``."""
    if isinstance(one, nn.Module):
        kind = if_imported("torch._dynamo.eval_frame", "OptimizedModule")
        return (kind is not None and isinstance(one, kind)) or is_compiled(getattr(one, "_compiled_call_impl", None))
    written = getattr(one, "_torchdynamo_orig_callable", None)
    return written is not None and not getattr(one, "_torchdynamo_disable", False)


def compiled_frames() -> Any:
    """Returns Dynamo's module that runs compiled functions and has their stance, imported if need be."""
    return importlib.import_module("torch._dynamo.eval_frame")


def hide_from_compilers(function: Callable[..., Any]) -> None:
    """Keeps Dynamo from compiling ``function`` and all that it calls: after a graph break it would compile whatever
    autograd calls. Closures share their code. A graph that calls ``function`` is broken there."""
    function._torchdynamo_disable = True  # type: ignore[attr-defined]  # Dynamo looks for it
    run_uncompiled(function)


def run_uncompiled(function: Callable[..., Any]) -> None:
    """Has calls of ``function`` run uncompiled, with all that it calls, unless they are part of a traced function."""
    frames: Any = getattr(getattr(torch._C, "_dynamo", None), "eval_frame", None)
    try:
        as_it_is = frames._FrameExecStrategy(frames._FrameAction.SKIP, frames._FrameAction.SKIP)
        frames.set_code_exec_strategy(function.__code__, as_it_is)
    except AttributeError:
        pass  # then the hooks are compiled too


def share_calling_convention(graph: Graph, other: Graph) -> None:
    """Makes ``graph`` take its inputs and return its outputs as ``other`` does: flat, or nested."""
    graph.set_codegen(copy.copy(other._codegen))


#: Compiles CUDA C++ from a source and the name of a kernel. The kernel is called with a grid, a block, arguments, bytes
#: of shared memory and a stream.
compile_cuda: Callable[[str, str], Any] = torch.cuda._compile_kernel
