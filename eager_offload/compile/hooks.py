"""The pair of saved-tensor hooks that serves eager code and tells compilers what to put into their graphs.

[Note: hooks that are graph modules]
AOTAutograd puts saved-tensor hooks into the graphs that it makes if both are ``fx.GraphModule``s: it traces the pack
hook at the end of the forward and the unpack hook at the beginning of the backward, and at run time has no hooks called
for that region. Everywhere else autograd calls them as it calls any hook. So the same pair serves both: what a graph
module does when it is called is replaced by the quick way of eager code, and the graph in it is one call of a function
that adds operations while AOTAutograd traces.

Dynamo guards on the identity of both hooks. There is one pair for each configuration in a process, for ever: another
pair for an equal configuration would compile everything anew.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from torch import Tensor
from torch.fx import Graph, GraphModule
from torch.nn import Parameter

from eager_offload import active, ops
from eager_offload._torch import hide_from_compilers, saved_tensor_hook_context
from eager_offload.compile.revision import revision
from eager_offload.tiers.forking import ForkSafeLock

if TYPE_CHECKING:
    from eager_offload.compile.tracing import Plan

__all__ = ["HookPair", "hook_pair"]


class HookPair(NamedTuple):
    """What ``saved_tensors_hooks`` takes."""

    pack: GraphModule
    unpack: GraphModule


_pairs: dict[str, HookPair] = {}
_pairs_lock = ForkSafeLock()


def hook_pair(text: str) -> HookPair:
    """The process's one pair for the configuration ``text``."""
    pair = _pairs.get(text)
    if pair is None:
        with _pairs_lock.lock:
            pair = _pairs.get(text) or HookPair(
                _hook(text, pack_into_graph, partial(_quick_pack, text)), _hook(text, unpack_in_graph, _quick_unpack)
            )
            active.has_hook(text, pair.pack)
            _pairs[text] = pair
    return pair


def pack_into_graph(tensor: Tensor, text: str) -> Tensor:
    """Called while AOTAutograd traces: what travels to the backward in place of ``tensor``."""
    context = saved_tensor_hook_context()
    plan = None if context is None else _plan_for(context, text)
    if context is None or plan is None:
        return tensor
    region = plan.region if context["_node"].name == plan.first else None
    result: Tensor = ops.offload(tensor, config=text, region=region)
    return result


def unpack_in_graph(packed: Tensor, text: str) -> Tensor:
    """Called while AOTAutograd traces: the saved tensor again."""
    context = saved_tensor_hook_context()
    if context is None or _plan_for(context, text) is None:
        return packed
    result: Tensor = ops.reload(packed, context["_node"].meta["val"].device, config=text)
    return result


def _plan_for(context: dict[str, Any], text: str) -> Plan | None:
    from eager_offload.compile.tracing import plan_for  # imports what tracing needs, and that takes a second

    return plan_for(context["_node"], context["_fw_graph"], context["_bw_graph"], text)


#: What a graph module does when it is called, by what it did before.
_Quick: TypeAlias = Callable[[Callable[..., Any]], Callable[..., Any]]


def _quick_pack(text: str, in_graph: Callable[..., Any]) -> Callable[..., Any]:
    packing = active.packing

    def pack(self: GraphModule, tensor: Tensor) -> object:
        kind = type(tensor)  # asked first: eager code comes this way often, and tracers show other kinds
        if kind is Tensor or kind is Parameter or saved_tensor_hook_context() is None:
            return packing(text).pack(tensor)
        return in_graph(self, tensor)

    hide_from_compilers(pack)
    return pack


def _quick_unpack(in_graph: Callable[..., Any]) -> Callable[..., Any]:
    def unpack(self: GraphModule, packed: Any) -> object:
        return in_graph(self, packed) if isinstance(packed, Tensor) else packed.unpack()

    hide_from_compilers(unpack)
    return unpack


def _hook(text: str, traced: Callable[[Tensor, str], Tensor], quick: _Quick) -> GraphModule:
    graph = Graph()
    call = graph.call_function(traced, (graph.placeholder("tensor"), text))
    graph.output(call)
    # Compilers key what they keep on this, since they cannot know what a Python function will do.
    call.meta["is_wrapped"], call.meta["user_cache_hash"] = True, f"{revision()} {text}"
    module = GraphModule({}, graph)
    kind = type(module)  # a class of its own: torch makes one for each graph module
    kind.__call__ = quick(kind.__call__)  # type: ignore[method-assign]  # what the note says
    return module
