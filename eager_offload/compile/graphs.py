"""FX graphs: storages, aliases, node order, and copies of graphs."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from typing import Concatenate, ParamSpec

import torch
from torch import SymInt, Tensor
from torch.fx import Graph, Node
from torch.fx.experimental.symbolic_shapes import statically_known_true
from torch.fx.node import map_arg

from eager_offload.torch_private.calls import HigherOrderOperator, schema_of
from eager_offload.torch_private.inductor import share_calling_convention
from eager_offload.torch_private.memory import hint, weak_storage

P = ParamSpec("P")

CONVOLUTIONS = (torch.ops.aten.convolution.default, torch.ops.aten.convolution_backward.default)
#: Namespaces whose operators compilers know by name, including operators that return an input.
_KNOWN_TO_COMPILERS = frozenset(("aten", "prims", "_c10d_functional"))


def tensor_of(node: object) -> Tensor | None:
    value = node.meta.get("val") if isinstance(node, Node) else None
    return value if isinstance(value, Tensor) else None


def storage_of(node: object) -> object | None:
    """Returns a key for the storage of ``node``, equal for values that alias; ``None`` without a storage."""
    value = tensor_of(node)
    if value is None or value.layout is not torch.strided:
        return None
    return weak_storage(value.untyped_storage())


def calls_regions(nodes: Iterable[Node]) -> bool:
    """Returns whether one of ``nodes`` calls a region that is compiled once for all its calls.

    Such a region may return its inputs without telling the graph around it, so aliases are not known there.
    """
    return any(node.target is torch.ops.higher_order.invoke_subgraph for node in nodes)


def nbytes_of(value: Tensor) -> int:
    return hint(value.untyped_storage().nbytes())


def is_static(value: Tensor) -> bool:
    numbers: tuple[object, ...] = (*value.size(), *value.stride(), value.storage_offset())
    return not any(isinstance(number, SymInt) for number in numbers)


def same_geometry(one: Tensor, other: Tensor) -> bool:
    """Returns whether both have the same sizes, strides and offset for all inputs of the graph."""
    if one.dim() != other.dim():
        return False
    pairs = zip(
        (*one.size(), *one.stride(), one.storage_offset()),
        (*other.size(), *other.stride(), other.storage_offset()),
        strict=True,
    )
    return all(statically_known_true(ours == theirs) for ours, theirs in pairs)


def covers_its_storage(value: Tensor) -> bool:
    """Returns whether ``value`` fills its storage without gaps, for all inputs of the graph."""
    if not statically_known_true(value.storage_offset() == 0):
        return False
    expected: int | SymInt = 1
    for size, stride in sorted(zip(value.size(), value.stride(), strict=True), key=lambda pair: hint(pair[1])):
        if statically_known_true(size == 1):
            continue
        if not statically_known_true(stride == expected):
            return False
        expected = size * stride
    return statically_known_true(expected * value.itemsize == value.untyped_storage().nbytes())


def outputs_of(graph: Graph) -> list[object]:
    outputs = graph.output_node().args[0]
    return list(outputs) if isinstance(outputs, list | tuple) else [outputs]


def written_by(node: Node) -> list[object]:
    """Returns keys of the storages that ``node`` writes to."""
    schema = schema_of(node.target) if node.op == "call_function" else None
    if schema is None or not schema.is_mutable:
        return []
    found: list[object] = []
    for position, argument in enumerate(schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            given = node.args[position] if position < len(node.args) else node.kwargs.get(argument.name)
            written = given if isinstance(given, list | tuple) else (given,)
            found += [key for one in written if (key := storage_of(one)) is not None]
    return found


def undeclared_aliases(graph: Graph) -> set[object]:
    """Returns the keys of the storages that operators return although their schemas do not declare it.

        y = mine::normalize(x)        declared as (Tensor x) -> Tensor, but its fake implementation returns x

    torch forbids this, but only warns, and compiles as if ``y`` had its own memory: kernels may write to ``y`` while
    ``x`` is in use. An alias that only the real implementation returns is not found.
    """
    found: set[object] = set()
    for node in graph.nodes:
        schema = schema_of(node.target) if node.op == "call_function" else None
        if schema is None or schema.name.partition("::")[0] in _KNOWN_TO_COMPILERS:
            continue
        results = node.meta.get("val")
        results = results if isinstance(results, list | tuple) else (results,)
        for value, declared in zip(results, schema.returns, strict=False):
            if isinstance(value, Tensor) and value.layout is torch.strided and declared.alias_info is None:
                key = weak_storage(value.untyped_storage())
                if any(storage_of(given) == key for given in node.all_input_nodes):
                    found.add(key)
    return found


def counted_from_the_beginning(nodes: Iterable[Node]) -> set[Node]:
    """Returns the values that some of ``nodes`` read by an absolute offset into the storage, and the bases of these
    values.

        b = slice(a)
        c = as_strided(b, size, stride, 60)       a, b: c begins at element 60 of their storage, at any offset of b
    """
    found: set[Node] = set()
    left = [given for node in nodes if counts_from_the_beginning(node) for given in node.all_input_nodes]
    while left:
        node = left.pop()
        if node not in found:
            found.add(node)
            left += [given for given in node.all_input_nodes if _may_be_a_view_of(node, given)]
    return found


def counts_from_the_beginning(node: Node) -> bool:
    if node.op != "call_function":
        return False
    if isinstance(node.target, HigherOrderOperator):
        names = [str(given.target) for given in node.all_input_nodes if given.op == "get_attr"]
        graphs = (getattr(getattr(node.graph.owning_module, name, None), "graph", None) for name in names)
        return any(counts_from_the_beginning(one) for one in graphs if isinstance(one, Graph) for one in one.nodes)
    schema = schema_of(node.target)
    _, _, name = schema.name.partition("::") if schema is not None else ("", "", "")
    return name.startswith("as_strided") or name.endswith("storage_offset")


def _may_be_a_view_of(node: Node, given: Node) -> bool:
    if node.op != "call_function":
        return False
    schema = schema_of(node.target)
    if node.target is operator.getitem or (schema and any(one.alias_info is not None for one in schema.returns)):
        return True
    key = storage_of(node)
    return key is not None and key == storage_of(given)


def positions(graph: Graph) -> dict[Node, int]:
    return {node: position for position, node in enumerate(graph.nodes)}


def first_use(node: Node, order: dict[Node, int]) -> Node | None:
    return min(node.users, key=order.__getitem__, default=None)


def copied(graph: Graph) -> tuple[Graph, dict[Node, Node]]:
    copy, became = Graph(graph.owning_module), dict[Node, Node]()
    share_calling_convention(copy, graph)
    for node in graph.nodes:
        # Not `node_copy`: arguments given to `create_node` are searched, which takes longer than the rest of this
        # function.
        one = copy.create_node(node.op, node.target, name=node.name, type_expr=node.type)
        one.args, one.kwargs = map_arg(node.args, became.__getitem__), map_arg(node.kwargs, became.__getitem__)
        one.meta = dict(node.meta)
        became[node] = one
    return copy, became


def on_a_copy(change: Callable[Concatenate[Graph, P], None]) -> Callable[Concatenate[Graph, P], Graph]:
    """Returns a pass that applies ``change`` to a copy of its graph."""

    def run(graph: Graph, /, *arguments: P.args, **named: P.kwargs) -> Graph:
        copy, _ = copied(graph)
        change(copy, *arguments, **named)
        copy.lint()
        return copy

    run.__doc__, run.__name__ = change.__doc__, change.__name__.removesuffix("_in_place")
    return run
