"""The first line of advice: whether memory fell, why not, and settings that were tried on the rows of a step."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import eager_offload as eo
from eager_offload.stats import KeepReason, OffloadStats, SavedRow
from eager_offload.step_memory import peak_of

MIB, GIB = 1 << 20, 1 << 30
SMALL, ALIVE, REGION = KeepReason.SMALL, KeepReason.ALIVE, KeepReason.REGION
pytestmark = pytest.mark.filterwarnings("ignore:eager_offload")


def rows(count: int, nbytes: int, reason: KeepReason | None = None) -> tuple[SavedRow, ...]:
    """So many operators, of which each saves a tensor."""
    return tuple(SavedRow(nbytes, nbytes, reason, operator) for operator in range(count))


MOVED = {"offloaded_bytes": 96 * MIB, "device_bytes_peak": 100 * MIB, "without_offload_bytes_peak": 100 * MIB}
FELL = {**MOVED, "device_bytes_peak": 24 * MIB}
#: The rows of a step, its stats and its config; how the first line begins, and what it names or does not.
SAYS: list[tuple[tuple[SavedRow, ...], dict[str, Any], dict[str, Any], str, list[str], list[str]]] = [
    (rows(25, 4 * MIB), FELL, {}, "Memory fell: at most 24.0 MiB", ["100.0 MiB without offload (-76 %)"], ["With "]),
    (
        rows(25, 4 * MIB),
        {**MOVED, "steps": 6},
        {},
        "Memory falls once a step is known: one after one like it holds at most 36.0 MiB.",
        ["Before that windows are large: at most 100.0 MiB"],
        ["With "],
    ),
    (
        rows(25, 4 * MIB),
        {**MOVED, "kept_bytes": {"newest": 99 * MIB}},
        {"keep_last_bytes": "1GiB"},
        "Memory hardly fell: at most 100.0 MiB of saved tensors on the device, 100.0 MiB without offload (0 %), since ",
        ["are the newest ones", 'With keep_last_bytes="auto" a step holds at most 36.0 MiB of its 100.0 MiB'],
        [],
    ),
    (
        rows(25, 4 * MIB),
        {**MOVED, "max_inflight_bytes": GIB, "prefetch_bytes": GIB},
        {"max_inflight_bytes": "1GiB", "prefetch_bytes": "1GiB", "keep_last_bytes": "4MiB"},
        "Memory hardly fell",
        ["since windows of 1.0 GiB", 'With max_inflight_bytes="auto" and prefetch_bytes="auto" a step'],
        [],
    ),
    (
        rows(400, MIB // 4, SMALL),
        {"kept_bytes": {"small": 600 * MIB}, "steps": 6},
        {},
        "Memory did not fall: nothing moved, because of the 100.0 MiB that a step saves, all are of tensors smaller",
        ['With min_bytes="256KiB" a step holds at most 25.2 MiB of its 100.0 MiB, once one like it has run'],
        ["keep_last_bytes"],
    ),
    (  # smaller than any that is tried
        rows(100, 1024, SMALL),
        {"kept_bytes": {"small": 100 << 10}},
        {},
        "Memory did not fall: nothing moved",
        ["None of the settings that were tried lowers that"],
        ["With "],
    ),
    (  # of two kinds of small tensors the larger are hardly any
        rows(10, MIB // 4, SMALL) + rows(6000, 16 << 10, SMALL),
        {"kept_bytes": {"small": 96 * MIB}},
        {},
        "Memory did not fall: nothing moved",
        ['With min_bytes="16KiB" a step'],
        ["256KiB"],
    ),
    (
        rows(25, 4 * MIB),
        {**MOVED, "kept_bytes": {"newest": 99 * MIB}, "device_budget": GIB, "device_memory_peak": MIB},
        {"device_budget": "1GiB"},
        "Memory hardly fell",
        ["fit into device_budget beside all else. Without device_budget a step holds at most 36.0 MiB"],
        [],
    ),
    (
        rows(25, 4 * MIB),
        {"kept_bytes": {"newest": 100 * MIB}, "keep_last_bytes": GIB},
        {"policy": "free"},
        "Memory did not fall: nothing moved",
        ['as long as policy="free" has not found', 'With policy="max" a step holds at most 36.0 MiB'],
        [],
    ),
    (
        rows(25, 4 * MIB, REGION),
        {"kept_bytes": {"region": 100 * MIB}},
        {"skip": ["blocks.*"]},
        "Memory did not fall: nothing moved",
        ["where nothing may move", "Without skip a step holds at most 36.0 MiB of its 100.0 MiB"],
        [],
    ),
    (  # a region that is no setting
        rows(25, 4 * MIB, REGION),
        {"kept_bytes": {"region": 100 * MIB}},
        {},
        "Memory did not fall: nothing moved",
        ["None of the settings that were tried"],
        ["ithout skip"],
    ),
    (
        rows(24, 4 * MIB, ALIVE),
        {**MOVED, "kept_bytes": {"alive": 96 * MIB}},
        {},
        "Memory hardly fell",
        [
            "96.0 MiB are of tensors that something else keeps alive until backward",
            "None of the settings that were tried",
        ],
        [],
    ),
    (
        rows(25, 4 * MIB),
        {**FELL, "copies_within_host": True, "host_bytes_peak": 96 * MIB},
        {"tier": "host"},
        "Memory did not fall: 96.0 MiB were copied within host memory",
        ['tier="auto"'],
        [],
    ),
    (
        rows(25, 4 * MIB),
        {**FELL, "released_bytes": 96 * MIB},
        {},
        "Memory was moved in vain: there was no backward",
        [],
        ["With "],
    ),
    (  # forwards that failed are no reason to say so
        rows(25, 4 * MIB),
        {**FELL, "released_bytes": 96 * MIB, "failed_forwards": 1, "failed_bytes": 96 * MIB},
        {},
        "Memory fell",
        [],
        ["in vain"],
    ),
    (  # compute waits: what has it wait longer is not named
        rows(25, 4 * MIB),
        {**MOVED, "kept_bytes": {"newest": 99 * MIB}, "stall_seconds": 50.0},
        {"keep_last_bytes": "1GiB"},
        "Memory hardly fell",
        ["None of the settings"],
        ['keep_last_bytes="auto"'],
    ),
    (  # three forwards are alive before the first backward
        rows(25, 4 * MIB),
        {**MOVED, "device_bytes_peak": 300 * MIB, "without_offload_bytes_peak": 300 * MIB},
        {"keep_last_bytes": "1GiB"},
        "Memory hardly fell",
        ['With keep_last_bytes="auto" the 3 forwards that are alive at once hold at most 68.0 MiB of their 300.0 MiB'],
        [],
    ),
    (  # what was to leave and could not is in no arithmetic
        rows(25, 4 * MIB),
        {**MOVED, "device_bytes_peak": 92 * MIB, "kept_bytes": {"budget": 60 * MIB}, "demotions": {"budget": 15}},
        {},
        "Memory hardly fell",
        ["found no room in any tier"],
        ["holds at most", "None of the"],
    ),
    ((), {**MOVED, "compiled_regions": 3}, {}, "Memory hardly fell", ["since windows of"], ["With ", "None of the"]),
]


def advice_of(step: tuple[SavedRow, ...], counted: dict[str, Any], config: dict[str, Any]) -> tuple[str, ...]:
    """Of a run that has counted that, and of which ``step`` was written down."""
    saved = {"saved_tensors": 25, "saved_bytes": counted.get("steps", 1) * 100 * MIB, "steps": 1, "seconds": 100.0}
    stats = OffloadStats(**{**saved, **counted})
    stats._know(eo.OffloadConfig(**config), None, step)
    return stats.advice


@pytest.mark.parametrize(("step", "counted", "config", "begins", "has", "has_not"), SAYS)
def test_the_first_line_says_what_became_of_memory(
    step: tuple[SavedRow, ...],
    counted: dict[str, Any],
    config: dict[str, Any],
    begins: str,
    has: list[str],
    has_not: list[str],
) -> None:
    first, *others = advice_of(step, counted, config)
    assert first.startswith(begins)
    assert all(part in first for part in has)
    assert not any(part in first for part in has_not)
    assert first.startswith("Memory fell") or not any("Nothing held" in one for one in others)


def test_windows_of_a_step_hold_what_the_note_says() -> None:
    """25 operators that save 4 MiB each: so much stays, is on its way, and is the last operator's."""
    step = rows(25, 4 * MIB)

    def held(**fields: Any) -> int:
        return peak_of(step, eo.OffloadConfig(**fields)).held // MIB

    given = {"max_inflight_bytes": "12MiB", "prefetch_bytes": "8MiB"}
    assert held(**given, keep_last_bytes=0) == 4 + 12 + 4
    assert held(**given, keep_last_bytes="20MiB") == 20 + 12 + 4
    assert held(**given | {"prefetch_bytes": "60MiB"}, keep_last_bytes=0) == 60 + 4, "backward holds more"
    assert held(**given | {"prefetch_bytes": "90MiB"}) == 100, "such a step stays as a whole"
    assert held(**given, min_bytes="8MiB") == held(**given, device_budget="1GiB") == 100
    step += rows(5, 4 * MIB, ALIVE)
    assert held(**given, keep_last_bytes=0) == 20 + 20


