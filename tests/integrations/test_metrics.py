"""Numbers for trackers: what happened since the last reading, for one step."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import eager_offload as eo
from eager_offload.integrations.metrics import OffloadMetrics, StepTrace, summarize
from tests.integrations.training import fields


@pytest.fixture
def offload(tmp_path: Path) -> Iterator[eo.Offload]:
    made = eo.Offload(**fields(tmp_path))
    yield made
    made.close()


def step(offload: eo.Offload) -> None:
    weight = torch.ones(256, 256, requires_grad=True)
    with offload:
        loss = (weight * 2).exp().sum()
    loss.backward()
    offload.stats(synchronize=True)


def test_stats_that_were_reset_in_between_never_give_negative_figures(offload: eo.Offload) -> None:
    step(offload)
    step(offload)
    metrics = OffloadMetrics(offload, "all")
    offload.reset_stats()
    step(offload)
    assert metrics.read()["offload/saved_bytes"] == offload.stats().saved_bytes > 0


def test_figures_of_no_step_at_all_are_zero() -> None:
    figures = OffloadMetrics(eo.Offload(), "all").read(steps=0)
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
    metrics = OffloadMetrics(offload, "all")
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
            "host_wait_seconds": now.host_wait_seconds - before.host_wait_seconds,
            "processor_seconds": now.processor_seconds - before.processor_seconds,
            "fallbacks": sum(now.fallbacks.values()) - sum(before.fallbacks.values()),
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
        three = {"device_peak_mib": now.device_bytes_peak / 2**20, "moved_mib": expected["bytes_out"] / 2**20}
        figures = metrics.read(steps)
        assert figures == {f"offload/{name}": figure for name, figure in (expected | three).items()}
        assert all(type(figure) is float for figure in figures.values())
        before = now
    offload.close()


@pytest.mark.parametrize("rank", [0, 1])
def test_one_step_is_traced_into_a_file_for_each_rank(
    offload: eo.Offload, rank: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", str(rank))
    trace = StepTrace(offload, 2, tmp_path / "step.json")
    for number in 1, 2, 3:
        trace.begin(number)
        step(offload)
    trace.end()
    (path,) = tmp_path.glob("*.json")
    assert path.name == ("step.rank1.json" if rank else "step.json")
    events = json.loads(path.read_text())["traceEvents"]
    assert sum(one["name"] == "forward" for one in events) <= 1, "of one step"


@pytest.mark.parametrize("rank", ["0", "1"])
def test_a_line_at_the_end_is_the_first_of_the_stats_and_of_the_first_rank(
    offload: eo.Offload, rank: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RANK", rank)
    summarize(offload)
    assert capsys.readouterr().err == "", "a warning speaks of a run that moves nothing"
    step(offload)
    summarize(offload)
    said = capsys.readouterr().err
    assert bool(said) is (rank == "0")
    assert said.startswith("eager_offload: peak saved-tensor memory") or not said
    assert ("Memory fell" in offload.stats().advice[0]) is not (". Memory " in said) or not said, (
        "it says why it did not"
    )
