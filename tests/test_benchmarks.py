"""Every benchmark runs, and finds of bits and of bytes what is promised; how fast this machine is, is not asked."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest

from benchmarks.common import Spread, table
from tests.processes import ROOT, python

#: Limits that hold on any machine, whatever the size of the model.
EXACT = re.compile("differ|other bits")
TINY = "--layers 1 --width 64 --sequence 64 --min-bytes 4KiB --window 128KiB"
SMALL = f"{TINY} --heads 2 --batch 2"
#: What each is run with to be short; ``--quick`` besides. Not ``compile_time``, which compiles for minutes.
RUNS = [
    f"codecs {TINY} --layers 2 --window 1MiB --speed-bytes 65536",
    f"cpu_train {SMALL} --variants 'none;none, huge pages;offload;offload, huge pages'",
    f"cpu_train {SMALL} --ranks 2",
    "hooks --calls 64 --live 32 --repeats 2 --sizes 4KiB --alive 2000",
    "planning --layers 2 --cpu-layers 1 --cpu-width 64 --cpu-heads 2 --sequence 64 --min-bytes 4KiB --window 128KiB",
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


def test_a_table_has_a_column_for_each_key() -> None:
    shown = table([{"limit": "a", "measured": 1.0}, {"limit": "long one", "met": True}])
    assert shown.split("\n") == ["limit     measured  met", "a            1.000     ", "long one            yes"]
    assert str(Spread.of([10.0, 3.0, 1234.5])) == "10.00 (3.000 .. 1,234)"
