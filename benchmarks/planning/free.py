"""What the link hides, beside what operations and bytes give."""

from __future__ import annotations

import argparse
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import eager_offload as eo
from benchmarks import models
from benchmarks.common import Report, show
from tests.simulation.large import H200, SEQUENCES, windows

#: Goal.
POINTS = 0.02
#: The formula has no first and no last block. Of twice as many they are half as large a part: the last one stays, since
#: backward asks for it at once.
BLOCKS = 2
#: What the formula counts: an H200 on which everything but products takes no time.
PRODUCTS_ALONE = replace(H200, name="an H200's products", memory=1e18, memory_bytes=1 << 50, launch_seconds=0.0)


@dataclass(frozen=True)
class Free:
    """What the link hides, as parts of all that may move, and by how much longer than compute the step is."""

    tokens: str
    #: Whether gate, product and the projection after it are one kernel, which saves what goes into it.
    fused: bool
    #: On an H200, where norms and the like take time too, in which the link hides more.
    on_h200: float
    #: Where products alone take time, as in the formula.
    planned: float
    formula: float
    saved_bytes: int
    formula_bytes: float
    slowdown: float


SHAPE = models.Shape(1, 4096, 14_336, 32, shared_heads=8)


class Llama(models.Block):
    """A decoder block that saves what the formula counts: the norms, the attention and the product are one kernel each.

    Queries are grouped by a view, since the attention that a CPU has takes no groups.
    """

    def __init__(self, *, fused: bool) -> None:
        super().__init__(SHAPE, models.LayerNorm)
        self._fused = fused

    def attend(self, x: Tensor) -> Tensor:
        length, head, groups = x.shape[0], SHAPE.head, SHAPE.shared_heads
        query = self.query(x).view(length, groups, -1, head).permute(1, 2, 0, 3)
        key, value = (
            project(x).view(length, groups, 1, head).permute(1, 2, 0, 3).expand(query.shape)
            for project in (self.key, self.value)
        )
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return mixed.permute(2, 0, 1, 3).reshape(x.shape)

    def feed(self, x: Tensor) -> Tensor:
        if not self._fused:
            return super().feed(x)
        projected: Tensor = SwiGLU.apply(self.gate(x), self.up(x), self.down.weight)
        return projected


def flops(tokens: int) -> float:
    """Of forward, for each token."""
    width, shared = SHAPE.width, SHAPE.shared_heads * SHAPE.head
    return 2 * (2 * width**2 + 2 * width * shared + 3 * width * SHAPE.hidden) + 2 * tokens * width


def saved(*, fused: bool) -> float:
    """Bytes, for each token."""
    return 12 * SHAPE.width + 4 * SHAPE.shared_heads * SHAPE.head + (4 if fused else 8) * SHAPE.hidden


class SwiGLU(torch.autograd.Function):
    """The gate, the product and the projection after it as one kernel: it saves what goes in, and computes again."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up, down)
        return F.linear(F.silu(gate) * up, down)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        gate, up, down = ctx.saved_tensors
        inner, sigmoid = grad @ down, gate.sigmoid()
        opened = gate * sigmoid
        slope = sigmoid * (1 + gate * (1 - sigmoid))
        return inner * up * slope, inner * opened, grad.t() @ (opened * up)


def free(options: argparse.Namespace, report: Report) -> list[Free]:
    found = [free_of(name, options, fused=fused) for fused in (False, True) for name in options.tokens]
    for one in found:
        title = f"{one.tokens}, fused" if one.fused else one.tokens
        report.at_most(f"free, {title}: off the formula", abs(one.planned - min(one.formula, 1.0)), POINTS)
    show(f"What is free of {BLOCKS * options.layers} blocks of a Llama 8B", found)
    return found


def free_of(name: str, options: argparse.Namespace, *, fused: bool) -> Free:
    tokens, layers = SEQUENCES[name], BLOCKS * options.layers
    with torch.device("meta"):
        model = nn.Sequential(*(Llama(fused=fused) for _ in range(layers))).bfloat16()
        x = torch.empty(tokens, SHAPE.width, dtype=torch.bfloat16)
    config = windows(tokens, SHAPE.hidden)
    known, plan = (
        eo.plan(model, x, loss=torch.sum, device=device, policy="free", config=config)
        for device in (H200, PRODUCTS_ALONE)
    )
    movable, nbytes = plan.problem.program.movable_bytes, saved(fused=fused)
    return Free(
        tokens=name,
        fused=fused,
        on_h200=known.moved_bytes / movable,
        planned=plan.moved_bytes / movable,
        formula=flops(tokens) / nbytes / (H200.flops / H200.out),
        saved_bytes=movable,
        formula_bytes=nbytes * tokens * layers,
        slowdown=plan.step_seconds / plan.compute_seconds - 1,
    )
