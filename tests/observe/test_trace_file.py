"""The file of a trace: what is written can be read again, and what viewers ask for stands where they look."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from eager_offload.trace_file import read_trace, write_trace
from tests.observe.traces import example


def test_what_is_written_is_read_again(path: Path) -> None:
    trace = replace(example(), error="ValueError: no")
    write_trace(trace, path)
    found = read_trace(str(path))
    assert found == replace(trace, slices=found.slices, memory=found.memory)
    assert found.memory == tuple(one._replace(seconds=round(one.seconds, 9)) for one in trace.memory)
    assert found.slices == tuple(
        replace(one, start=round(one.start, 9), seconds=round(one.seconds, 9)) for one in trace.slices
    )
    assert found.devices == ("cpu", "cuda:0")


def test_times_are_microseconds_and_tracks_go_by_their_names(path: Path) -> None:
    trace = example()
    write_trace(trace, path)
    events = json.loads(path.read_text())["traceEvents"]
    slices, counters = ([one for one in events if one["ph"] == phase] for phase in "XC")
    assert [(one["ts"], one["dur"]) for one in slices[:2]] == [(0.0, 300_000.0), (300_000.0, 580_000.0)]
    assert [(one["pid"], one["tid"]) for one in slices] == [(one.device, one.track) for one in trace.slices]
    assert [(one["ts"], *one["args"].values()) for one in counters] == [
        (pytest.approx(1e6 * one.seconds), *one[1:]) for one in trace.memory
    ]


def test_a_trace_has_the_rights_of_any_new_file(tmp_path: Path) -> None:
    (tmp_path / "other").touch()
    write_trace(example(), tmp_path / "step.json")
    assert (tmp_path / "step.json").stat().st_mode == (tmp_path / "other").stat().st_mode
