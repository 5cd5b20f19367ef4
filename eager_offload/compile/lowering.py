"""Which tensors Inductor hands to the operations. Importing this imports Inductor.

[Note: the strides of a host tensor]
Inductor chooses the strides of what it computes, and where an operation must have others it copies. Without more, it
would see one set of strides on the source of an offload and another on the host tensor, which leaves the graph: and
copy the host tensor while bytes are still on their way into it. So the source gets, before it leaves, the strides that
its host tensor is to have at the end; where that takes a copy, Inductor makes one without an offload too.

[Note: the keepalive is what was read]
If there is such a copy, it is the copy that leaves, and nothing else uses it: its memory would go to the next kernel at
once. So what ``wait_tensor`` keeps alive is what the offload was really given, whatever its arguments say.

[Note: the memory of a slot is no buffer]
Within one graph that offloads and reloads, a host tensor is done with after its reload, and Inductor would let a later
kernel compute into it: into the spill file. So it never hands the memory of one on.

[Note: a host tensor weighs nothing]
Inductor estimates the peak of a graph, orders kernels by it, and keeps a buffer for a later kernel as far as the peak
allows. The host tensors that a forward returns, or a backward is given, would be most of such a peak, so that every
buffer of a layer would stay for the next layer: the sum of what each part of a layer needs, in place of the most that
one does. But they take no memory of the device, and where they stand for a disk none of the host.

[Note: no CUDA graph around transfers]
A CUDA graph replays kernels and nothing that the host does, so Inductor would split a graph at each transfer and make
a CUDA graph of each part. There would be as many as there are transfers, they own what they hand over until the step
after, and what an operator returns as a tuple cannot be handed over at all: in 2.11 the next forward raises. So a graph
that moves anything is compiled as without cudagraphs. So are its backward, and what is found in a cache: both go by the
reason that Inductor keeps with what it has compiled.
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

#: Inductor keeps it with what it has compiled, and logs it.
_NO_CUDA_GRAPH = "eager_offload moving saved tensors in this graph, which no replay would do"


@cache
def install_lowerings() -> None:
    """Tells Inductor how to call the operations, for as long as the process lives."""
    for operation, prepared in ((ops.offload, _for_offload), (ops.reload, _for_reload), (ops.wait_tensor, _for_wait)):
        make_fallback(operation, prepared, warn=False)  # type: ignore[no-untyped-call]  # torch's
    order_recomputed_kernels(_is_ours)  # or a reload might be read before it is waited for
    leave_out_of_peak(_is_host_tensor, _is_ours)


#: The graphs that Inductor has, or is about to have, kernels of in which one of the operations is.
_with_transfers: WeakSet[Any] = WeakSet()
#: Those of them that move anything, with the host tensors that they bring back: a graph in which nothing moves calls an
#: operation too, to have that counted.
_moving: WeakKeyDictionary[Any, set[str]] = WeakKeyDictionary()


def _is_ours() -> bool:
    return V.graph in _with_transfers


def _note_transfer() -> set[str]:
    """The graph that is being lowered moves something; returns the host tensors that it brings back, by their names.

    See [Note: no CUDA graph around transfers] and [Note: a host tensor weighs nothing].
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
        "triton.cudagraphs asks for them: a replay repeats kernels, and not what the host does for a transfer. Graphs "
        "without transfers keep them. To replay a step with its transfers, capture all of it: "
        "eager_offload.graphs.capture_step",
    )


def _for_offload(node: Node, source: Any, /, **named: Any) -> Arguments:
    """See [Note: the strides of a host tensor]."""
    value = node.meta.get("val")
    if is_report(node):
        _with_transfers.add(V.graph)
    else:
        _note_transfer()
    if isinstance(source, inductor_ir.TensorBox) and isinstance(value, Tensor):
        source.realize()  # or each reader that needs it in memory would compute it again
        prefers = V.graph.nodes_prefer_channels_last
        if node.meta.get(EXACT):
            prefers.discard(node)
        if value.dim() == 4 and node in prefers:
            with fake_mode_of(value):
                value = torch.empty(value.shape, dtype=value.dtype, memory_format=torch.channels_last)
        source = inductor_ir.ExternKernel.require_exact_strides(source, value.stride())
    return (source,), named


def _for_wait(node: Node, tensor: Any, /, *keepalive: Any, **named: Any) -> Arguments:
    """See [Note: the keepalive is what was read] and [Note: the memory of a slot is no buffer]."""
    _with_transfers.add(V.graph)
    result: Any = tensor
    while isinstance(result, inductor_ir.MutableBox):
        result = result.data
    if _is_host_tensor(result):  # or it is the wait of a reload
        V.graph.never_reuse_buffers.add(tensor.get_name())
        read: Any = _call_of(result).inputs[0]
        box = inductor_ir.TensorBox(read if isinstance(read, inductor_ir.BaseView) else inductor_ir.StorageBox(read))
        keepalive = (box,) if keepalive else ()
    return (tensor, *keepalive), named


def _for_reload(node: Node, host: Any, /, *arguments: Any, **named: Any) -> Arguments:
    """See [Note: a host tensor weighs nothing]."""
    _note_transfer().add(host.get_name())
    return (host, *arguments), named


def _is_host_tensor(node: Any) -> bool:
    """Whether ``node`` of Inductor's is what an offload returns, or its call."""
    call = _call_of(node)
    return call is not None and call.op_overload is ops.offload


def _call_of(node: Any) -> Any:
    """The call of an operation without a kernel that ``node`` is, or is a result of."""
    call = node.inputs[0] if isinstance(node, inductor_ir.MultiOutput) else node
    return call if isinstance(call, inductor_ir.FallbackKernel) else None
