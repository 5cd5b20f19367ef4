"""Which codec packs what moves in compiled code, and the operators of a graph that do it.

Packing and unpacking are operators of the graph itself, as a tracer has found them once for a codec and a shape: what
is offloaded is the packed tensor, and it is unpacked right before backward needs it. So the source goes as soon as it
is packed, and the order of transfers is decided by the bytes that travel.

[Note: what cannot refuse]
A graph is planned as a whole before it runs, and lets go of what it has packed: nothing in it can look at the values
and say that they have to travel as they are. So a codec packs there what its dtype alone says that it can hold: those
that round hold any number, and of those that change no bit there is ``bool``. A byte of that which is neither 0 nor 1
means true, and comes back as 1.

[Note: what is unpacked is memory of its own]
Compilers choose kernels, and with them the order of a summation, by what they find around it. So behind the operators
that unpack stands ``spread``, which no compiler melts together with what reads its result: that is given memory with
the strides and the address that it had, as without a codec. What was rounded has other bits anyway: there the last
operator that unpacks is as good as memory, and a compiler may melt it together with what reads.
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
from eager_offload.codecs import BitMask, Codec, Gather, TensorMeta
from eager_offload.codecs.names import IDENTITY, ROUNDING
from eager_offload.codecs.rounded import compiled_multiple
from eager_offload.compile.graphs import called, is_static
from eager_offload.compile.ops import spread

_aten = torch.ops.aten
_BITMASK = BitMask()
#: Of what codecs consist of; Inductor decomposes them before its passes run.
_UNKNOWN_TO_INDUCTOR = [_aten._to_copy, _aten.clamp, _aten.rsub, _aten.stack]
#: Traces that are kept, each way.
_KEPT = 256


class ChosenCodec(NamedTuple):
    """A codec for a value, and the bytes that travel."""

    codec: Codec
    nbytes: int


def codec_for(value: Tensor, name: str, *, may_be_rounded: bool) -> ChosenCodec | None:
    """What packs ``value``; ``None``: nothing does, or not into fewer bytes. See [Note: what cannot refuse].

    Args:
        name: of the codec that is in force for all that read it.
        may_be_rounded: whether it is what codecs that round are for.
    """
    if name == IDENTITY or not is_static(value):
        return None
    codec = ROUNDING.get(name) if may_be_rounded else None
    if codec is not None and value.numel() % compiled_multiple(codec, value.device):
        codec = None
    if codec is None and value.dtype is torch.bool and _memory_order(value) is not None:
        codec = _BITMASK
    layout = None if codec is None else codec.layout(_in_order(TensorMeta.of(value)))
    if codec is None or layout is None or layout.nbytes >= value.numel() * value.itemsize:
        return None
    return ChosenCodec(codec, layout.nbytes)


def insert_pack(graph: Graph, base: Node, codec: Codec) -> Node:
    """What travels for ``base``, at the present insertion point."""
    value: Tensor = base.meta["val"]
    order = None if isinstance(codec, Gather) else _memory_order(value)
    if order is None:
        base = graph.call_function(_aten.clone.default, (base,), {"memory_format": torch.contiguous_format})
        with fake_mode_of(value):  # of a size that may be known only at run time
            base.meta["val"] = torch.empty(value.size(), dtype=value.dtype, device=value.device)
        if isinstance(codec, Gather):
            return base
    else:
        base = called(graph, _aten.permute.default, base, order)
    flat = called(graph, _aten.view.default, base, [-1])
    return _inserted(graph, _packing(codec, value.numel(), value.dtype, value.device), flat)


def insert_unpack(graph: Graph, packed: Node, codec: Codec, value: Tensor, *, in_memory: bool = True) -> Node:
    """``value`` again, of what travelled for it, at the present insertion point.

    Args:
        in_memory: whether it has to be memory with the strides and the address of ``value``.
    """
    compact, order = packed, None
    if not isinstance(codec, Gather):
        compact = _inserted(graph, _unpacking(codec, value.numel(), value.dtype, value.device), packed)
        order = _memory_order(value)
        places = range(value.dim()) if order is None else order
        compact = called(graph, _aten.view.default, compact, [value.size(dim) for dim in places])
        if order is not None:
            compact = called(graph, _aten.permute.default, compact, [order.index(dim) for dim in range(value.dim())])
    if not in_memory and order is not None and not codec.lossless and compiled_multiple(codec, value.device) == 1:
        return compact
    spaced = graph.call_function(spread, (compact, list(value.stride()), int(value.storage_offset())))
    spaced.meta = {"val": value}
    return spaced


def _memory_order(value: Tensor) -> list[int] | None:
    """The dimensions in the order in which the elements lie side by side, each once; ``None`` where they do not."""
    order = sorted(range(value.dim()), key=lambda dim: (value.stride(dim), value.size(dim)), reverse=True)
    meta = TensorMeta(tuple(value.size(dim) for dim in order), tuple(value.stride(dim) for dim in order), value.dtype)
    return order if meta.is_contiguous else None


def _in_order(meta: TensorMeta) -> TensorMeta:
    """That of a contiguous tensor of the same shape."""
    strides = accumulate(reversed(meta.size[1:]), operator.mul, initial=1)
    return meta._replace(stride=tuple(strides)[::-1][: len(meta.size)])


@lru_cache(_KEPT)
def _packing(codec: Codec, numel: int, dtype: torch.dtype, device: torch.device) -> Graph:
    """From so many elements side by side to what travels."""
    layout = codec.layout(TensorMeta((numel,), (1,), dtype))
    assert layout is not None, "the caller has looked"

    def pack(x: Tensor) -> Tensor:
        packed = torch.empty(layout.nbytes, dtype=torch.uint8, device=device)
        codec.pack(x.ne(False) if dtype is torch.bool else x, packed)
        return packed

    return _traced(pack, TensorMeta((numel,), (1,), dtype), device)


@lru_cache(_KEPT)
def _unpacking(codec: Codec, numel: int, dtype: torch.dtype, device: torch.device) -> Graph:
    """From what travelled to so many elements side by side."""
    layout = codec.layout(TensorMeta((numel,), (1,), dtype))
    assert layout is not None, "the caller has looked"

    def unpack(packed: Tensor) -> Tensor:
        out = torch.empty(numel, dtype=dtype, device=device)
        codec.unpack(packed, out)
        return out

    return _traced(unpack, TensorMeta((layout.nbytes,), (1,), torch.uint8), device)


def _traced(function: Callable[[Tensor], Tensor], given: TensorMeta, device: torch.device) -> Graph:
    """The operators of ``function`` that are needed: none writes to what it is given, and Inductor knows them all."""
    from torch.fx.experimental.proxy_tensor import make_fx  # with the compiler, which is here by now

    from eager_offload._torch import FakeTensorMode, get_decompositions

    function, decompositions = torch.func.functionalize(function), cast(Any, get_decompositions(_UNKNOWN_TO_INDUCTOR))
    with without_dispatch_modes(), torch.inference_mode(False), torch.no_grad(), FakeTensorMode():
        x = torch.empty_strided(given.size, given.stride, dtype=given.dtype, device=device)
        graph: Graph = make_fx(function, decomposition_table=decompositions)(x).graph
    graph.eliminate_dead_code()
    return graph


def _inserted(graph: Graph, operators: Graph, given: Node) -> Node:
    """``operators`` once more in ``graph``, of ``given``; what they return."""
    (placeholder,) = operators.find_nodes(op="placeholder")
    became: dict[Node, Node] = {placeholder: given}
    for node in operators.nodes:
        if node.op == "output":
            return became[node.args[0]]
        if node.op != "placeholder":
            args, kwargs = (map_arg(one, became.__getitem__) for one in (node.args, node.kwargs))
            with fake_mode_of(given.meta["val"]):
                became[node] = called(graph, node.target, *args, **kwargs)
    raise AssertionError("a graph has an output")
