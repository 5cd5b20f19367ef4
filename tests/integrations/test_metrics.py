"""Numbers for trackers: what happened since the last reading, for one step."""

from __future__ import annotations

from pathlib import Path

import pytest
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


def everything(offload: eo.Offload) -> eo.OffloadStats:
    """Takes storages away, shares them, brings them back, and has no room for others."""
    weight = torch.ones(256, 256, requires_grad=True)
    losses = []
    with offload:
        for factor in range(5):
            hidden = (weight * factor).exp()
            losses.append(hidden.view(-1).square().sum())
            del hidden
    offload.stats(synchronize=True)  # all of it is away, and backward has to wait for it
    torch.stack(losses).sum().backward()
    del losses
    return offload.stats(synchronize=True)


def test_each_figure_is_the_difference_of_two_stats_for_one_step_and_each_peak_that_of_stats(tmp_path: Path) -> None:
    sizes = {"disk_budget": "768KiB", "max_inflight_bytes": "256KiB", "prefetch_bytes": 0, "keep_last_bytes": 0}
    offload = eo.Offload(min_bytes=1024, tier="disk", disk_path=tmp_path, **sizes)
    with pytest.warns(RuntimeWarning, match="no room for"):
        before = everything(offload)
    metrics = OffloadMetrics(offload)
    for steps in 1, 2:
        for _ in range(steps):
            now = everything(offload)
        grown = {
            "saved_bytes": now.saved_bytes - before.saved_bytes,
            "offloaded_bytes": now.offloaded_bytes - before.offloaded_bytes,
            "shared_bytes": now.shared_bytes - before.shared_bytes,
            "kept_bytes": sum(now.kept_bytes.values()) - sum(before.kept_bytes.values()),
            "bytes_out": now.bytes_out - before.bytes_out,
            "bytes_in": now.bytes_in - before.bytes_in,
            "stall_seconds": now.stall_seconds - before.stall_seconds,
            "demotions": sum(now.demotions.values()) - sum(before.demotions.values()),
        }
        peaks = {
            "inflight_bytes_peak": now.inflight_bytes_peak,
            "resident_bytes_peak": now.resident_bytes_peak,
            "host_bytes_peak": now.host_bytes_peak,
            "disk_bytes_peak": now.disk_bytes_peak,
        }
        assert all(amount > 0 for amount in grown.values()), "or a constant would do"
        assert [name for name, peak in peaks.items() if not peak] == ["host_bytes_peak"], "none is taken for a CPU"
        expected = {name: amount / steps for name, amount in grown.items()} | peaks
        assert metrics.read(steps) == {f"offload/{name}": figure for name, figure in expected.items()}
        before = now
    offload.close()
