"""H25: the soak, for a few seconds; `make soak` takes its time."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.processes import printed_by


@pytest.mark.long
def test_h25_a_short_soak_is_exact_and_flat(tmp_path: Path, record_property: Callable[[str, object], None]) -> None:
    printed = printed_by("-m", "tools.soak", "--minutes", "0.05", "--disk-path", tmp_path)
    last = printed.splitlines()[-1].replace(",", "")
    found = re.fullmatch(r"(\d+) steps (\d+) faults injected (?:.* )?(\d+) MiB moved 0 that must not happen", last)
    assert found is not None, last
    steps, faults, moved = map(int, found.groups())
    assert steps > 42
    assert min(faults, moved) > 0
    record_property("faults", faults)
    assert "GREW" not in printed
    assert list(tmp_path.iterdir()) == []
