"""What the stats say of memory, against real steps."""

from __future__ import annotations

from contextlib import closing, suppress
from pathlib import Path

import pytest
import torch
from torch import nn

import eager_offload as eo

pytestmark = pytest.mark.filterwarnings("ignore:eager_offload")


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(width, 4 * width), nn.Linear(4 * width, width), nn.LayerNorm(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


def mlp() -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    return nn.Sequential(*(Block(64) for _ in range(6))), torch.randn(1024, 64)


def trained(offload: eo.Offload, model: nn.Module, batch: torch.Tensor, steps: int = 4) -> eo.OffloadStats:
    for _ in range(steps):
        with offload:
            loss = model(batch).square().mean()
        loss.backward()
    return offload.stats(synchronize=True)


def test_forwards_that_end_in_an_error_are_counted_and_not_blamed(tmp_path: Path) -> None:
    module, batch = mlp()
    with closing(eo.Offload(min_bytes="16KiB", keep_last_bytes=0, disk_path=tmp_path)) as offload:
        for _ in range(6):
            with suppress(ZeroDivisionError), offload:
                raise ZeroDivisionError(module(batch))
        stats = trained(offload, module, batch, 1)
    assert stats.failed_forwards == 6
    assert stats.released_bytes > 0
    assert any("6 times a forward ended in an error" in one for one in stats.advice)
    assert not any("never asked for" in one or "no backward" in one for one in stats.advice), stats.advice
