"""An example of each framework runs on two ranks as its docstring says, learns the same without, and leaves nothing."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from tests.ranks.launch import ROOT, started, torchrun

pytestmark = pytest.mark.long

#: By framework, an example of it and its arguments.
EXAMPLES = [
    ("accelerate", "train_accelerate.py"),
    ("lightning", "train_lightning.py", "--sharded", "--steps=2", "--layers=2"),
    ("lightning", "train_fabric.py"),
    ("transformers", "train_transformers.py", "--gradient_accumulation_steps=2"),
]


def printed(command: list[str], directory: Path, seconds: int = 240, **environment: str) -> str:
    own = {"EAGER_OFFLOAD_DISK_PATH": str(directory), "EAGER_OFFLOAD_TIER": "disk"}
    paths = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
    with started(command, **own, PYTHONPATH=paths, **environment) as launch:
        said = launch.communicate(timeout=seconds)[0]
    assert launch.returncode == 0, said[-4000:]
    assert list(directory.iterdir()) == []
    return said


def moved(said: str) -> list[float]:
    """What the ranks, or their steps, say that they moved."""
    return [float(number) for number in re.findall(r"(?:offloaded|moved|,) ([\d.]+) (?:MiB|bytes)", said)]


def learnt(said: str) -> list[str]:
    """Losses, and the digest of the parameters of each rank that prints one; ranks write in any order."""
    found = re.findall(
        r"parameters (?:[0-9a-f]{16}|[0-9a-f]{12})|step \d+: loss [\d.]+|losses [\d. ]+|'loss': '[\d.]+'", said
    )
    assert len(found) >= 3, said
    return sorted(found)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("example", EXAMPLES, ids=" ".join)
def test_an_example_learns_the_same_with_offload_and_without(example: tuple[str, ...], tmp_path: Path) -> None:
    framework, script, *arguments = example
    pytest.importorskip(framework)
    command = torchrun(2, str(ROOT / "examples" / script), *arguments)
    with_offload, without = printed(command, tmp_path), printed(command, tmp_path, EAGER_OFFLOAD="0")
    assert learnt(with_offload) == learnt(without)
    assert len(moved(with_offload)) >= 2
    assert min(moved(with_offload)) > 0
    assert not any(moved(without))
