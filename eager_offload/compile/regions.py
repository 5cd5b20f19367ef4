"""What calls of whole regions hand back, named by what it is.

[Note: a region may hand back what it was given]
``torch.compiler.nested_compile_region`` compiles one graph for all calls of a region, and a call of it,
``invoke_subgraph``, is one node of the graph around. What the region's backward needs leaves its forward as a result:
where it needs an argument, that argument is a result too. The graph around does not say so, and Inductor takes each
result for memory of its own: it computes into the memory of one that nothing reads any more, though that is the
argument's, which is saved and may be on its way out. So before anything is chosen, a result that is an argument or an
earlier result is replaced by that one, and a view of one by that view, made outside. Every reader of the graph then
sees which values share memory: the choice of what moves, the passes that work in place, and the reuse of buffers.
"""

from __future__ import annotations

import operator
from typing import cast

import torch
from torch import Tensor
from torch.fx import Graph, Node
from torch.fx.experimental.symbolic_shapes import statically_known_true
from torch.fx.node import Argument, map_arg

from eager_offload._torch import rename_node
from eager_offload.compile.graphs import (
    called,
    called_region,
    counts_from_the_beginning,
    outputs_of,
    storage_of,
    tensor_of,
)


def name_results(graph: Graph) -> None:
    """Replaces what calls of regions hand back by the arguments and earlier results that it is.

        def region(x, w):                         def region(x, w):
            y = mm(x, w)                              y = mm(x, w)
            return y, x, t(y)                         return y, x, t(y)

        call = invoke_subgraph(region, a, w)      call = invoke_subgraph(region, a, w)
        y, saved, turned = call                   y = call[0]
        return y, saved, turned                   return y, a, t(y)

    A region whose result shares memory in a way that cannot be said outside hands back a copy instead.

    Args:
        graph: changed in place, and so are the regions that it calls.
    """
    calls = graph.find_nodes(op="call_function", target=torch.ops.higher_order.invoke_subgraph)
    for call in calls:
        called = called_region(call)
        if called is not None:
            name_results(called.graph)  # regions may call regions
            _name_results_of(call, called.graph, dict(zip(called.inputs, called.operands, strict=True)))
    if calls:
        graph.lint()


def name_results_of_pair(forward: Graph, backward: Graph, num_outputs: int) -> None:
    """:func:`name_results` of both graphs. What is saved has one name in both of them, and is saved once.

    Args:
        num_outputs: how many of the forward's outputs are the user's.
    """
    names = [node.name if isinstance(node, Node) else "" for node in outputs_of(forward)]
    name_results(forward)
    arrived = {node.name: node for node in backward.find_nodes(op="placeholder")}
    outputs: list[object] = []
    for position, (name, node) in enumerate(zip(names, outputs_of(forward), strict=True)):
        if position >= num_outputs and isinstance(node, Node) and node.name != name:
            ours, same = arrived.pop(name), arrived.get(node.name)
            if same is not None:
                ours.replace_all_uses_with(same)
                backward.erase_node(ours)
                continue
            _call_alike(node, ours)
            arrived[node.name] = ours
        outputs.append(node)
    forward.output_node().args = (cast(Argument, tuple(outputs)),)
    name_results(backward)


def _call_alike(saved: Node, arrived: Node) -> None:
    """Gives a saved value one name in both graphs, by which compilers find it; either may have given it to another."""
    rename_node(arrived, saved.name)
    while arrived.name != saved.name:
        rename_node(saved, arrived.name)
        rename_node(arrived, saved.name)
    arrived.target = arrived.name


def _name_results_of(call: Node, region: Graph, outside: dict[Node, object]) -> None:
    """:func:`name_results` of one call.

    Args:
        outside: what nodes of ``region`` are in the graph around: at first its inputs.
    """
    graph = call.graph
    shared = {key for node in outside if (key := storage_of(node)) is not None}
    outside = {inner: outer for inner, outer in outside.items() if _lie_alike(inner, outer)}
    results: dict[int, list[Node]] = {}
    for user in call.users:
        if user.target is operator.getitem:
            results.setdefault(cast(int, user.args[1]), []).append(user)
    last = call  # of what stands right behind the call, so that all else may use it
    for index, inner in enumerate(outputs_of(region)):
        key = storage_of(inner)
        if not isinstance(inner, Node) or index not in results or key is None:
            continue
        if key not in shared:
            shared.add(key)
            outside[inner] = first = results[index][0]
            last.append(first)
            last = first
            continue
        views = _views(inner, outside)
        if views is None:
            _hand_back_a_copy(region, index)
            continue
        for view in views:
            with graph.inserting_after(last):
                outside[view] = last = _made_outside(graph, view, outside)
        for result in results[index]:
            result.replace_all_uses_with(cast(Node, outside[inner]))
            graph.erase_node(result)


def _lie_alike(inner: Node, outer: object) -> bool:
    """Whether an input of a region is the argument for it, and no copy that is laid out as the region wants it."""
    mine, theirs = tensor_of(inner), tensor_of(outer)
    if mine is None or theirs is None:
        return mine is None and not isinstance(outer, Tensor)
    return all(
        len(ours) == len(other) and all(map(statically_known_true, map(operator.eq, ours, other)))
        for ours, other in ((mine.size(), theirs.size()), (mine.stride(), theirs.stride()))
    )


def _views(node: Node, outside: dict[Node, object]) -> list[Node] | None:
    """What has to be made outside for ``node``, in order; ``None`` if it is no view of anything that is there."""
    found: list[Node] = []
    key = storage_of(node)
    while node not in outside:
        of_several = node.target is operator.getitem
        made = cast(Node, node.args[0]) if of_several else node
        source = made.args[0] if made.op == "call_function" and made.args else None
        if not isinstance(source, Node) or storage_of(source) != key or counts_from_the_beginning(made):
            return None
        if not all(one in outside for one in made.all_input_nodes if one is not source):
            return None
        found += [node, made] if of_several else [node]
        node = source
    return found[::-1]


def _made_outside(graph: Graph, inner: Node, outside: dict[Node, object]) -> Node:
    """A node of a region once more in the graph around it."""
    arguments, named = map_arg((inner.args, inner.kwargs), lambda one: cast(Node, outside[one]))
    copy = called(graph, inner.target, *arguments, **named)
    copy.meta = {**inner.meta, **copy.meta}
    return copy


def _hand_back_a_copy(region: Graph, index: int) -> None:
    """Has a region copy one of its results, which then is memory of its own."""
    outputs = outputs_of(region)
    with region.inserting_before(region.output_node()):
        outputs[index] = called(region, torch.ops.aten.clone.default, outputs[index])
    region.output_node().args = (cast(Argument, tuple(outputs)),)


def keep_operands(graph: Graph) -> None:
    """Has no region that ``graph`` calls compute into the memory of its arguments: it hands back all of them, too.

    [Note: a region may be given what its caller needs]
    Inductor lets a backward compute into saved values that have no other owner, and knows them by their places among
    the inputs. It takes the inputs at the same places of every region that the backward calls for such values, though
    they are the caller's, who may read them again. What a graph returns is never computed into.

    Args:
        graph: a backward, as it is lowered; the regions that it calls are changed in place.
    """
    for call in graph.find_nodes(op="call_function", target=torch.ops.higher_order.invoke_subgraph):
        called = called_region(call)
        if called is not None:
            keep_operands(called.graph)
            outputs = outputs_of(called.graph)
            missing = [one for one in called.inputs if tensor_of(one) is not None and one not in outputs]
            called.graph.output_node().args = (cast(Argument, (*outputs, *missing)),)
