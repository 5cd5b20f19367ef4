"""Operators made for tests: they show what backward was given, or fail where they are told to."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Returned:
    """A saved tensor as backward was given it."""

    values: Tensor
    size: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    conj: bool
    neg: bool
    alignment: int

    @classmethod
    def of(cls, tensor: Tensor) -> Returned:
        strided = tensor.layout is torch.strided
        return cls(
            values=tensor.detach().clone(),
            size=tensor.size(),
            stride=tensor.stride() if strided and not tensor.is_nested else (),
            dtype=tensor.dtype,
            conj=tensor.is_conj(),
            neg=tensor.is_neg(),
            alignment=tensor.data_ptr() % 64 if strided and not tensor.is_meta else 0,
        )

    def parts(self) -> list[object]:
        """For a comparison bit by bit."""
        return [self.values, *self.size, *self.stride, str(self.dtype), self.conj, self.neg, self.alignment]


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


def saving(x: Tensor, *saved: Tensor, seen: list[Returned]) -> Tensor:
    """``x`` again; notes in ``seen`` what backward is given of ``saved``."""
    return watching(x, lambda tensor: seen.append(Returned.of(tensor)), *saved)
