"""What of a graph may be rounded: the rule of eager code, read off the nodes.

[Note: what is computed again]
A partitioner saves less than autograd does, and has backward compute again what it left out. So a saved value is read
by operators of backward, and by those of forward that are computed again of it, whose results others read. All of these
have to be in a region of the same codec: what is outside sees exact numbers.

[Note: what requires grad in a graph]
No node says whether autograd differentiated it. But backward returns a gradient for each input that requires one, in
the order of inputs, and operators say of fake tensors which of their results require grad. What was made under
``no_grad`` has the number of the autograd node before it, which another operator has made. In a custom
``autograd.Function`` all operators run under ``no_grad``, with the number of the function's node, and no node says
which of their results the function returns, or has marked as not differentiable. So these are exact, in eager code too;
what other operators make of them requires grad where those have a number of their own.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from eager_offload import contexts
from eager_offload._torch import (
    OpOverload,
    fake_mode_of,
    made_by_function,
    schema_of,
    tensors_in,
    without_dispatch_modes,
)
from eager_offload.codecs.names import CodecRules, exact_name, shared_name
from eager_offload.compile.cost import returns_views
from eager_offload.compile.graphs import tensor_of
from eager_offload.marks import codec_noted

#: What Dynamo says that the operators of a custom function were called by.
_FUNCTION = "autograd.Function"
#: Operators that hand on the numbers that they are given, maybe in another dtype or with zeros beside them.
_HAND_ON = frozenset(
    (
        *("aten::clone", "aten::contiguous", "aten::reshape", "aten::_unsafe_view", "aten::to", "aten::_to_copy"),
        *("aten::constant_pad_nd", "prims::convert_element_type"),
    )
)


def codec_of_readers(users: Iterable[Node], rules: CodecRules) -> str:
    """Returns the name of the codec for a saved value that ``users`` read in backward."""
    names, seen, left = set[str](), set[Node](), list(users)
    while left:
        node = left.pop()
        if node not in seen:
            seen.add(node)
            name = codec_noted(node.meta.get("custom"), rules)
            if node.meta.get("partitioner_tag") == "is_forward":  # computed again
                left += node.users
                names.add(exact_name(name) if _in_function(node) else name)
            else:
                names.add(exact_name(name) if rules.of_modules and _lost_its_notes(node) else name)
    return shared_name(names) if names else rules.elsewhere


def _lost_its_notes(node: Node) -> bool:
    """Whether ``node`` has replaced others, which a tracer had noted the module of: it has none of what that writes."""
    return not any(name in node.meta for name in ("custom", "source_fn_stack", "fwd_source_fn_stack"))


def differentiated(forward: Graph, gradients: Sequence[object]) -> set[Node]:
    """Returns the nodes of ``forward`` whose values require grad, without inputs and what hands on their numbers.

    Args:
        gradients: what backward returns: for each input of ``forward`` a node, or ``None``.
    """
    inputs = forward.find_nodes(op="placeholder")
    if len(inputs) != len(gradients):
        return set()
    values: dict[Node, Any] = {
        node: value.detach().requires_grad_()
        for node, gradient in zip(inputs, gradients, strict=True)
        if isinstance(gradient, Node) and (value := tensor_of(node)) is not None and value.is_floating_point()
    }
    made = _makers(forward)
    with contexts.outside(), without_dispatch_modes(), torch.inference_mode(False), torch.enable_grad():
        for node in forward.nodes:
            if node.op != "call_function" or values.keys().isdisjoint(node.all_input_nodes):
                continue
            if _in_function(node) or made.get(node.meta.get("seq_nr")) in (None, _traced_for(node)):
                result = _result_of(node, values)
                if any(one.requires_grad for one in tensors_in(result)):
                    values[node] = result
    given = set(inputs)
    for node in values:
        if _hands_on(node) and node.args[0] in given:
            given.add(node)
    return {node for node in values if node not in given and not _is_of_function(node, values[node])}


def _is_of_function(node: Node, result: Any) -> bool:
    """Whether a custom function has made the ``result`` of ``node``: one that was traced, or a custom operator's."""
    if _name_of(node.target).startswith("prims::"):  # torch's own, which are differentiated by such functions
        return _in_function(node)
    return _in_function(node) or any(map(made_by_function, tensors_in(result)))


def _in_function(node: Node) -> bool:
    """Whether ``node`` was traced in the forward of a custom function."""
    return any(target == _FUNCTION for _, target in node.meta.get("source_fn_stack", ()))


def _result_of(node: Node, values: dict[Node, Any]) -> Any:
    """What ``node`` returns for ``values``; ``None`` where it cannot be called with fake tensors here."""
    schema = schema_of(node.target)
    if schema is not None and schema.is_mutable:
        return None
    try:
        args, kwargs = map_arg((node.args, node.kwargs), lambda one: values.get(one, one.meta["val"]))
        with fake_mode_of(next((one for one in tensors_in(args)), None)):
            return node.target(*args, **kwargs)  # type: ignore[operator]  # it is called
    except Exception:  # an operator of the user's, or one that runs where it is compiled alone: its results stay exact
        return None


def _makers(forward: Graph) -> dict[object, str]:
    """By autograd's numbers, the operators that have made its nodes."""
    found: dict[object, str] = {}
    for node in forward.nodes:
        if node.op == "call_function" and isinstance(number := node.meta.get("seq_nr"), int):
            found.setdefault(number, _FUNCTION if _in_function(node) else _traced_for(node))
    return found


def _traced_for(node: Node) -> str:
    """The operator that ``node`` is a part of, before it was decomposed."""
    return _name_of(node.meta.get("original_aten", node.target))


def _name_of(target: object) -> str:
    """Such as ``aten::mm``, whatever its overload."""
    return schema_of(target).name if isinstance(target, OpOverload) else ""


def _hands_on(node: Node) -> bool:
    if node.op != "call_function" or not node.args:
        return False
    if node.target is operator.getitem:
        return True  # of several views, where that is what it is given
    return returns_views(node.target) or _name_of(node.target) in _HAND_ON
