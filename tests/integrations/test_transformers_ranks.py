"""The example on two ranks: the hash that it prints is the same with offload and without."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from tests.processes import printed_by
from tests.ranks.launch import ROOT, started, torchrun

EXAMPLE = ROOT / "examples" / "train_transformers.py"
_LINE = re.compile(r"rank (\d): moved (\d+) bytes, parameters (\w+)")


def run(path: Path, *arguments: str, **environment: str) -> dict[int, tuple[int, str]]:
    """What each of two ranks moved, and the hash of its parameters."""
    own = {"EAGER_OFFLOAD_DISK_PATH": str(path), "EAGER_OFFLOAD_TIER": "disk"}
    paths = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
    command = torchrun(2, str(EXAMPLE), "--output_dir", str(path / "out"), *arguments)
    with started(command, **own, PYTHONPATH=paths, **environment) as launch:
        printed = launch.communicate(timeout=250)[0]
    assert launch.returncode == 0, printed[-4000:]
    ranks = {int(rank): (int(moved), digest) for rank, moved, digest in _LINE.findall(printed)}
    assert ranks.keys() == {0, 1}, printed
    return ranks


@pytest.mark.long
def test_two_ranks_train_to_the_same_bits_with_and_without(tmp_path: Path) -> None:
    with_offload = run(tmp_path, "--gradient_accumulation_steps=2")
    without = run(tmp_path, "--gradient_accumulation_steps=2", EAGER_OFFLOAD="0")
    assert len({digest for ranks in (with_offload, without) for _, digest in ranks.values()}) == 1
    assert all(moved > 0 for moved, _ in with_offload.values())
    assert all(moved == 0 for moved, _ in without.values())
    assert [entry.name for entry in tmp_path.iterdir() if entry.name != "out"] == []


@pytest.mark.long
def test_one_rank_prints_a_line_a_step_and_leaves_nothing_in_the_working_directory(tmp_path: Path) -> None:
    printed = printed_by(EXAMPLE, cwd=tmp_path)
    assert len(re.findall(r"^\{'loss': ", printed, re.MULTILINE)) == 3, printed
    assert int(_LINE.findall(printed)[0][1]) > 0
    assert list(tmp_path.iterdir()) == []
