"""The accelerator's benchmarks: their plumbing, without one; and what they say where there is none."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks.plain import PlainTable
from tests.virtual_device import build

pytestmark = pytest.mark.long

ROOT = Path(__file__).resolve().parent.parent


def bench(*arguments: str, name: str = "gpu_train") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", f"benchmarks.{name}", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=250)


@pytest.mark.skipif(torch.accelerator.is_available(), reason="there is an accelerator on this machine")
@pytest.mark.parametrize("name", ["gpu_train", "capture"])
def test_without_an_accelerator_it_ends_with_one_line(name: str) -> None:
    ended = bench(name=name)
    assert ended.returncode == 2
    assert ended.stdout == ""
    assert ended.stderr.startswith(f"benchmarks.{name}: torch finds no accelerator")
    assert ended.stderr.count("\n") == 1


def test_its_plumbing_on_the_cpu(tmp_path: Path) -> None:
    output = tmp_path / "gpu_train.json"
    quick = ["--device", "cpu", "--quick", "--sequences", "64", "--variants", "none;ours"]
    ended = bench(*quick, "--output", str(output))
    assert ended.returncode == 0, ended.stdout + ended.stderr
    content = json.loads(output.read_text())
    assert content["benchmark"] == "gpu_train"
    none, ours = content["samples"]["points"]
    assert none["losses"] == ours["losses"]
    assert all(len(point["backward_seconds"]) == 3 for point in (none, ours))
    assert none["stats"] is None
    assert ours["stats"]["saved_bytes"] > 0
    rows = content["summary"]
    assert [row["variant"] for row in rows] == ["none", "ours"]
    assert rows[1]["same_losses"]
    assert set(rows[1]["step_seconds"]) == {"median", "least", "most"}
    assert "others with less memory and less time" in content["limits"][0]["what"]
    assert str(ROOT) not in output.read_text()


@pytest.mark.skipif(not hasattr(torch.accelerator, "Graph"), reason="this torch captures nothing on such a device")
@pytest.mark.skipif(build.reason_not_to_build() is not None, reason="the virtual device cannot be built")
def test_captures_on_the_virtual_device(tmp_path: Path) -> None:
    output = tmp_path / "capture.json"
    ended = bench("--virtual", "--quick", "--output", str(output), name="capture")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    content = json.loads(output.read_text())
    summary, samples = content["summary"], content["samples"]
    assert list(samples) == ["eager", "eager, offload followed", "captured", "captured, offload"]
    assert all(row["same_losses"] for row in summary["ways"].values())
    assert all(len(way["seconds"]) == len(way["losses"]) == 2 for way in samples.values())
    assert [len(way["launch_seconds"]) for way in samples.values()] == [0, 0, 2, 2]
    assert summary["plan"]["offloaded"] > 0
    assert summary["followed_forwards"] > 0
    assert len(content["limits"]) == 4
    assert all(limit["what"] in ended.stdout for limit in content["limits"])
    assert str(ROOT) not in output.read_text()


def test_a_table_without_rich_has_columns() -> None:
    shown = PlainTable()
    for header in ("limit", "measured"):
        shown.add_column(header, justify="right")
    shown.add_row("[green]a[/green]", "1.0")
    shown.add_row("long one")
    assert str(shown) == "limit     measured\na              1.0\nlong one          "
