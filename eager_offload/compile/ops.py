"""The three operations that compiled code moves bytes with, and one for elements that were gathered.

``offload`` returns a host tensor of the source's size and strides, which stands for its bytes; ``reload`` returns a
tensor like that one on ``device``. With ``wait=False`` they only start the transfer: before the result of a reload is
read, and before the source of an offload is written over or let go of, comes ``wait_tensor``, with the result of the
transfer and with its source as ``keepalive``.

    host = offload(x, wait=False)        # the copy starts
    ...                                  # whatever does not change x
    wait_tensor(host, x)                 # x may go from here on

    y = reload(host, device, wait=False)
    ...
    wait_tensor(y, host)
    y.sum()

``config`` is :meth:`OffloadConfig.to_text`; the innermost :class:`Offload` of that configuration that is active on the
calling thread does the work and counts it. ``after`` is a tensor that has to exist first, and nothing else: compilers
keep an order only where data flows. ``region`` goes with the first offload of a graph: what the graph keeps, for the
stats. A graph that moves nothing offloads an empty tensor to say so. ``window`` is what the graph's transfers that way
keep to, in bytes: for the pass that orders them, and for the stats.

``spread`` puts elements that travelled without what lay between them back in their places. Kernels choose the order of
a summation by strides and alignment. So a value that left gathered comes back with the strides that it had, and, modulo
the alignment that counts, at the address.

[Note: a wait is a mutation]
No operation returns its input: compilers take the result of an operation for memory of its own, reuse it, and
gradients come out wrong. So ``wait_tensor`` returns nothing and is declared to write to its first argument, which is
what happens: the bytes of a transfer appear there. Functionalization would replace what it writes to by a copy, so
passes put waits into graphs that have been functionalized.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.library import register_fake

from eager_offload import contexts
from eager_offload.compile import host_tensors
from eager_offload.errors import OffloadError
from eager_offload.runtime.base import ALIGNMENT
from eager_offload.torch_private.calls import OpOverload, library

_library = library("eager_offload", "DEF")
#: A CUDA graph would replay the kernels around them and not what the host does here. (The strides with which Inductor
#: hands tensors over are the business of lowering.py.)
_TAGS = (torch.Tag.cudagraph_unsafe,)
_library.define(
    'offload(Tensor source, *, str config="", bool wait=True, Tensor? after=None, str? region=None, int window=0) '
    "-> Tensor",
    tags=_TAGS,
)
_library.define(
    'reload(Tensor host, Device device, *, str config="", bool wait=True, Tensor? after=None, int window=0) -> Tensor',
    tags=_TAGS,
)
_library.define("wait_tensor(Tensor(a!) tensor, Tensor? keepalive=None, *, Tensor? after=None) -> ()", tags=_TAGS)
_library.define("spread(Tensor compact, int[] stride, int offset=0) -> Tensor")

offload = torch.ops.eager_offload.offload.default
reload = torch.ops.eager_offload.reload.default
spread = torch.ops.eager_offload.spread.default
wait_tensor = torch.ops.eager_offload.wait_tensor.default
#: Those that move bytes.
OPERATIONS = (offload, reload, wait_tensor)
for _operation in OPERATIONS:
    torch.fx.has_side_effect(_operation)


def _refuse_autograd(operation: OpOverload, given: Tensor) -> None:
    """There would be a gradient that is not defined."""
    if given.requires_grad and torch.is_grad_enabled():
        raise OffloadError(
            f"{operation} is part of a graph that autograd has left behind and has no gradient, but its input requires "
            "grad: call it under torch.no_grad(), or have `with offload:` around the forward move what is saved for "
            "backward"
        )


def _offload(
    source: Tensor,
    *,
    config: str = "",
    wait: bool = True,
    after: Tensor | None = None,
    region: str | None = None,
    window: int = 0,
) -> Tensor:
    _refuse_autograd(offload, source)
    if source.layout is not torch.strided:
        raise OffloadError(f"eager_offload::offload takes a strided tensor, not one of layout {source.layout}")
    if source.numel() == 0:
        if region is not None:
            contexts.serving(config).count_kept(region)
        return torch.empty_strided(source.size(), source.stride(), dtype=source.dtype, device="cpu")
    offloader = contexts.serving(config).offloader_of(source.device)
    offloader.accounts.counters.max_inflight_bytes = window
    return host_tensors.offload(offloader, host_tensors.resolved(source), wait=wait, region=region)


def _reload(
    host: Tensor,
    device: torch.device,
    *,
    config: str = "",
    wait: bool = True,
    after: Tensor | None = None,
    window: int = 0,
) -> Tensor:
    _refuse_autograd(reload, host)
    stands_for = host_tensors.bytes_of(host)
    if stands_for is None:
        return host_tensors.reload_copy(host, device)
    stands_for.offloader.accounts.counters.prefetch_bytes = window
    return host_tensors.reload(stands_for, host, wait=wait)


def _wait_tensor(tensor: Tensor, keepalive: Tensor | None = None, *, after: Tensor | None = None) -> None:
    _refuse_autograd(wait_tensor, tensor)
    host_tensors.wait_for(tensor, keepalive)


def _fake_offload(source: Tensor, **_: object) -> Tensor:
    return torch.empty_strided(source.size(), source.stride(), dtype=source.dtype, device="cpu")


def _fake_reload(host: Tensor, device: torch.device, **_: object) -> Tensor:
    return torch.empty_strided(host.size(), host.stride(), dtype=host.dtype, device=device)


def _fake_wait_tensor(*_: object, **__: object) -> None:
    return None


def _spread(compact: Tensor, stride: Sequence[int], offset: int = 0) -> Tensor:
    return _fake_spread(compact, stride, offset).copy_(compact)


def _fake_spread(compact: Tensor, stride: Sequence[int], offset: int = 0) -> Tensor:
    phase = offset * compact.itemsize % ALIGNMENT // compact.itemsize
    size = compact.size()
    span = 1 + sum((extent - 1) * step for extent, step in zip(size, stride, strict=True))
    return torch.empty(phase + span, dtype=compact.dtype, device=compact.device).as_strided(size, stride, phase)


for _name, _real, _fake in (
    ("offload", _offload, _fake_offload),
    ("reload", _reload, _fake_reload),
    ("wait_tensor", _wait_tensor, _fake_wait_tensor),
    ("spread", _spread, _fake_spread),
):
    _library.impl(_name, _real, "CompositeExplicitAutograd")
    register_fake(f"eager_offload::{_name}", _fake, lib=_library)
for _name in ("offload", "reload", "wait_tensor"):
    for _bit in ("Conjugate", "Negative"):  # torch would hand over a copy with other strides than the graph knows
        _library.impl(_name, torch.library.fallthrough_kernel, _bit)
