"""The benchmarks of the integrations run, and leave what is promised. Their numbers are no part of this."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
pytest.importorskip("rich", reason="the demo's extra is not installed")
FRAMEWORKS = {
    "Accelerate": "accelerate",
    "Lightning": "lightning",
    "Transformers": "transformers",
    "Transformers, callback": "transformers",
}


def bench(name: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", f"benchmarks.{name}", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280)


def left_behind(name: str, output: Path, *arguments: str) -> dict[str, Any]:
    ended = bench(name, "--quick", "--output", str(output), *arguments)
    assert ended.returncode == 0, ended.stdout[-3000:] + ended.stderr[-3000:]
    content: dict[str, Any] = json.loads(output.read_text())
    assert content["benchmark"] == name
    assert str(ROOT) not in output.read_text()
    return content


@pytest.mark.long
@pytest.mark.sampled(2)
@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_an_integration_is_timed_beside_the_same_loop_by_hand(framework: str, tmp_path: Path) -> None:
    pytest.importorskip(FRAMEWORKS[framework])
    content = left_behind("frameworks", tmp_path / "frameworks.json", "--frameworks", framework)
    (samples,) = content["samples"].values()
    assert [len(turn["by_hand"]) for turn in samples["small"]] == [10]
    assert [len(turn["integration"]) for turn in samples["large"]] == [1]
    assert content["summary"][framework]["moved_bytes"] > 0
    assert framework in content["limits"][0]["what"]


@pytest.mark.long
def test_the_accelerators_table_has_its_plumbing_tried_on_a_cpu(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    rows = "Transformers;Transformers, ours"
    content = left_behind("gpu_frameworks", tmp_path / "table.json", "--device", "cpu", "--rows", rows)
    none, ours = content["summary"]
    assert none["failure"] is None
    assert ours["same_losses"] is True
    assert content["samples"][1]["stats"]["saved_bytes"] > 0
    (limit,) = content["limits"]
    assert limit["met"] is False, "so small a decoder saves nothing that would be worth moving"


@pytest.mark.skipif(torch.accelerator.is_available(), reason="there is an accelerator on this machine")
def test_without_an_accelerator_the_table_ends_with_one_line() -> None:
    ended = bench("gpu_frameworks")
    assert (ended.returncode, ended.stdout) == (2, "")
    assert ended.stderr.startswith("benchmarks.gpu_frameworks: torch finds no accelerator")
