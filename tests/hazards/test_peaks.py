"""H49: where offload can free little, it does not take more either."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from eager_offload import Offload, OffloadStats
from eager_offload.tiers.memory import anonymous_slab
from tests.hazards.backends import Backend
from tests.hazards.functions import custom
from tests.hazards.programs import REGIMES, Around, assert_identical, one_step, same_gradients

MIB = 1 << 20


def partly_used(x: Tensor) -> Tensor:
    """Saves a workspace of which it uses the first part, as oneDNN's recurrent layers do."""
    workspace = anonymous_slab(40 * MIB, huge=False).view(x.dtype)  # an allocator may have touched it before
    workspace[: x.numel()] = x.detach().flatten().exp()

    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (workspace,) = ctx.saved_tensors
        return gradient * workspace[: gradient.numel()].view_as(gradient) + workspace[-(1 << 16) :].sum()

    return custom(x, backward, workspace, forward=lambda x: workspace[: x.numel()].view_as(x).clone())


@one_step
def untouched() -> tuple[Tensor, ...]:
    x = torch.linspace(-1, 1, MIB).requires_grad_()
    return partly_used(x) + partly_used(2 * x), x


@one_step
def recurrent() -> tuple[Tensor, ...]:
    model, x = nn.LSTM(32, 128, 2), torch.randn(64, 64, 32, requires_grad=True)
    return model(x)[0].square().mean(), x, *model.parameters()


def test_h49_a_workspace_that_was_touched_in_part_travels_in_part(disk: Backend) -> None:
    for stats in same_gradients(untouched, disk):
        assert 8 * MIB <= stats.bytes_out <= 12 * MIB
        assert stats.bytes_in <= 2 * stats.bytes_out


@pytest.mark.parametrize("program", [untouched, recurrent])
def test_h49_a_workspace_is_exact_wherever_it_goes(program: Any, backend: Backend) -> None:
    gathered: list[OffloadStats] = same_gradients(program, backend, regimes=REGIMES[:1])
    assert gathered[0].bytes_out > 0


def test_h49_the_newest_bytes_are_counted_by_the_memory_that_they_take(disk: Backend) -> None:
    """Two workspaces of 40 MiB, 4 of which are touched: within a line of 16 MiB, so that nothing has to move."""
    expected = untouched(nullcontext())
    offload = disk.offload(keep_last_bytes=16 * MIB)
    actual = untouched(offload)
    stats = offload.stats(synchronize=True)
    assert stats.bytes_out == 0
    assert stats.kept_bytes["newest"] == 80 * MIB
    assert_identical(expected, actual)
    offload.close()


@pytest.mark.parametrize("saves", [4, 9, 10, 11, 32])
def test_h49_a_step_that_saves_hardly_more_than_what_stays_is_not_moved_once_it_is_known(
    saves: int, backend: Backend
) -> None:
    size, line = 64 * 64 * 4, 8

    def step(around: Around) -> object:
        x = torch.linspace(-1, 1, 64 * 64).view(64, 64).requires_grad_()
        with around:
            y = x
            for _ in range(saves):
                y = y.exp().neg()
            loss = y.sum()
        if isinstance(around, Offload):
            around.stats(synchronize=True)  # else a copy that has not begun when backward comes is cancelled
        loss.backward()
        return loss.detach(), x.grad

    expected, offload, moved = (
        step(nullcontext()),
        backend.offload(keep_last_bytes="auto", prefetch_bytes=line * size, step_plans="auto"),
        [],
    )
    for _ in range(4):
        offload.reset_stats()
        assert_identical(expected, step(offload))
        stats = offload.stats(synchronize=True)
        moved.append(stats.bytes_out)
        assert stats.without_offload_bytes_peak == saves * size
        assert stats.device_bytes_peak <= saves * size, "never more than without offload"
    assert moved[0] == max(saves - line, 0) * size
    assert (moved[1:] == [0, 0, 0]) == (saves <= line * 5 / 4)
