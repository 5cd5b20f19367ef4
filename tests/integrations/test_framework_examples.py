"""Each framework's example on two ranks: it learns the same with offload and without, and leaves nothing behind."""

from __future__ import annotations

import importlib.util
import os
import re
import sys
from pathlib import Path

import pytest

from tests.ranks.launch import ROOT, started, torchrun

pytestmark = pytest.mark.long

EXAMPLES = {
    "accelerate": ["train_accelerate.py"],
    "fabric": ["train_fabric.py"],
    "lightning": ["train_lightning.py"],
    "lightning, sharded": ["train_lightning.py", "--sharded", "--steps=2", "--layers=2"],
    "transformers": ["train_transformers.py", "--gradient_accumulation_steps=2"],
}


def printed(command: list[str], directory: Path, **environment: str) -> str:
    own = {"EAGER_OFFLOAD_DISK_PATH": str(directory), "EAGER_OFFLOAD_TIER": "disk"}
    paths = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
    with started(command, **own, PYTHONPATH=paths, **environment) as launch:
        said = launch.communicate(timeout=240)[0]
    assert launch.returncode == 0, said[-4000:]
    assert list(directory.iterdir()) == []
    return said


def moved(said: str) -> list[float]:
    """What the ranks, or their steps, say that they moved."""
    found = re.findall(r"(?:offloaded|moved|,) ([\d.]+) (?:MiB|bytes)", said)
    assert len(found) >= 2, said
    return [float(number) for number in found]


def learnt(said: str) -> list[str]:
    """Losses, and the digest of the parameters of each rank that prints one; ranks write in any order."""
    digests = re.findall(r"parameters (\w{12,})", said)
    assert digests, said
    return sorted([*digests, *re.findall(r"step \d+: loss [\d.]+", said)])


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_learns_the_same_with_offload_and_without(name: str, tmp_path: Path) -> None:
    needed = "lightning" if name == "fabric" else name.partition(",")[0]
    if importlib.util.find_spec(needed) is None:
        pytest.skip(f"not installed: {needed}")
    script, *arguments = EXAMPLES[name]
    command = torchrun(2, str(ROOT / "examples" / script), *arguments)
    with_offload, without = printed(command, tmp_path), printed(command, tmp_path, EAGER_OFFLOAD="0")
    assert learnt(with_offload) == learnt(without)
    assert min(moved(with_offload)) > 0 == max(moved(without))


def test_accelerate_launches_its_example(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    launcher = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", "examples/accelerate.yaml"]
    # Any port that is free; launch says 29500 by itself.
    said = printed([*launcher, "--main_process_port", "0", "examples/train_accelerate.py"], tmp_path)
    assert "2 processes moved" in said
    assert min(moved(said)) > 0


def test_one_rank_of_transformers_prints_a_line_a_step(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    said = printed([sys.executable, str(ROOT / "examples" / "train_transformers.py")], tmp_path)
    assert len(re.findall(r"^\{'loss': ", said, re.MULTILINE)) == 3, said
