"""The program for a GPU, without one: no stage keeps the others from running, and results are shown."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.gpu.__main__ import DRAWING, Program, main, options_of
from benchmarks.gpu.results import LOG, PICTURE, RESULTS, TABLE, latest, read
from benchmarks.gpu.stages import STAGES, Stage
from tests.processes import printed_by

#: Stages that end in every way; the one that hangs has a child that hangs too, and that holds the pipe named FIFO.
HANGS = """
import os, subprocess, sys, time
holds = "import time; pipe = open('FIFO', 'w'); print(1, file=pipe, flush=True); time.sleep(600)"
subprocess.Popen([sys.executable, "-c", holds])
print("before", flush=True)
time.sleep(600)
"""
DIES = "import os; print('before', flush=True); os.kill(os.getpid(), 9)"
FAILS = "raise RuntimeError('a reason')"
WORKS = "print('worked')"


def stage(name: str, code: str, limit: int = 30, expected: int = 1, needs: tuple[str, ...] = ()) -> Stage:
    return Stage(name, limit, expected, (sys.executable, "-c", code), needs)


def test_a_stage_that_does_not_end_well_costs_its_limit_and_nothing_else(tmp_path: Path) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    reader = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
    program = Program(options_of(["--output", str(tmp_path), "--seconds", "300"]), str(tmp_path))
    for one in (
        stage("hangs", HANGS.replace("FIFO", str(fifo)), limit=2),
        stage("dies", DIES),
        stage("fails", FAILS),
        stage("is not here", WORKS, needs=("no_module_of_this_name",)),
        stage("is too long", WORKS, limit=1000, expected=600),
        stage("works", WORKS),
    ):
        program.run(one)
    ended = {name: row["ended"] for name, row in latest(read(tmp_path / RESULTS), "ran").items()}
    assert ended == {
        "hangs": "killed after its limit of 2 s",
        "dies": "killed by signal 9",
        "fails": "exit status 1",
        "is not here": "left out: no_module_of_this_name is not installed",
        "is too long": ended["is too long"],
        "works": "ok",
    }
    assert ended["is too long"].startswith("left out: ")
    assert program.failed == ["hangs", "dies", "fails"]
    log = (tmp_path / LOG).read_text()
    assert "before" in log
    assert "most recent call first" in log, "it shows where it hung"
    assert "a reason" in log
    while data := os.read(reader, 8):  # the pipe's end: no process that writes is left; else this raises
        assert data == b"1\n"
    os.close(reader)


def test_what_is_worth_most_fits_into_one_run_and_the_rest_into_another() -> None:
    names = [one.name for one in STAGES]
    assert len(set(names)) == len(names)
    assert not any(";" in name for name in names)
    assert all(0 < one.expected < one.limit for one in STAGES)
    most, first = options_of([]).seconds - DRAWING, names.index("sanitizer")
    assert sum(one.expected for one in STAGES[:first]) <= most
    assert sum(one.expected for one in STAGES[first:]) <= most


def test_no_stage_is_traced_by_torch_because_another_one_traces() -> None:
    """Every stage imports all of them, and to import the sanitizer has torch call Python for each event and block."""
    asked = "import sys, benchmarks.gpu.stages; print('torch.cuda._sanitizer' in sys.modules)"
    assert printed_by("-c", asked) == "False\n"


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU on this machine")
def test_without_a_gpu_it_says_so_and_ends_well(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--output", str(tmp_path / "none")]) == 0
    assert capsys.readouterr().out == "python -m benchmarks.gpu: skipped: torch finds no CUDA device on this machine\n"
    assert not (tmp_path / "none").exists()
    with pytest.raises((RuntimeError, AssertionError)):  # a stage for which the device has gone is no good one
        main(["--stage", "none", "--output", str(tmp_path)])


def way(name: str, peak: float, seconds: float, **more: Any) -> dict[str, Any]:
    parts = {"step": seconds, "forward": seconds / 2, "backward": seconds / 2, "optimizer": 0.0}
    steps = {part: [took, took] for part, took in parts.items()}
    sizes = {"parameters": 1e9, "layers": 16, "tokens": 32_768, "length": 32_768}
    found = {"failure": None, "peak_gib": peak, "reserved_gib": peak, "steps": steps, "losses": [2.0, 1.0]}
    return {"stage": name, "what": "train", **sizes, **found, **more}


def test_a_figure_shows_the_last_card_and_the_last_result_of_a_way(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    card = {"stage": "machine", "what": "machine", "driver": "1", "torch": "2", "commit": None, "small": False}
    rows = [
        {**card, "card": "an old one"},
        way("none", 99.0, 9.0),
        {**card, "card": "a new one"},
        way("none", 60.0, 1.0),
        way("ours", 13.0, 2.0),
        {**card, "card": "a new one"},
        way("ours", 12.0, 1.5, out_gib=48.0, losses=[2.0, 1.5]),
        way("ours, other", 0.0, 0.0, failure="OutOfMemoryError: a reason"),
        {"stage": "bits", "what": "bits", "name": "none again", "same": True},
        {"stage": "ours", "what": "ran", "ended": "ok", "seconds": 3.0, "limit": 60},
    ]
    path = tmp_path / RESULTS
    path.write_text("\n".join(map(json.dumps, rows)) + '\n{"stage": "cut of')
    assert main(["--figure", str(path)]) == 0
    text = (tmp_path / TABLE).read_text()
    lines = {line.split("  ")[0]: line for line in reversed(text.splitlines())}  # of several tables, the first
    assert text.startswith("a new one")
    assert "60.00" in lines["none"]
    assert "12.00" in lines["ours"]
    assert "1.500" in lines["ours"], "of the time of the first"
    assert "5.0e-01" in lines["ours"], "how far losses are off"
    assert "a reason" in lines["ours, other"]
    assert "yes" in lines["none again"]
    pytest.importorskip("matplotlib")
    assert (tmp_path / PICTURE).stat().st_size > 10_000
