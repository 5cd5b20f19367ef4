"""The compiler: Dynamo, AOTAutograd, Inductor and their graphs.

Its names are imported when code is compiled, so eager code works without them. If torch does not inline hooks, compiled
code is offloaded around its graphs.
"""

from __future__ import annotations

import copy
import functools
import importlib
import pkgutil
import sys
import weakref
from collections.abc import Callable, Collection, Sequence
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.fx import Graph, GraphModule

from eager_offload.torch_private import Patch, if_imported, require_torch

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


#: The same for the compiler, by the names here: they are imported on first use, since that takes a second.
NAMES_OF_COMPILER = {
    "CustomGraphPass": "torch._inductor.custom_graph_pass:CustomGraphPass",
    "FakeTensorMode": "torch._subclasses.fake_tensor:FakeTensorMode",
    "OptimizedModule": "torch._dynamo.eval_frame:OptimizedModule",
    "V": "torch._inductor.virtualized:V",
    "compile_fx": "torch._inductor.compile_fx:compile_fx",
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

    The same holds for its backward and for the cache entries of both, which Inductor handles by the reason. Code
    generation reads the options again: with cudagraphs it would split the graph at each operator that a CUDA graph
    cannot contain, and reorder nodes for fewer parts.

    Args:
        reason: the reason that Inductor keeps with the compiled graph, and logs.
        tell: called when the graph is compiled, if its options enable cudagraphs.
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
    """Returns the patch that calls ``ours`` for each forward and backward of AOTAutograd; none if torch lacks the
    function.

    ``ours`` is given the two graphs, the number of user outputs, and the indices of parameters and buffers among the
    inputs, as far as this torch tells them. It edits the graphs, or returns ``False`` to have AOTAutograd trace the
    hooks. AOTAutograd's tracing handles each value alone, leaves out values if a graph has effect tokens (it counts the
    tokens as saved values, and raises ``IndexError``), and needs one name for a value on both sides.
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

    Dynamo imposes the ban while it traces, and again when the graph runs. torch refuses a ban while hooks are in force,
    because they would be called for the saves of a transform. Under the ban they are not called.

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
    """Keeps the code that this thread is compiling out of Dynamo's ``caching_precompile``, which finds entries by the
    name and line of a function, without a guard on hooks."""
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
