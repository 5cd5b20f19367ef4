"""What a run tells of the faults that it has injected."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROGRAM = """
import sys, pytest
sys.path.insert(0, sys.argv[1])
import tests.conftest as ours

class Plugin:
    pytest_terminal_summary = staticmethod(ours.pytest_terminal_summary)

sys.exit(pytest.main(["-q", "-c", "/dev/null", "-p", "no:cacheprovider", sys.argv[2]], plugins=[Plugin()]))
"""
TESTS = """
def test_faults(record_property):
    record_property("faults", 1234)

def test_other():
    assert {other}
"""


@pytest.mark.parametrize(
    ("other", "ends"), [(True, ": 0 wrong gradients, 0 leaks, 0 hangs"), (False, " in what passed")]
)
def test_nothing_is_said_to_be_wrong_only_where_nothing_is(tmp_path: Path, other: bool, ends: str) -> None:
    file = tmp_path / "test_two.py"
    file.write_text(TESTS.format(other=other))
    command = [sys.executable, "-c", PROGRAM, str(ROOT), str(file)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=200)
    assert done.returncode == int(not other), done.stderr[-1000:]
    assert f"1,234 faults injected{ends}" in done.stdout.splitlines()
