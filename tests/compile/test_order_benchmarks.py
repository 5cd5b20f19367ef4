"""The benchmarks of passes run and say what they promise; the simulated figures hold whatever machine this is."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("rich", reason="the demo's extra is not installed")

from benchmarks import compiled_passes, compiled_simulate

pytestmark = pytest.mark.long


def written(path: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(path.read_text())
    assert content["limits"]
    return content


def test_a_compiled_step_stays_in_its_window_and_near_its_floor(tmp_path: Path) -> None:
    output = tmp_path / "simulate.json"
    arguments = ["--quick", "--layers", "2", "--tokens", "8k,32k", "--jitter", "0", "--output", str(output)]
    assert compiled_simulate.main(arguments) == 0
    content = written(output)
    for name in ("8k", "32k"):
        ours, none = content["samples"][name]["ours"], content["samples"][name]["none"]
        for step, plain in zip(ours, none, strict=True):
            assert step["bytes_out"] == step["bytes_back"] > 0
            assert step["floor_seconds"] <= step["step_seconds"] <= 1.1 * step["floor_seconds"]
            assert step["compute_seconds"] == pytest.approx(plain["compute_seconds"])
    bounded = [limit for limit in content["limits"] if "over the" in limit["what"]]
    assert len(bounded) == 4
    assert all(limit["met"] for limit in bounded)


def test_passes_are_timed_one_by_one_and_pin_a_transfer_to_two_neighbours_at_most(tmp_path: Path) -> None:
    output = tmp_path / "passes.json"
    assert compiled_passes.main(["--nodes", "150", "--rounds", "1", "--output", str(output)]) == 0
    content = written(output)
    for samples in content["samples"].values():
        for sample in samples:
            assert set(sample["seconds"]) == set(compiled_passes.STEPS)
            assert sample["transfers"] > 0
    (pins,) = (limit for limit in content["limits"] if limit["what"].startswith("pinned"))
    assert pins["met"]
