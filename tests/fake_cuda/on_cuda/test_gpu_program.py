"""The GPU program over the stand-in, from its first stage to its last, one of which is killed in its midst."""

from __future__ import annotations

import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

pytest.importorskip("benchmarks.gpu.stages", exc_type=ImportError)

from benchmarks.gpu.results import RESULTS, latest, read
from benchmarks.gpu.stages import STAGES
from tests.building import ROOT

#: For all stages together, on a machine that is busy with other work too.
SECONDS = 1600
KILLED = "checkpointing"
#: What compares values: it runs to its end here, and cannot end well.
NEEDS_A_GPU = {"bits", "pytest"}
#: ``test_scenarios.py`` runs them, each as a test.
SKIPPED = "tests of order"
#: With small shapes they do what the plan for 14 GiB does.
ALIKE = {f"plan {size} GiB" for size in (16, 20, 30)}


@pytest.mark.timeout(SECONDS + 60)
def test_every_stage_leaves_its_result_also_where_one_is_killed(tmp_path: Path) -> None:
    options = ["--small", "--skip", ";".join([SKIPPED, *ALIKE]), "--seconds", str(SECONDS), "--output", str(tmp_path)]
    with (tmp_path / "printed").open("w") as printed:
        command = [sys.executable, "-m", "benchmarks.gpu", *options]
        program = subprocess.Popen(command, cwd=ROOT, stdout=printed, stderr=printed)
        try:
            kill_stage(program, KILLED)
            program.wait()
        finally:
            program.terminate()  # and with it the stage that runs
    rows = read(tmp_path / RESULTS)
    ended = {name: row["ended"] for name, row in latest(rows, "ran").items()}
    assert list(ended) == ["machine", *(stage.name for stage in STAGES if stage.name not in {SKIPPED, *ALIKE})]
    assert ended.pop(KILLED) == "killed by signal 9"
    bad = {
        name: how
        for name, how in ended.items()
        if how not in ("ok", "exit status 1" if name in NEEDS_A_GPU else "ok") and not how.endswith("is not installed")
    }
    assert not bad, (tmp_path / "printed").read_text()[-8000:]
    assert all(row["predicted_peak_gib"] > 0 for row in rows if row["what"] == "train" and "plan" in row["stage"])
    found = {row["stage"] for row in rows if row["what"] != "ran"}
    functions = {stage.name for stage in STAGES if stage.name not in ALIKE and not isinstance(stage.run, tuple)}
    assert functions & {name for name, how in ended.items() if how == "ok"} <= found


def kill_stage(program: subprocess.Popen[bytes], name: str) -> None:
    """Kills the process of a stage once it is there."""
    while program.poll() is None:
        with suppress(psutil.Error):  # a process may have ended meanwhile
            for child in psutil.Process(program.pid).children():
                if name in child.cmdline():
                    child.kill()
                    return
        time.sleep(0.1)
