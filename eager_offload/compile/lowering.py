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

[Note: one node for each call]
Inductor has two nodes for an operator that it has no kernel for, the call and the tensor that it returns, asks the
dispatcher for that tensor once more, and makes a class to write the arguments of each call with. A layer has dozens of
these operations, and that was a twelfth of what it takes to compile one. So calls of them are nodes of their own kind.
"""

from __future__ import annotations

from functools import cache, partial
from typing import Any, TypeAlias

from torch import Tensor
from torch.fx import Node

from eager_offload._torch import (
    OpOverload,
    V,
    channels_last_strides,
    inductor_config,
    inductor_ir,
    leave_out_of_peak,
    make_fallback,
    order_recomputed_kernels,
    register_lowering,
    remember_updaters,
)
from eager_offload.compile import ops
from eager_offload.compile.insert import EXACT

__all__ = ["install_lowerings"]

Arguments: TypeAlias = tuple[tuple[Any, ...], dict[str, Any]]


@cache
def install_lowerings() -> None:
    """Tells Inductor how to call the operations, for as long as the process lives."""
    for operation, prepared in ((ops.offload, _for_offload), (ops.reload, _as_it_is), (ops.wait_tensor, _for_wait)):
        make_fallback(operation, prepared, warn=False)  # type: ignore[no-untyped-call]  # torch's
        register_lowering(operation, type_promotion_kind=None)(partial(_lowered, operation))
    order_recomputed_kernels()  # or a reload might be read before it is waited for
    remember_updaters()
    leave_out_of_peak(_is_host_tensor, _host_tensor_read)


class _Written:
    """An argument that is written as it is."""

    def __init__(self, text: str) -> None:
        self.text = text

    def __repr__(self) -> str:
        return self.text


class _Call(inductor_ir.FallbackKernel):
    """See [Note: one node for each call]."""

    @classmethod
    def create(cls, kernel: Any, *args: Any, **kwargs: Any) -> Any:
        with V.graph.fake_mode:
            result, tensors, others, unflatten, symbols = cls.process_kernel(ops.FAKES[kernel], *args, **kwargs)
        device = cls.find_device(tensors, result)
        layout = inductor_ir.NoneLayout(device=device) if result is None else cls.tensor_to_layout(result)
        call = cls(layout, kernel, tensors, others, unflatten, kwargs=kwargs, unbacked_bindings=symbols)
        if result is None:
            return None
        if inductor_config.assume_unaligned_fallback_output or any(map(inductor_ir.is_unaligned, tensors)):
            V.graph.unaligned_buffers.add(call.get_name())
        return call

    def codegen_args(self) -> list[str]:
        tensors = [_Written(one.codegen_reference()) for one in self.inputs]
        args, kwargs = self.unflatten_args(tensors, self.constant_args)
        self.kwargs.update(kwargs)
        return [V.graph.wrapper_code.val_to_arg_str(one) for one in args]

    def codegen(self, wrapper: Any) -> None:
        inductor_ir.ExternKernelAlloc.codegen(self, wrapper)
        self.codegen_unbacked_symbol_defs(wrapper)


def _lowered(operation: OpOverload, *args: Any, **named: Any) -> Any:
    kind = inductor_ir.FallbackKernel if V.graph.cpp_wrapper else _Call
    found = kind.create(operation, *args, **named)
    return None if found is None else inductor_ir.TensorBox.create(found)


def _for_offload(node: Node, source: Any, /, **named: Any) -> Arguments:
    """See [Note: the strides of a host tensor]."""
    value = node.meta.get("val")
    if isinstance(source, inductor_ir.TensorBox) and isinstance(value, Tensor):
        source.realize()  # or each reader that needs it in memory would compute it again
        prefers = V.graph.nodes_prefer_channels_last
        if node.meta.get(EXACT):
            prefers.discard(node)
        strides = channels_last_strides(value.shape) if value.dim() == 4 and node in prefers else value.stride()
        source = inductor_ir.ExternKernel.require_exact_strides(source, strides)
    return (source,), named


def _for_wait(node: Node, tensor: Any, /, *keepalive: Any, **named: Any) -> Arguments:
    """See [Note: the keepalive is what was read] and [Note: the memory of a slot is no buffer]."""
    read = _source_of(tensor)
    if read is not None:
        V.graph.never_reuse_buffers.add(tensor.get_name())
        keepalive = (read,) if keepalive else ()
    return (tensor, *keepalive), named


def _as_it_is(node: Node, /, *arguments: Any, **named: Any) -> Arguments:
    return arguments, named


def _source_of(tensor: Any) -> Any:
    """What the offload that returned ``tensor`` was given; ``None`` if it was no offload."""
    result: Any = tensor
    while isinstance(result, inductor_ir.MutableBox):
        result = result.data
    if not _is_host_tensor(result):
        return None
    read: Any = _call_of(result).inputs[0]
    return inductor_ir.TensorBox(read if isinstance(read, inductor_ir.BaseView) else inductor_ir.StorageBox(read))


def _is_host_tensor(node: Any) -> bool:
    """Whether ``node`` of Inductor's is what an offload returns, or its call."""
    call = _call_of(node)
    return call is not None and call.op_overload is ops.offload


def _host_tensor_read(node: Any) -> str | None:
    """The host tensor that ``node`` of Inductor's brings back, by its name."""
    call = _call_of(node)
    return call.inputs[0].get_name() if call is not None and call.op_overload is ops.reload else None


def _call_of(node: Any) -> Any:
    """The call of an operation without a kernel that ``node`` is, or is a result of."""
    call = node.inputs[0] if isinstance(node, inductor_ir.MultiOutput) else node
    return call if isinstance(call, inductor_ir.FallbackKernel) else None
