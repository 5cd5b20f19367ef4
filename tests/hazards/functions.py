"""Operators made for tests: they show what backward was given, or fail where they are told to."""

from __future__ import annotations

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


class _Saving(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, seen: list[Returned], times: int, hold: bool, *payload: Tensor) -> Tensor:
        ctx.save_for_backward(*payload)
        ctx.seen, ctx.times, ctx.hold = seen, times, hold
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        held = []
        for _ in range(ctx.times):
            read = ctx.saved_tensors
            ctx.seen.extend(Returned.of(tensor) for tensor in read)
            held += [read] if ctx.hold else []
        return gradient, None, None, None, *(None for _ in ctx.needs_input_grad[4:])


def saving(x: Tensor, *payload: Tensor, seen: list[Returned], times: int = 1, hold: bool = False) -> Tensor:
    """``x`` again; saves ``payload`` and notes in ``seen`` what backward gets for it.

    Args:
        times: how often backward reads what was saved.
        hold: whether it holds on to what it has read meanwhile.
    """
    return _Saving.apply(x, seen, times, hold, *payload)
