"""Equality to the last bit."""

from __future__ import annotations

import torch
from torch import Tensor


def same_bits(one: Tensor | None, two: Tensor | None) -> bool:
    """Whether layout, sizes, strides and every bit are the same; a NaN equals one with the same payload."""
    if one is None or two is None:
        return one is two
    if (one.layout, one.dtype, one.shape) != (two.layout, two.dtype, two.shape):
        return False
    if one.layout is torch.strided:
        return one.stride() == two.stride() and torch.equal(_plain_bytes(one), _plain_bytes(two))
    return all(same_bits(a, b) for a, b in zip(_components(one), _components(two), strict=True))


def _plain_bytes(tensor: Tensor) -> Tensor:
    tensor = tensor.detach().resolve_conj().resolve_neg()
    return tensor.flatten().clone(memory_format=torch.contiguous_format).view(torch.uint8)


def _components(tensor: Tensor) -> tuple[Tensor, ...]:
    """The dense tensors that a sparse one is made of."""
    tensor = tensor.detach()
    if tensor.layout is torch.sparse_coo:
        return tensor._indices(), tensor._values()
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return tensor.crow_indices(), tensor.col_indices(), tensor.values()
    assert tensor.layout in (torch.sparse_csc, torch.sparse_bsc), tensor.layout
    return tensor.ccol_indices(), tensor.row_indices(), tensor.values()
