"""Each example of many ranks runs on two of them as its docstring says, and learns the same with offload as without."""

from __future__ import annotations

import re

import pytest

from tests.ranks.launch import ROOT, started, torchrun

SMALL = ["--layers=2", "--width=64", "--heads=2", "--sequence=64", "--steps=2", "--min-bytes=4KiB", "--window=64KiB"]


@pytest.mark.long
@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", ["ddp", "fsdp2", "tensor_parallel", "pipeline"])
def test_an_example_learns_the_same_with_offload_and_without(name: str) -> None:
    program = f"examples/{name}.py"
    assert f"    torchrun --standalone --nproc-per-node 2 {program}\n" in (ROOT / program).read_text()
    losses = []
    for choice in ("--offload", "--no-offload"):
        with started(torchrun(2, program, *SMALL, choice)) as process:
            output = process.communicate(timeout=120)[0]
        assert process.returncode == 0, output
        ranks = re.findall(r"^rank \d on \w+(?::\d)?: peak [\d,]+ MiB.*$", output, re.MULTILINE)
        assert len(ranks) == 2, output
        assert re.findall(r"^step (\d): loss \d", output, re.MULTILINE) == ["1", "2"], output
        moved = [float(number) for number in re.findall(r"([\d.]+) MiB moved out", output)]
        assert len(moved) == (2 if choice == "--offload" else 0)
        assert all(moved)
        losses.append([line.partition("losses ")[2] for line in ranks])
    assert losses[0] == losses[1]
    assert any(losses[0])
