"""What of a graph may be rounded: the rule of eager code, read off the nodes.

[Note: what is computed again]
A partitioner saves less than autograd does, and has backward compute again what it left out. So a saved value is read
by operators of backward, and by those of forward that are computed again of it, whose results others read. All of these
have to be in a region of the same codec: what is outside sees exact numbers.

[Note: what requires grad in a graph]
No node says whether autograd differentiated it. But backward returns a gradient for each input that requires one, in
the order of inputs, and operators say of fake tensors which of their results require grad. What was made under
``no_grad`` has the number of the autograd node before it, which another operator has made.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from eager_offload import active
from eager_offload._torch import OpOverload, fake_mode_of, schema_of, tensors_in, without_dispatch_modes
from eager_offload.codecs.names import CodecRules, shared_name
from eager_offload.compile.cost import returns_views
from eager_offload.compile.graphs import tensor_of
from eager_offload.marks import codec_noted

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
            names.add(codec_noted(node.meta.get("custom"), rules))
            if node.meta.get("partitioner_tag") == "is_forward":  # computed again
                left += node.users
    return shared_name(names) if names else rules.name_in(())


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
    with active.outside(), without_dispatch_modes(), torch.inference_mode(False), torch.enable_grad():
        for node in forward.nodes:
            if node.op != "call_function" or values.keys().isdisjoint(node.all_input_nodes):
                continue
            if made.get(node.meta.get("seq_nr")) in (None, _traced_for(node)):
                result = _result_of(node, values)
                if any(one.requires_grad for one in tensors_in(result)):
                    values[node] = result
    given = set(inputs)
    for node in values:
        if _hands_on(node) and node.args[0] in given:
            given.add(node)
    return {node for node in values if node not in given}


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
            found.setdefault(number, _traced_for(node))
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
