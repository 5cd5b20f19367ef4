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
    assert not any("never unpacked" in one or "no backward" in one for one in stats.advice), stats.advice


def test_h78_outputs_that_the_loop_holds_count_on_the_device_and_nothing_less_is_promised(tmp_path: Path) -> None:
    module, batch = mlp()
    with closing(eo.Offload(min_bytes="16KiB", keep_last_bytes=0, disk_path=tmp_path)) as offload:

        def steps(count: int) -> eo.OffloadStats:
            for _ in range(count):
                held, h = [], batch
                with offload:
                    for block in module:
                        held.append(h := block(h))
                    loss = h.square().mean()
                loss.backward()
                sizes.add(sum(one.nbytes for one in held))
            return offload.stats(synchronize=True)

        sizes: set[int] = set()
        first, later = steps(1), steps(4)
        offload.reset_stats()
        known = steps(3)
    assert known.bytes_out > 0
    for stats in (first, later, known):
        assert stats.device_bytes_peak > max(sizes)
        assert "at most" not in str(stats.advice).replace("at most {}", "").split("of saved tensors")[1]


@pytest.mark.parametrize("changes", [False, True])
def test_h78_a_first_step_with_large_windows_does_not_decide(changes: bool, tmp_path: Path) -> None:
    module, batch = mlp()
    with closing(eo.Offload(min_bytes="16KiB", disk_path=tmp_path)) as offload:
        first = trained(offload, module, batch, 1)
        for step in range(1, 6):
            later = trained(offload, module, batch[: len(batch) - 8 * step * changes], 1)
        offload.reset_stats()
        known = trained(offload, module, batch, 1)
    assert first.device_bytes_peak == first.without_offload_bytes_peak, "all of it is within the first windows"
    assert "those of a first step are large" in first.advice[0] or not first.offloaded_bytes
    assert (later.table_forwards > 0) is not changes
    for stats in (later, known):
        assert stats.bytes_out > 0
        assert stats.device_bytes_peak < 0.8 * stats.without_offload_bytes_peak
        assert stats.advice[0].startswith("Memory fell")
