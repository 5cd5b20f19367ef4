"""Inductor's lowerings of the operators. Importing this module imports Inductor.

[Note: strides of host tensors]
Inductor chooses the strides of computed values and copies a value if an operator requires others. If the source of an
offload and its host tensor, an output of the graph, had different strides, Inductor would copy the host tensor while
the transfer still writes to it. So the source first gets the strides of the host tensor; if this needs a copy, Inductor
makes one without offload too.

[Note: keepalive of copied sources]
Such a copy is the real source of the offload and has no other user, so its memory would be reused at once. So the
keepalive of ``wait_tensor`` is the buffer that the offload reads, whatever the node's arguments say.

[Note: no reuse of slots]
In a graph that offloads and reloads, a host tensor is dead after its reload, and Inductor would let a later kernel
write to its memory: a slot, or the spill file. So host tensors are excluded from reuse.

[Note: host tensors and peak memory]
Inductor estimates the peak of a graph, orders kernels by this peak, and keeps buffers for reuse below it. Host tensors,
the outputs of a forward and inputs of a backward, would dominate the estimate, and each layer would keep its own
buffers. Host tensors take no device memory (and on disk no host memory), so they count as 0.

[Note: no CUDA graph around transfers]
A CUDA graph replays kernels without the host's transfers, so Inductor would split a graph at each transfer and capture
each part. Each of the many parts keeps its outputs until the next step, and a tuple of results cannot cross parts: in
torch 2.11 the next forward raises. So graphs with transfers are compiled without cudagraphs, including their backwards
and entries of the compiler's caches, through the reason that Inductor keeps with a compiled graph.
"""

from __future__ import annotations

from functools import cache
from typing import Any, TypeAlias
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import Tensor
from torch.fx import Node

from eager_offload.compile import ops
from eager_offload.compile.insert import EXACT, is_report
from eager_offload.errors import warn_once
from eager_offload.torch_private.inductor import (
    V,
    inductor_ir,
    leave_inputs_out_of_peak,
    leave_out_of_cuda_graphs,
    leave_out_of_peak,
    make_fallback,
    order_recomputed_kernels,
)
from eager_offload.torch_private.memory import fake_mode_of

Arguments: TypeAlias = tuple[tuple[Any, ...], dict[str, Any]]

#: The reason that Inductor keeps with the compiled graph, and logs.
_NO_CUDA_GRAPH = "eager_offload moving saved tensors in this graph, which no replay would do"


@cache
def install_lowerings() -> None:
    """Registers the operators with Inductor, for the rest of the process."""
    for operation, prepared in ((ops.offload, _for_offload), (ops.reload, _for_reload), (ops.wait_tensor, _for_wait)):
        make_fallback(operation, prepared, warn=False)  # type: ignore[no-untyped-call]  # torch's
    order_recomputed_kernels(_is_ours)  # otherwise a reload might be read before its wait
    leave_out_of_peak(_is_host_tensor, _is_ours)


#: Graphs of Inductor that contain one of the operators.
_with_transfers: WeakSet[Any] = WeakSet()
#: The graphs among them that transfer bytes, each with the names of the host tensors that it reloads. A graph that
#: moves nothing contains an operator too, to count its kept bytes.
_moving: WeakKeyDictionary[Any, set[str]] = WeakKeyDictionary()


def _is_ours() -> bool:
    return V.graph in _with_transfers


def _note_transfer() -> set[str]:
    """Registers the graph that is being lowered as one with transfers; returns its set of reloaded host tensors.

    See [Note: no CUDA graph around transfers] and [Note: host tensors and peak memory].
    """
    _with_transfers.add(V.graph)
    if V.graph not in _moving:
        _moving[V.graph] = set()
        leave_out_of_cuda_graphs(V.graph, _NO_CUDA_GRAPH, _warn_of_cuda_graphs)
        leave_inputs_out_of_peak(V.graph, _moving[V.graph])
    return _moving[V.graph]


def _warn_of_cuda_graphs() -> None:
    warn_once(
        "cuda_graphs",
        'a compiled graph in which saved tensors move runs without CUDA graphs, although mode="reduce-overhead" or '
        "triton.cudagraphs asks for them: a replay repeats kernels, but not the host's part of a transfer. Graphs "
        "without transfers keep them. To replay a step with its transfers, capture all of it: "
        "eager_offload.graphs.capture_step",
    )


def _for_offload(node: Node, source: Any, /, **named: Any) -> Arguments:
    """See [Note: strides of host tensors]."""
    value = node.meta.get("val")
    if is_report(node):
        _with_transfers.add(V.graph)
    else:
        _note_transfer()
    if isinstance(source, inductor_ir.TensorBox) and isinstance(value, Tensor):
        source.realize()  # otherwise each reader would recompute it
        prefers = V.graph.nodes_prefer_channels_last
        if node.meta.get(EXACT):
            prefers.discard(node)
        if value.dim() == 4 and node in prefers:
            with fake_mode_of(value):
                value = torch.empty(value.shape, dtype=value.dtype, memory_format=torch.channels_last)
        source = inductor_ir.ExternKernel.require_exact_strides(source, value.stride())
    return (source,), named


def _for_wait(node: Node, tensor: Any, /, *keepalive: Any, **named: Any) -> Arguments:
    """See [Note: keepalive of copied sources] and [Note: no reuse of slots]."""
    _with_transfers.add(V.graph)
    result: Any = tensor
    while isinstance(result, inductor_ir.MutableBox):
        result = result.data
    if _is_host_tensor(result):  # the wait of an offload
        V.graph.never_reuse_buffers.add(tensor.get_name())
        read: Any = _call_of(result).inputs[0]
        box = inductor_ir.TensorBox(read if isinstance(read, inductor_ir.BaseView) else inductor_ir.StorageBox(read))
        keepalive = (box,) if keepalive else ()
    return (tensor, *keepalive), named


def _for_reload(node: Node, host: Any, /, *arguments: Any, **named: Any) -> Arguments:
    """See [Note: host tensors and peak memory]."""
    _note_transfer().add(host.get_name())
    return (host, *arguments), named


def _is_host_tensor(node: Any) -> bool:
    """Returns whether an Inductor node is an offload or its result."""
    call = _call_of(node)
    return call is not None and call.op_overload is ops.offload


def _call_of(node: Any) -> Any:
    """Returns the call of a fallback operator that ``node`` is, or is a result of."""
    call = node.inputs[0] if isinstance(node, inductor_ir.MultiOutput) else node
    return call if isinstance(call, inductor_ir.FallbackKernel) else None
