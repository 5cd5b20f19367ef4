"""Settings that are advised are set, and what was said of them holds in real steps."""

from __future__ import annotations

import re
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import eager_offload as eo
from eager_offload.stats import KeepReason, SavedRow
from eager_offload.step_memory import peak_of

pytestmark = pytest.mark.filterwarnings("ignore:eager_offload")

MIB = 1 << 20


def test_a_step_holds_what_the_note_says() -> None:
    """25 operators that save 4 MiB each: so much stays, is on its way, and is the last operator's."""

    def held(prefetch: str, keep_last: str, reason: KeepReason | None = None) -> int:
        rows = [SavedRow(4 * MIB, 4 * MIB, reason if operator % 5 == 0 else None, operator) for operator in range(25)]
        given = {"max_inflight_bytes": "12MiB", "prefetch_bytes": prefetch, "keep_last_bytes": keep_last}
        return peak_of(rows, eo.OffloadConfig(**given)).held // MIB

    assert held("8MiB", "0MiB") == 4 + 12 + 4
    assert held("8MiB", "20MiB") == 20 + 12 + 4
    assert held("60MiB", "0MiB") == 60 + 4, "backward holds more"
    assert held("8MiB", "90MiB") == 100, "all of it"
    assert held("8MiB", "0MiB", KeepReason.ALIVE) == 20 + 20


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(width, 4 * width), nn.Linear(4 * width, width), nn.LayerNorm(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


def mlp() -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    return nn.Sequential(*(Block(64) for _ in range(6))), torch.randn(1024, 64)


def nbytes_of(text: str) -> float:
    """Bytes of a size that was written for a reader."""
    number, unit = text.split()
    return float(number) * {"KiB": 1 << 10, "MiB": MIB}[unit]


def trained(offload: eo.Offload, model: nn.Module, batch: torch.Tensor, steps: int = 4) -> eo.OffloadStats:
    for _ in range(steps):
        with offload:
            loss = model(batch).square().mean()
        loss.backward()
    return offload.stats(synchronize=True)


SETTINGS: list[dict[str, Any]] = [
    {"min_bytes": "8MiB"},
    {"keep_last_bytes": "1GiB"},
    {"max_inflight_bytes": "1GiB", "prefetch_bytes": "1GiB"},
    {"device_budget": "1TiB"},
    {"skip": ["*"]},
]


@pytest.mark.parametrize("given", SETTINGS, ids=[" ".join(one) for one in SETTINGS])
def test_what_is_advised_lowers_the_peak_to_what_was_said(given: dict[str, Any], tmp_path: Path) -> None:
    module, batch = mlp()
    given = {"min_bytes": "16KiB", "disk_path": tmp_path, **given}
    with closing(eo.Offload(**given)) as offload:
        if "skip" in given:
            offload.skip_in(module)
        first = trained(offload, module, batch).advice[0]
    assert first.startswith(("Memory did not fall", "Memory hardly fell")), first
    found = re.search(r"a step holds at most ([\d.]+ \w+) of its ([\d.]+ \w+)", first)
    assert found is not None, first
    held, without = map(nbytes_of, found.groups())
    advised = first[: found.start()].rpartition(". ")[2]
    named, left_out = dict(re.findall(r'(\w+)="?(\w+)"?', advised)), re.findall(r"[Ww]ithout (\w+)", advised)
    assert len(named) + len(left_out) in (1, 2, 3)
    settings = {name: value for name, value in {**given, **named}.items() if name not in left_out}
    with closing(eo.Offload(**settings)) as offload:
        if "skip" in settings:
            offload.skip_in(module)
        trained(offload, module, batch, 3)  # a step is known from then on
        offload.reset_stats()
        stats = trained(offload, module, batch, 3)
    assert stats.bytes_out > 0
    assert stats.device_bytes_peak <= held + 0.05 * MIB  # sizes are rounded to a tenth
    assert stats.without_offload_bytes_peak <= without + 0.05 * MIB
    assert held <= 0.8 * without
    assert stats.advice[0].startswith("Memory fell"), stats.advice[0]


def test_forwards_that_end_in_an_error_are_counted_and_not_blamed(tmp_path: Path) -> None:
    module, batch = mlp()
    with closing(eo.Offload(min_bytes="16KiB", keep_last_bytes=0, disk_path=tmp_path)) as offload:
        for _ in range(6):  # the first ones are written down, and later ones are not
            with suppress(ZeroDivisionError), offload:
                raise ZeroDivisionError(module(batch))
        stats = trained(offload, module, batch, 1)
    assert stats.failed_forwards == 6
    assert stats.released_bytes > 0
    assert any("6 times a forward ended in an error" in one for one in stats.advice)
    assert not any("never asked for" in one or "no backward" in one for one in stats.advice), stats.advice
