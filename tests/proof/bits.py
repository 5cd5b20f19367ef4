"""Equality to the last bit."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass


def same_bits(one: Tensor | None, two: Tensor | None, *, strides: bool = True) -> bool:
    """Whether layout, sizes, strides and every bit are the same; a NaN equals one with the same payload.

    Args:
        strides: whether those are compared.
    """
    if one is None or two is None:
        return one is two
    if (one.layout, one.dtype, one.shape) != (two.layout, two.dtype, two.shape):
        return False
    if one.layout is torch.strided and not is_traceable_wrapper_subclass(one):
        if strides and one.stride() != two.stride():
            return False
        return one.is_meta or torch.equal(_plain_bytes(one), _plain_bytes(two))
    pairs = zip(_components(one), _components(two), strict=True)
    return all(same_bits(a, b, strides=strides) if isinstance(a, Tensor) else a == b for a, b in pairs)


def same_results(ours: Any, theirs: Any) -> bool:
    """Whether tensors, lists of them, or what is said of errors are the same."""
    if isinstance(ours, str) or isinstance(theirs, str):
        return bool(ours == theirs)
    if isinstance(ours, list):
        return len(ours) == len(theirs) and all(map(same_results, ours, theirs))
    return same_bits(ours, theirs)


def _plain_bytes(tensor: Tensor) -> Tensor:
    tensor = tensor.detach().resolve_conj().resolve_neg()
    return tensor.flatten().clone(memory_format=torch.contiguous_format).view(torch.uint8)


def _components(tensor: Tensor) -> tuple[object, ...]:
    """What a wrapper or a sparse tensor is made of."""
    if is_traceable_wrapper_subclass(tensor):  # what `detach` makes of it need not be one
        return tuple(getattr(tensor, name) for name in tensor.__tensor_flatten__()[0])
    tensor = tensor.detach()
    if tensor.layout is torch.sparse_coo:
        return tensor._indices(), tensor._values()
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return tensor.crow_indices(), tensor.col_indices(), tensor.values()
    assert tensor.layout in (torch.sparse_csc, torch.sparse_bsc), tensor.layout
    return tensor.ccol_indices(), tensor.row_indices(), tensor.values()
