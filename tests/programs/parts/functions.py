"""Operators made for tests: they show what backward was given, or fail where they are told to."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def as_given(tensor: Tensor) -> list[object]:
    """What there is to say of a saved tensor, bit by bit: its values come first, its address modulo 64 comes last."""
    strided = tensor.layout is torch.strided
    stride = tensor.stride() if strided and not tensor.is_nested else ()
    alignment = tensor.data_ptr() % 64 if strided and not tensor.is_meta else 0
    kind = [str(tensor.dtype), tensor.is_conj(), tensor.is_neg()]
    return [tensor.detach().clone(), *tensor.size(), *stride, *kind, alignment]


class _Custom(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, forward: Any, backward: Any, saved: tuple[Tensor, ...]) -> Tensor:
        ctx.save_for_backward(*saved)
        ctx.own = backward
        return forward(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        return ctx.own(ctx, gradient), None, None, None


def custom(
    x: Tensor,
    backward: Callable[[Any, Tensor], Tensor],
    *saved: Tensor,
    forward: Callable[[Tensor], Tensor] = torch.clone,
) -> Tensor:
    """``forward`` of ``x``, as an operator that saves ``saved``.

    Args:
        backward: the gradient of ``x``, made of the operator's context and of the gradient of its result.
    """
    return _Custom.apply(x, forward, backward, saved)


def watching(x: Tensor, look: Callable[[Tensor], object], *saved: Tensor) -> Tensor:
    """``x`` again; backward calls ``look`` with each of ``saved``, as it is given it."""

    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        for tensor in ctx.saved_tensors:
            look(tensor)
        return gradient

    return custom(x, backward, *saved)


def saving(x: Tensor, *saved: Tensor, seen: list[list[object]]) -> Tensor:
    """``x`` again; notes in ``seen`` what backward is given of ``saved``."""
    return watching(x, lambda tensor: seen.append(as_given(tensor)), *saved)
