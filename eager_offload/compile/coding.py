"""Which codec packs what moves in compiled code, and the operators of a graph that do it.

Packing and unpacking are operators of the graph itself, as a tracer has found them once for a codec and a shape: what
is offloaded is the packed tensor, and it is unpacked right before backward needs it. So the source goes as soon as it
is packed, and the order of transfers is decided by the bytes that travel.

[Note: what cannot refuse]
A graph is planned as a whole before it runs, and lets go of what it has packed: nothing in it can look at the values
and say that they have to travel as they are. So a codec packs there what its dtype alone says that it can hold, which
is ``bool``. A byte of it that is neither 0 nor 1 means true, and comes back as 1.

[Note: what is unpacked is memory of its own]
Compilers choose kernels, and with them the order of a summation, by what they find around it. So behind the operators
that unpack stands ``spread``, which no compiler melts together with what reads its result: that is given memory with
the strides and the address that it had, as without a codec.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from functools import lru_cache
from itertools import accumulate
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from eager_offload._torch import fake_mode_of, without_dispatch_modes
from eager_offload.codecs import BitMask, Codec, CodecPolicy, Gather, TensorMeta
from eager_offload.compile.geometry import spread
from eager_offload.compile.graphs import is_static

__all__ = ["codec_for", "insert_pack", "insert_unpack"]

_aten = torch.ops.aten
_BITMASK = BitMask()
#: Traces that are kept, each way.
_KEPT = 256


class Found(NamedTuple):
    """A codec for a value, and the bytes that travel."""

    codec: Codec
    nbytes: int


def codec_for(value: Tensor, policy: CodecPolicy) -> Found | None:
    """What packs ``value``; ``None``: nothing does, or not into fewer bytes. See [Note: what cannot refuse]."""
    if not policy.lossless or value.dtype is not torch.bool or not is_static(value) or not _is_dense(value):
        return None
    layout = _BITMASK.layout(_in_order(TensorMeta.of(value)))
    return None if layout is None or layout.nbytes >= value.numel() else Found(_BITMASK, layout.nbytes)


def insert_pack(graph: Graph, base: Node, codec: Codec) -> Node:
    """What travels for ``base``, at the present insertion point."""
    value: Tensor = base.meta["val"]
    if isinstance(codec, Gather):  # the elements, of whatever dtype; their size may be known only at run time
        packed = graph.call_function(_aten.clone.default, (base,), {"memory_format": torch.contiguous_format})
        with fake_mode_of(value):
            packed.meta["val"] = torch.empty(value.size(), dtype=value.dtype, device=value.device)
        return packed
    return _inserted(graph, _packing(codec, TensorMeta.of(value), value.device), base)


def insert_unpack(graph: Graph, packed: Node, codec: Codec, value: Tensor) -> Node:
    """``value`` again, of what travelled for it, at the present insertion point."""
    compact = packed
    if not isinstance(codec, Gather):
        compact = _inserted(graph, _unpacking(codec, _in_order(TensorMeta.of(value)), value.device), packed)
    places = graph.call_function(spread, (compact, list(value.stride()), int(value.storage_offset())))
    places.meta = {"val": value}
    return places


def _is_dense(value: Tensor) -> bool:
    """Whether the elements of ``value`` lie side by side, in any order, each of them once."""
    dimensions = sorted(zip(value.stride(), value.size(), strict=True), reverse=True)
    size, stride = tuple(length for _, length in dimensions), tuple(stride for stride, _ in dimensions)
    return TensorMeta(size, stride, value.dtype).is_contiguous


def _in_order(meta: TensorMeta) -> TensorMeta:
    """That of a contiguous tensor of the same shape."""
    strides = accumulate(reversed(meta.size[1:]), operator.mul, initial=1)
    return meta._replace(stride=tuple(strides)[::-1][: len(meta.size)])


@lru_cache(_KEPT)
def _packing(codec: Codec, meta: TensorMeta, device: torch.device) -> Graph:
    """From a tensor of that shape and those strides to what travels."""
    layout = codec.layout(_in_order(meta))
    assert layout is not None, "the caller has looked"

    def pack(x: Tensor) -> Tensor:
        plain = x.ne(False).contiguous() if x.dtype is torch.bool else x.contiguous()
        packed = torch.empty(layout.nbytes, dtype=torch.uint8, device=device)
        codec.pack(plain, packed)
        return packed

    return _traced(pack, meta, device)


@lru_cache(_KEPT)
def _unpacking(codec: Codec, meta: TensorMeta, device: torch.device) -> Graph:
    """From what travelled to a contiguous tensor of that shape."""
    layout = codec.layout(meta)
    assert layout is not None, "the caller has looked"

    def unpack(packed: Tensor) -> Tensor:
        out = torch.empty_strided(meta.size, meta.stride, dtype=meta.dtype, device=device)
        codec.unpack(packed, out)
        return out

    return _traced(unpack, TensorMeta((layout.nbytes,), (1,), torch.uint8), device)


def _traced(function: Callable[[Tensor], Tensor], given: TensorMeta, device: torch.device) -> Graph:
    """The operators of ``function`` that are needed: none writes to what it is given, and Inductor knows them all."""
    from torch.fx.experimental.proxy_tensor import make_fx  # with the compiler, which is here by now

    from eager_offload._torch import FakeTensorMode, get_decompositions

    function, decompositions = torch.func.functionalize(function), cast(Any, get_decompositions([_aten._to_copy]))
    with without_dispatch_modes(), torch.inference_mode(False), torch.no_grad(), FakeTensorMode():
        x = torch.empty_strided(given.size, given.stride, dtype=given.dtype, device=device)
        graph: Graph = make_fx(function, decomposition_table=decompositions)(x).graph
    graph.eliminate_dead_code()
    return graph


def _inserted(graph: Graph, operators: Graph, given: Node) -> Node:
    """``operators`` once more in ``graph``, of ``given``; what they return."""
    became: dict[Node, Node] = {}
    with fake_mode_of(given.meta["val"]):
        for node in operators.nodes:
            if node.op == "placeholder":
                became[node] = given
            elif node.op == "output":
                return became[node.args[0]]
            else:
                args, kwargs = (map_arg(one, became.__getitem__) for one in (node.args, node.kwargs))
                became[node] = one = graph.call_function(node.target, args, kwargs)
                values = map_arg((args, kwargs), lambda found: found.meta["val"])
                one.meta["val"] = node.target(*values[0], **values[1])
    raise AssertionError("a graph has an output")
