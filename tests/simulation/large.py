"""A model of 32 blocks on an H200, and a small one that stands for it, on a device that is as much slower."""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property

import torch
from torch import Tensor, nn

import eager_offload as eo
from benchmarks.models import Shape, Stack
from eager_offload.machine import TABLE, Machine

LARGE = Shape(layers=32, width=4096, hidden=11008, heads=32)
H200 = TABLE["h200"]
SEQUENCES = {"8k": 8 << 10, "32k": 32 << 10, "128k": 128 << 10}
#: Windows hold so many of the largest saved tensors.
WINDOW_TENSORS = 5
#: How much shorter the sequence and narrower the tensors of the small model are.
SCALE = 64
#: How many bytes of the large model one stands for, and how many seconds.
SQUARE = SCALE**2


def large(shape: Shape, tokens: int) -> tuple[nn.Module, Tensor]:
    """A stack of blocks without bytes, and what it is given."""
    with torch.device("meta"):
        return Stack(shape), torch.empty(tokens, shape.width, dtype=torch.bfloat16)


def windows(tokens: int, hidden: int) -> dict[str, int]:
    """Both windows, as fields of a configuration."""
    size = int(WINDOW_TENSORS * 2 * tokens * hidden)
    return {"max_inflight_bytes": size, "prefetch_bytes": size}


class Small:
    """A small model on a device so much slower that bytes, operations and times are to each other as the large one's.

    Bytes are fewer by the square of ``SCALE``, operations by its cube.

    Args:
        tokens: of the large model's sequence.
    """

    def __init__(self, tokens: int, layers: int) -> None:
        length, width, hidden = (round(one / SCALE) for one in (tokens, LARGE.width, LARGE.hidden))
        self.model = Stack(Shape(layers, width, hidden, 1))
        self.x = torch.randn(length, width, generator=torch.Generator().manual_seed(1)).bfloat16()
        self.machine = replace(
            H200,
            flops=H200.flops / SCALE,
            single_flops=H200.single_flops / SCALE,
            launch_seconds=H200.launch_seconds / SQUARE,
        )
        #: Half of the smallest activation is where tensors begin to move.
        self.config = {"min_bytes": length * width, **windows(length, hidden)}
        self.loss().backward()
        self._expected = self._gradients()

    def loss(self) -> Tensor:
        return _loss(self.model(self.x))

    def _gradients(self) -> list[Tensor]:
        return [one.grad.clone() for one in self.model.parameters() if one.grad is not None]

    def has_same_bits(self) -> bool:
        """Whether the gradients that are there are those of a step without offload."""
        return all(map(torch.equal, self._gradients(), self._expected))

    def plan(self, budget: int) -> eo.Plan:
        return eo.plan(self.model, self.x, loss=_loss, device=self.machine, device_budget=budget, config=self.config)

    @cached_property
    def plain(self) -> eo.Plan:
        """The plan by which nothing moves."""
        return self.plan(1 << 50)

    def linked(self, link: float) -> Machine:
        """The device behind a link that is so many times as fast."""
        return replace(self.machine, out=self.machine.out * link, back=self.machine.back * link)


def _loss(out: Tensor) -> Tensor:
    return out.float().square().mean()
