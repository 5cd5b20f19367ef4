"""H25: the soak, for a few seconds; `make soak` takes its time."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.processes import printed_by
from tools.soak.census import compare


@pytest.mark.long
def test_h25_a_short_soak_is_exact_and_flat(tmp_path: Path, record_property: Callable[[str, object], None]) -> None:
    printed = printed_by("-m", "tools.soak", "--minutes", "0.05", "--disk-path", tmp_path)
    last = printed.splitlines()[-1]
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
    assert "GREW" not in printed
    assert list(tmp_path.iterdir()) == []


def test_what_grows_is_seen() -> None:
    before = {"resident memory": 1 << 30, "descriptors": 7, "objects: eager_offload.stats.Counters": 3}
    after = {"resident memory": (1 << 30) + (1 << 20), "descriptors": 8, "objects: eager_offload.stats.Counters": 300}
    assert {row.what: row.flat for row in compare(before, after)} == {
        "resident memory": True,
        "descriptors": False,
        "objects: eager_offload.stats.Counters": False,
    }
    assert all(row.flat for row in compare(after, before))
