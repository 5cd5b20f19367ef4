"""Numbers for trackers: what happened since the last reading, for one step."""

from __future__ import annotations

from pathlib import Path

import torch

import eager_offload as eo
from eager_offload.integrations.metrics import OffloadMetrics


def step(offload: eo.Offload) -> None:
    weight = torch.ones(256, 256, requires_grad=True)
    with offload:
        loss = (weight * 2).exp().sum()
    loss.backward()
    offload.stats(synchronize=True)


def test_amounts_are_those_of_one_step_and_peaks_those_of_the_run(tmp_path: Path) -> None:
    offload = eo.Offload(min_bytes=1024, tier="disk", disk_path=tmp_path, keep_last_bytes=0)
    step(offload)  # before anybody reads: not counted
    metrics = OffloadMetrics(offload)
    once = offload.stats()
    step(offload)
    assert metrics.read()["offload/bytes_out"] == once.bytes_out > 0
    step(offload)
    step(offload)
    figures = metrics.read(steps=2)
    assert figures["offload/saved_bytes"] == once.saved_bytes
    assert figures["offload/offloaded_bytes"] == once.offloaded_bytes
    assert figures["offload/disk_bytes_peak"] == offload.stats().disk_bytes_peak > 0
    assert all(type(figure) is float for figure in figures.values())
    assert metrics.read()["offload/bytes_out"] == 0
    offload.close()


def test_parts_add_up(tmp_path: Path) -> None:
    offload = eo.Offload(min_bytes=1024, tier="disk", disk_path=tmp_path)
    metrics = OffloadMetrics(offload)
    step(offload)
    figures = metrics.read()
    parts = ("offloaded_bytes", "shared_bytes", "kept_bytes")
    assert figures["offload/saved_bytes"] == sum(figures[f"offload/{part}"] for part in parts) > 0
    offload.close()


def test_stats_that_were_reset_in_between_never_give_negative_figures(tmp_path: Path) -> None:
    offload = eo.Offload(min_bytes=1024, tier="disk", disk_path=tmp_path, keep_last_bytes=0)
    step(offload)
    step(offload)
    metrics = OffloadMetrics(offload)
    offload.reset_stats()
    step(offload)
    assert metrics.read()["offload/saved_bytes"] == offload.stats().saved_bytes > 0
    offload.close()


def test_figures_of_no_step_at_all_are_zero() -> None:
    figures = OffloadMetrics(eo.Offload()).read(steps=0)
    assert set(figures.values()) == {0.0}
