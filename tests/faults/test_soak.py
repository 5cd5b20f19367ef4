"""H25: the soak, for a few seconds; `make soak` takes its time."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("rich", reason="the demo's extra is not installed")

from tools.soak.census import compare


def test_h25_a_short_soak_is_exact_and_flat(tmp_path: Path, record_property: Callable[[str, object], None]) -> None:
    command = [sys.executable, "-m", "tools.soak", "--minutes", "0.05", "--disk-path", str(tmp_path)]
    ended = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=280)
    assert ended.returncode == 0, ended.stdout[-3000:] + ended.stderr[-3000:]
    last = ended.stdout.splitlines()[-1]
    found = re.fullmatch(
        r"([\d,]+) steps, ([\d,]+) faults injected, (?:[\d,]+ errors that said so, )?([\d,]+) MiB moved, "
        "0 that must not happen",
        last,
    )
    assert found is not None, last
    steps, faults, moved = (int(number.replace(",", "")) for number in found.groups())
    assert steps > 42
    assert faults > 0
    record_property("faults", faults)
    assert moved > 0
    assert "GREW" not in ended.stdout
    assert list(tmp_path.iterdir()) == []


def test_what_grows_is_seen() -> None:
    before = {"resident memory": 1 << 30, "descriptors": 7, "objects: eager_offload.stats.Tally": 3}
    after = {"resident memory": (1 << 30) + (1 << 20), "descriptors": 8, "objects: eager_offload.stats.Tally": 300}
    assert {row.what: row.flat for row in compare(before, after)} == {
        "resident memory": True,
        "descriptors": False,
        "objects: eager_offload.stats.Tally": False,
    }
    assert all(row.flat for row in compare(after, before))
