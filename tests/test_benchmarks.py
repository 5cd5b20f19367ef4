"""Every benchmark, the program for a GPU and the demo run, and find of bits and bytes what is promised.

How fast this machine is, is not asked.
"""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest
import torch

from benchmarks.gpu.__main__ import main
from benchmarks.gpu.results import RESULTS, TABLE
from tests.processes import ROOT, printed_by, python

#: Limits that hold on any machine, whatever the size of the model.
EXACT = re.compile("differ|other bits")
TINY = "--layers 1 --width 64 --sequence 64 --min-bytes 4KiB --window 128KiB"
SMALL = f"{TINY} --heads 2 --batch 2"
#: What each is run with to be short; ``--quick`` besides. Not ``compile_time``, which compiles for minutes.
RUNS = [
    f"cpu_train {SMALL} --variants 'none;none, huge pages;offload, huge pages'",
    f"cpu_train {SMALL} --ranks 2",
    "hooks --calls 64 --live 32 --repeats 2 --sizes 4KiB --alive 2000",
    "planning --layers 2 --cpu-layers 1 --cpu-width 64 --cpu-heads 2 --sequence 64 --min-bytes 4KiB --window 128KiB",
    "planning --parts recipes",
]


@pytest.mark.long
@pytest.mark.sampled(2)
@pytest.mark.parametrize("line", RUNS)
def test_a_benchmark_measures_what_it_says(line: str, tmp_path: Path) -> None:
    name, *arguments = shlex.split(line)
    output = tmp_path / "result.json"
    ended = python("-m", f"benchmarks.{name}", "--quick", "--check", "--output", output, *arguments)
    assert output.exists(), ended.stdout[-3000:] + ended.stderr[-3000:]
    text = output.read_text()
    content = json.loads(text)
    assert content["benchmark"] == name
    assert content["samples"]
    assert content["limits"]
    assert [limit["what"] for limit in content["limits"] if EXACT.search(limit["what"]) and not limit["met"]] == []
    assert ended.returncode == int(not all(limit["met"] for limit in content["limits"]))
    assert str(ROOT) not in text, "a result names no path of this machine"
    assert str(tmp_path) not in text


@pytest.mark.long
def test_the_runs_of_the_demo_agree_bit_for_bit_and_leave_a_picture_and_numbers(tmp_path: Path) -> None:
    for extra in ("rich", "matplotlib"):
        pytest.importorskip(extra, reason="the demo's extra is not installed")
    sizes = "--layers 2 --width 64 --heads 2 --sequence 128 --batch 4 --steps 2 --min-bytes 4KiB"
    windows = "--max-inflight-bytes 256KiB --prefetch-bytes 256KiB"
    printed_by(ROOT / "examples" / "train_lm.py", *sizes.split(), *windows.split(), "--output", tmp_path)
    numbers = json.loads((tmp_path / "results.json").read_text())
    assert numbers["equal"] is True
    assert [made["mode"] for made in numbers["runs"]] == ["none", "checkpoint", "offload", "offload+checkpoint"]
    assert len({(made["parameters_hash"], made["losses_hash"]) for made in numbers["runs"]}) == 1
    assert all((made["offloaded_bytes"] > 0) == ("offload" in made["mode"]) for made in numbers["runs"])
    assert (tmp_path / "memory.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU on this machine")
def test_without_a_gpu_it_says_so_and_a_figure_shows_what_was_found(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--output", str(tmp_path / "none")]) == 0
    assert capsys.readouterr().out == "python -m benchmarks.gpu: skipped: torch finds no CUDA device on this machine\n"
    card = {"stage": "machine", "what": "machine", "card": "a card", "driver": "1", "torch": "2", "commit": None}
    failed = {"stage": "ours, other", "what": "train", "failure": "OutOfMemoryError: a reason"}
    sizes = {"parameters": 1e9, "layers": 16, "tokens": 32_768, "length": 32_768, "peak_gib": 0.0, "reserved_gib": 0.0}
    rows = [card | {"small": False}, failed | sizes | {"steps": {}, "losses": []}]
    path = tmp_path / RESULTS
    path.write_text("\n".join(map(json.dumps, rows)) + '\n{"stage": "cut of')
    assert main(["--figure", str(path)]) == 0
    text = (tmp_path / TABLE).read_text()
    assert text.startswith("a card")
    assert "a reason" in text
