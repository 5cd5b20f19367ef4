"""Engines of many ranks: each example trains as its docstring says, to the bits of the run without offload."""

from __future__ import annotations

import importlib.util
import os
import re
import sys
import tempfile
from pathlib import Path

import psutil
import pytest

from tests.ranks.launch import ROOT, torchrun
from tests.ranks.test_examples import printed

pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]

SMALL = ["--layers=2", "--width=64", "--heads=2", "--sequence=64", "--steps=2", "--min-bytes=4KiB", "--window=64KiB"]
TORCHRUN = "torchrun --standalone --nproc-per-node 2"
#: Each rank says that bytes moved, and that no bit is another one.
EQUAL = re.compile(
    r"rank (\d) .*, (?!0\.0 )[\d.]+ MiB moved out.*; losses and [1-9]\d* gradients are those without off"
)


def compares(script: str, launcher: list[str], start: str, directory: Path, *more: str, **environment: str) -> None:
    """Runs an example with ``--compare``, after ``start`` as its docstring says, and ``more`` arguments."""
    assert f"    {start} examples/{script} --compare\n" in (ROOT / "examples" / script).read_text()
    command = [*launcher, str(ROOT / "examples" / script), *SMALL, "--compare", *more]
    said = printed(command, directory, 540, **environment)
    number = re.search(r"nproc-per-node (\d)$", start)
    assert sorted(EQUAL.findall(said)) == [str(rank) for rank in range(int(number[1]) if number else 2)], said


@pytest.mark.parametrize("name", ["ddp", "fsdp2", "tensor_parallel", "pipeline", "deepspeed_zero3"])
def test_an_engine_under_torchrun(name: str, tmp_path: Path) -> None:
    environment = {}
    if name == "deepspeed_zero3":
        if importlib.util.find_spec("deepspeed") is None:
            pytest.skip("deepspeed is not installed: make stacks")
        # It compiles its collectives of a CPU once, with the ninja of the environment.
        environment = {"DS_ACCELERATOR": "cpu", "TORCH_EXTENSIONS_DIR": str(Path(sys.prefix, "torch_extensions"))}
        environment["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    compares(f"{name}.py", torchrun(2), TORCHRUN, tmp_path, **environment)


@pytest.mark.skipif("TESTS_STACK" not in os.environ, reason="eight processes: make stacks")
def test_three_ways_to_divide_a_model_at_once(tmp_path: Path) -> None:
    compares("three_at_once.py", torchrun(8), "torchrun --standalone --nproc-per-node 8", tmp_path)


def test_ray_train(tmp_path: Path) -> None:
    if importlib.util.find_spec("ray") is None:
        pytest.skip("ray is not installed: make stacks")
    # The paths of Ray's sockets have to be short. What it leaves in a home is its token.
    with tempfile.TemporaryDirectory(prefix="r") as folder, tempfile.TemporaryDirectory() as home:
        environment = {"TMPDIR": folder, "HOME": home, "RAY_USAGE_STATS_ENABLED": "0"}
        compares("train_ray.py", [sys.executable], "python", tmp_path, **environment)
        assert os.listdir(folder) == []
        processes = psutil.process_iter(["cmdline"])
        assert [one for one in processes if folder in " ".join(one.info["cmdline"] or [])] == []
