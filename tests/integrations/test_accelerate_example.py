"""The example as its docstring says to launch it, with offload and without."""

from __future__ import annotations

import re
import sys

import pytest

from tests.ranks.launch import ROOT, started, torchrun

EXAMPLE = ROOT / "examples" / "train_accelerate.py"
LAUNCHERS = {
    "accelerate": [
        *(sys.executable, "-m", "accelerate.commands.launch", "--config_file", "examples/accelerate.yaml"),
        *("--main_process_port", "0"),  # any that is free; launch says 29500 by itself
        str(EXAMPLE),
    ],
    "torchrun": torchrun(2, str(EXAMPLE)),
}


def launched(launcher: str, **environment: str) -> str:
    """What the main process printed."""
    with started(LAUNCHERS[launcher], **environment) as launch:
        printed = launch.communicate(timeout=240)[0]
    assert launch.returncode == 0, printed[-3000:]
    return printed


def moved(printed: str) -> list[float]:
    return [float(number) for number in re.findall(r"(?:, |processes moved )([\d.]+) MiB", printed)]


def learnt(printed: str) -> list[str]:
    return re.findall(r"loss [\d.]+|SHA-256 of the parameters \w+", printed)


@pytest.mark.long
def test_accelerate_launches_it_and_bytes_move() -> None:
    printed = launched("accelerate")
    assert "2 processes moved" in printed
    assert len(learnt(printed)) == 3 + 2
    assert min(moved(printed)) > 0  # a copy that backward overtakes is counted until then


@pytest.mark.long
def test_without_offload_it_learns_the_same() -> None:
    printed, without = launched("torchrun"), launched("torchrun", EAGER_OFFLOAD="0")
    assert learnt(printed) == learnt(without)
    assert min(moved(printed)) > 0 == max(moved(without))
