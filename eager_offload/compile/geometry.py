"""``eager_offload::spread``: elements that travelled without what lay between them, back in their places.

    spread(Tensor compact, int[] stride, int offset=0) -> Tensor

Kernels choose the order of a summation by strides and alignment. So a value that left gathered comes back with the
strides that it had, and, modulo the alignment that counts, at the address.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.library import register_fake

from eager_offload._torch import library
from eager_offload.runtime.base import ALIGNMENT

_library = library("eager_offload", "FRAGMENT")
_library.define("spread(Tensor compact, int[] stride, int offset=0) -> Tensor")
spread = torch.ops.eager_offload.spread.default


def _room(compact: Tensor, stride: Sequence[int], offset: int) -> Tensor:
    phase = offset * compact.itemsize % ALIGNMENT // compact.itemsize
    size = compact.size()
    span = 1 + sum((extent - 1) * step for extent, step in zip(size, stride, strict=True))
    return torch.empty(phase + span, dtype=compact.dtype, device=compact.device).as_strided(size, stride, phase)


def _spread(compact: Tensor, stride: Sequence[int], offset: int = 0) -> Tensor:
    return _room(compact, stride, offset).copy_(compact)


def _fake_spread(compact: Tensor, stride: Sequence[int], offset: int = 0) -> Tensor:
    return _room(compact, stride, offset)


_library.impl("spread", _spread, "CompositeExplicitAutograd")
register_fake("eager_offload::spread", _fake_spread, lib=_library)
