"""What reads a saved value in a graph's backward: nodes of autograd, by the names that the rules of a policy have.

[Note: who reads]
AOTAutograd writes on every node which operator it was traced for, whatever that was decomposed into, and the number
that autograd gave to the operator of the forward: a node of the backward has the number of the one whose gradient it
computes.

    h = addmm(b, x, w)        number 69, for aten::addmm
    ...
    g = mm(t, x)              number 69, for aten::mm       ``x`` is read by AddmmBackward0

A consumer is known by both, by the operator that it is the backward of and by one that its backward consists of. What
has no such number, or none that fits, is no consumer: what it reads is exact. So is what a custom function reads, which
Dynamo traces without saying to which half of the graph its backward belongs.

[Note: what is computed again]
A partitioner saves less than autograd does, and has backward compute again what it left out. A norm behind its
statistics, GELU and SiLU may be computed again of what was rounded, where their own rules allow to round what they
read, and the rules of all that read their results allow to round those. Anything else is computed again of exact
values: statistics, products, softmax, what the user's checkpoints have computed again, and sums and ``mul`` too. Of two
large numbers a sum may be a small one, and a product with a mask may leave but the small ones of a block: eager code
would round these, by their own scale.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import NamedTuple

from torch.fx import Node

from eager_offload._torch import OpOverload, schema_of
from eager_offload.codecs.policy import NORMS
from eager_offload.compile.cost import returns_views
from eager_offload.compile.graphs import tensor_of


class _Operators(NamedTuple):
    """What stands in a graph for a node of autograd."""

    forward: frozenset[str]
    backward: frozenset[str]


def _operators(forward: str, backward: str) -> _Operators:
    return _Operators(*(frozenset(f"aten::{name}" for name in names.split()) for names in (forward, backward)))


#: By the names that rules have.
_CONSUMERS: dict[str, _Operators] = {
    "MmBackward0": _operators("mm", "mm"),
    "AddmmBackward0": _operators("addmm", "mm"),
    "BmmBackward0": _operators("bmm", "bmm"),
    "BaddbmmBackward0": _operators("baddbmm", "bmm"),
    "MulBackward0": _operators("mul mul_", "mul"),
    "ConvolutionBackward0": _operators("convolution", "convolution_backward"),
    "GeluBackward0": _operators("gelu", "gelu_backward"),
    "SiluBackward0": _operators("silu silu_", "silu_backward"),
    "SoftmaxBackward0": _operators("_softmax", "_softmax_backward_data"),
    "NativeLayerNormBackward0": _operators("native_layer_norm", "native_layer_norm_backward"),
    "NativeGroupNormBackward0": _operators("native_group_norm", "native_group_norm_backward"),
    "NativeBatchNormBackward0": _operators(
        "native_batch_norm _native_batch_norm_legit _native_batch_norm_legit_functional", "native_batch_norm_backward"
    ),
    "CudnnBatchNormBackward0": _operators("cudnn_batch_norm", "cudnn_batch_norm_backward"),
    "FusedRmsNormBackward0": _operators("_fused_rms_norm", "_fused_rms_norm_backward"),
}
#: The operators that save statistics beside what they return.
_NORMS = frozenset[str]().union(*(_CONSUMERS[name].forward for name in NORMS))
#: Operators that may be computed again from what was rounded, and the consumer whose rule has to allow that.
_AGAIN: dict[str, str] = {
    name: consumer for consumer in (*NORMS, "GeluBackward0", "SiluBackward0") for name in _CONSUMERS[consumer].forward
}
#: What norms consist of behind their statistics.
_AFFINE = frozenset(("aten::add", "aten::sub", "aten::mul"))
#: They hand on the numbers that they are given, though not their memory.
_COPIES = frozenset(
    (
        *("aten::clone", "aten::contiguous", "aten::reshape", "aten::_unsafe_view", "aten::to", "aten::_to_copy"),
        "prims::convert_element_type",
    )
)
#: They put zeros beside them, as compilers do for products.
_PADS = frozenset(("aten::constant_pad_nd",))


class Consumers:
    """Names what reads what is saved.

    Args:
        nodes: of both graphs, the forward's in front.
    """

    def __init__(self, nodes: Iterable[Node]) -> None:
        #: By autograd's numbers, the operators of the forward that made the nodes of autograd. What is not to be
        #: differentiated has the number of what was before it.
        self._makers: dict[int, str] = {}
        for node in nodes:
            number = _number_of(node)
            if number is not None and _is_forward(node):
                self._makers.setdefault(number, _traced_for(node))

    def of(self, users: Iterable[Node]) -> frozenset[str]:
        """All that read a value in backward, of which ``users`` are there; empty where one of them is none."""
        found, seen, left = set[str](), set[Node](), list(users)
        while left:
            node = left.pop()
            if node in seen:
                continue
            seen.add(node)
            if _hands_on(node):
                value = tensor_of(node)
                if value is not None and not value.is_floating_point():
                    return frozenset()  # its bits
                left += node.users
                continue
            computed_again = _is_forward(node)
            name = self._again(node) if computed_again else self._backward(node)
            if name is None:
                return frozenset()
            found.add(name)
            if computed_again:
                left += node.users
        return frozenset(found)

    def _backward(self, node: Node) -> str | None:
        """Which consumer ``node`` is a part of; ``None``: none that a rule may be for."""
        number = _number_of(node)
        if number is None or node.meta.get("partitioner_tag") != "is_backward":
            return None
        maker, part = self._makers.get(number), _traced_for(node)
        fitting = (name for name, one in _CONSUMERS.items() if maker in one.forward and part in one.backward)
        return next(fitting, None)

    @staticmethod
    def _again(node: Node) -> str | None:
        """Whose rule has to allow that ``node`` is computed again of what was rounded; ``None``: none can."""
        whole = _traced_for(node)
        if whole not in _AGAIN or node.meta.get("recompute") is not None or tensor_of(node) is None:
            return None
        if whole in _NORMS and _name_of(node.target) not in _AFFINE:
            return None
        return _AGAIN[whole]


def may_be_rounded(maker: Node, readers: frozenset[str]) -> bool:
    """Whether what ``maker`` has made may be, as far as it itself goes.

    What a graph is given may be a parameter, so a cast of it is exact too: autocast makes those of weights there. What
    a norm has made for its own backward may be its statistics. So may what a partitioner has forward compute of the
    backward, since it is smaller than what it is computed from.
    """
    if not _is_forward(maker) or _is_given(maker):
        return False
    return not (readers & NORMS and _traced_for(maker) in _NORMS)


def _is_given(node: Node) -> bool:
    """Whether ``node`` is an input of the graph, a view of one, or a copy, maybe in another dtype."""
    while _hands_on(node) or _name_of(node.target) in _PADS:
        source = node.args[0]
        if not isinstance(source, Node):
            return False
        node = source
    return node.op in ("placeholder", "get_attr")


def _is_forward(node: Node) -> bool:
    return node.meta.get("partitioner_tag") == "is_forward"


def _number_of(node: Node) -> int | None:
    number = node.meta.get("seq_nr") if node.op == "call_function" else None
    return number if isinstance(number, int) else None


def _traced_for(node: Node) -> str:
    """The operator that ``node`` is a part of, before it was decomposed."""
    return _name_of(node.meta.get("original_aten", node.target))


def _name_of(target: object) -> str:
    """Such as ``aten::mm``, whatever its overload."""
    return schema_of(target).name if isinstance(target, OpOverload) else ""


def _hands_on(node: Node) -> bool:
    """Whether ``node`` is a view of what it is given, or a copy, maybe in another dtype."""
    if node.target is operator.getitem:
        return True  # of several views: of other operators with several results none is asked for here
    return node.op == "call_function" and (returns_views(node.target) or _name_of(node.target) in _COPIES)