# -- real steps: what is advised is set, and what was said of it holds ------------------------------------------------


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(width, 4 * width), nn.Linear(4 * width, width), nn.LayerNorm(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


def mlp() -> tuple[nn.Module, torch.Tensor]:
    return nn.Sequential(*(Block(64) for _ in range(6))), torch.randn(1024, 64)


def convolutions() -> tuple[nn.Module, torch.Tensor]:
    layers = [
        part for width in (3, *[8] * 7) for part in (nn.Conv2d(width, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU())
    ]
    return nn.Sequential(*layers), torch.randn(8, 3, 64, 64)


def nbytes_of(text: str) -> float:
    """Bytes of a size that was written for a reader."""
    number, unit = text.split()
    return float(number) * {"KiB": 1 << 10, "MiB": MIB}[unit]


def trained(offload: eo.Offload, model: nn.Module, batch: torch.Tensor, steps: int = 4) -> OffloadStats:
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


@pytest.mark.parametrize("model", [mlp, convolutions], ids=["mlp", "convolutions"])
@pytest.mark.parametrize("given", SETTINGS, ids=[" ".join(one) for one in SETTINGS])
def test_what_is_advised_lowers_the_peak_to_what_was_said(
    model: Callable[[], tuple[nn.Module, torch.Tensor]], given: dict[str, Any], tmp_path: Path
) -> None:
    torch.manual_seed(0)
    module, batch = model()
    given = {"min_bytes": "16KiB", "disk_path": tmp_path, **given}
    with closing(eo.Offload(**given)) as offload:
        if "skip" in given:
            offload.skip_in(module)
        first = trained(offload, module, batch).advice[0]
    assert first.startswith(("Memory did not fall", "Memory hardly fell")), first
    found = re.search(r"a step holds at most ([\d.]+ \w+) of its ([\d.]+ \w+)", first)
    assert found is not None, first
    held, without = map(nbytes_of, found.groups())
    named = dict(re.findall(r'(\w+)="?(\w+)"?', first[: found.start()].rpartition(". ")[2]))
    left_out = re.findall(r"[Ww]ithout (\w+)", first[: found.start()].rpartition(". ")[2])
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


def test_a_step_that_fell_is_said_to_have_with_what_copies_took(tmp_path: Path) -> None:
    module, batch = mlp()
    with closing(eo.Offload(min_bytes="16KiB", disk_path=tmp_path)) as offload:
        first = trained(offload, module, batch).advice[0]
        found = re.search(r"one after one like it holds at most ([\d.]+ \w+)", first)
        assert found is not None, "the first step is not known beforehand"
        offload.reset_stats()
        stats = trained(offload, module, batch)
    assert stats.device_bytes_peak <= nbytes_of(found[1]) + 0.05 * MIB
    assert nbytes_of(found[1]) <= 0.8 * stats.without_offload_bytes_peak
    assert stats.advice[0].startswith("Memory fell")
    assert stats.processor_seconds > 0
    assert "of a core" in str(stats).splitlines()[0]


def test_the_warning_counts_the_bytes_of_a_step() -> None:
    module, batch = mlp()
    offload = eo.Offload(min_bytes="1GiB")
    with warnings.catch_warnings(record=True, action="always") as caught:
        stats = trained(offload, module, batch, 5)
    (said,) = [str(one.message) for one in caught if "nothing moved" in str(one.message)]
    (of_a_step,) = re.findall(r"of the ([\d.]+ \w+) that a step saves", said)
    assert nbytes_of(of_a_step) == pytest.approx(stats.saved_bytes / 5, abs=0.05 * MIB)
    offload.close()


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
