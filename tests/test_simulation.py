"""Transfers hide behind compute on a large accelerator, by the clock of a simulated one that stands for it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from benchmarks.models import Shape, Stack
from eager_offload.planning.problem import floor_seconds
from tests.hazards.programs import assert_identical
from tests.planning.programs import gradients
from tests.simulation.large import H200, LARGE
from tests.simulation.stage import Stage

#: How much shorter the sequence and narrower the tensors of the small model are: bytes are fewer by its square,
#: operations by its cube.
SCALE = 64


class Small(Stack):
    """Two blocks of the large model, narrower; (tokens, width) to a loss."""

    def __init__(self) -> None:
        width, hidden = (round(one / SCALE) for one in (LARGE.width, LARGE.hidden))
        super().__init__(Shape(2, width, hidden, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).float().square().mean()


@pytest.mark.parametrize("tokens", [8 << 10, 128 << 10])
def test_a_step_takes_what_its_compute_or_its_link_takes_whatever_operators_take(tokens: int) -> None:
    """The link is the bottleneck at 8k tokens, compute is at 128k, on a device that is as much slower."""
    model, width, hidden = Small(), LARGE.width // SCALE, LARGE.hidden // SCALE
    length = tokens // SCALE
    x = torch.randn(length, width, generator=torch.Generator().manual_seed(1)).bfloat16()
    expected = gradients(model, lambda: model(x))[1:]
    # Windows hold five of the largest saved tensors, and half of the smallest activation moves.
    window = 5 * 2 * length * hidden
    config = {"min_bytes": length * width, "max_inflight_bytes": window, "prefetch_bytes": window}
    for speed in (0.5, 1, 2):
        machine = replace(
            H200,
            flops=H200.flops / SCALE,
            single_flops=H200.single_flops / SCALE,
            launch_seconds=H200.launch_seconds / SCALE**2,
            out=H200.out * speed,
            back=H200.back * speed,
        )
        stage = Stage(machine, jitter=0.3)
        offload = stage.offload(**config)
        for _ in range(2):
            offload.reset_stats()
            step = stage.step(offload, model, x, lambda: model(x))
            halves = sum(step.op_seconds[: step.forward_ops]), sum(step.op_seconds[step.forward_ops :])
            stats = offload.stats(synchronize=True)
            moving = stats.bytes_out + stats.kept_bytes["newest"] - window
            assert stats.bytes_out >= moving > 0
            assert step.seconds < 1.03 * floor_seconds(*halves, moving, machine.out, machine.back)
            assert_identical(expected, [one.grad for one in model.parameters()])
        offload.close()
