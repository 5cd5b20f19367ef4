"""The benchmark of FSDP2's memory runs. Its numbers are no part of this."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.test_benchmarks import measured


@pytest.mark.long
def test_fsdp_is_compared_with_one_process_by_how_memory_is_counted(tmp_path: Path) -> None:
    small = ["--quick", "--layers=1", "--width=64", "--heads=2", "--sequence=64", "--min-bytes=4KiB", "--window=64KiB"]
    content = measured("fsdp_memory", tmp_path, *small)
    runs = content["samples"]
    assert [(run["variant"], run["rank"]) for run in runs] == [
        ("one", 0),
        ("one, offload", 0),
        ("fsdp", 0),
        ("fsdp", 1),
        ("fsdp, offload", 0),
        ("fsdp, offload", 1),
    ]
    for run in runs:
        assert run["peak_bytes"] >= run["base_bytes"] > 0
        assert (run["bytes_out"] > 0) == run["variant"].endswith("offload")
    met = {limit["what"]: limit["met"] for limit in content["limits"]}
    assert met["one: different results of a rank"]
    assert met["fsdp: different results of a rank"]
    assert json.loads((tmp_path / "fsdp_memory.json").read_text())["summary"]["activation_bytes"]["fsdp"]["median"] > 0
