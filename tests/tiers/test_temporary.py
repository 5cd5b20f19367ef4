"""That the tests of disks run where the temporary directory is memory, as some systems have it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CHOSEN = "tests/tiers/test_disk_files.py::test_an_inherited_slot_names_the_fork_as_the_reason"


def run_one(cache: Path, *arguments: str) -> tuple[int, str]:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", CHOSEN, *arguments]
    environ = {**os.environ, "TMPDIR": "/dev/shm", "XDG_CACHE_HOME": str(cache)}
    done = subprocess.run(command, env=environ, cwd=ROOT, capture_output=True, text=True, timeout=200)
    return done.returncode, done.stdout


@pytest.mark.parametrize("arguments", [[], pytest.param(["-n", "1"], marks=pytest.mark.long)])
def test_where_the_temporary_directory_is_memory_another_is_used_and_removed(
    directory: Path, arguments: list[str]
) -> None:
    code, said = run_one(directory, *arguments)
    assert code == 0, said[-1000:]
    assert "1 passed" in said
    assert list(directory.iterdir()) == []


def test_a_base_directory_in_memory_that_the_user_has_named_is_told(directory: Path) -> None:
    base = Path("/dev/shm") / f"eager_offload-tests-{os.getpid()}"
    try:
        code, said = run_one(directory, f"--basetemp={base}")
    finally:
        shutil.rmtree(base, ignore_errors=True)
    assert code == 1
    assert "name one on a disk with --basetemp" in said
