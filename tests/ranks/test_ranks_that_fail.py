"""One rank fails: all end, and nothing is left, neither a process nor a file."""

from __future__ import annotations

import signal
from pathlib import Path

import psutil
import pytest

from tests.ranks.launch import launch, started, torchrun


def assert_nothing_is_left(directory: Path, output: str) -> None:
    assert "no rank failed" not in output
    for rank in range(2):
        pid = int((directory / f"pid.{rank}").read_text())  # it was there, and had moved bytes
        assert not psutil.pid_exists(pid), output
    assert list((directory / "spill").iterdir()) == []


def test_an_error_in_backward_ends_all_ranks(tmp_path: Path) -> None:
    launch(2, tmp_path, ["failing.an_error_in_backward"], thorough=False)
    assert "the third step of one rank fails" in (tmp_path / "failing.an_error_in_backward.1").read_text()
    assert_nothing_is_left(tmp_path, (tmp_path / "output").read_text())


@pytest.mark.long
@pytest.mark.sampled(3)  # among four in a row each strategy meets each place, and all three ways are there
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("way", ["error", "interrupt", "kill"])
def test_all_ranks_end_when_one_fails(way: str, where: str, strategy: str, tmp_path: Path) -> None:
    with started(torchrun(2, "-m", "tests.ranks.failing", str(tmp_path), strategy, way, where)) as process:
        output = process.communicate(timeout=120)[0]
    assert process.returncode != 0, output
    assert_nothing_is_left(tmp_path, output)


@pytest.mark.long
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_all_ranks_end_when_the_launcher_is_told_to(number: signal.Signals, tmp_path: Path) -> None:
    with started(torchrun(2, "-m", "tests.ranks.failing", str(tmp_path), "fsdp", "wait", "backward")) as process:
        for line in process.stdout or ():
            if "waits" in line:
                process.send_signal(number)
                break
        output = process.communicate(timeout=120)[0]
    assert process.returncode != 0, output
    assert_nothing_is_left(tmp_path, output)
