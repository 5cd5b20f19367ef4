"""The file of a trace: what is written can be read again, and what is something else is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from eager_offload.trace_file import MemorySample, SavedGroup, Slice, SliceKind, Trace, read_trace, write_trace

TRACE = Trace(
    seconds=1.5,
    config={"tier": "disk", "disk_path": None},
    stats={"saved_bytes": 12, "kept_bytes": {"small": 4}},
    advice=("Nothing held this run up.",),
    saved=(
        SavedGroup("MmBackward0", "Net.layers.0", "offloaded", "", 2, 8),
        SavedGroup("", "", "kept", "small", 1, 4),
    ),
    slices=(
        Slice(SliceKind.COMPUTE, "Net", "cpu", "compute forward", 0.0, 0.5),
        Slice(SliceKind.COMPUTE, "Net.layers.0", "cpu", "compute forward", 0.001, 0.25, module="Net.layers.0"),
        Slice(SliceKind.OFFLOAD, "offload", "cpu", "offload", 0.125, 0.0625, 8, "Net.layers.0", "MmBackward0", "disk"),
        Slice(SliceKind.OFFLOAD, "offload", "cuda:1", "offload", 0.25, 0.0625, 8, tier="host"),
        Slice(SliceKind.STALL, "reload", "cpu", "stall", 1.0, 0.0),
    ),
    memory=(MemorySample(0.0, 0, 0, 0, 0), MemorySample(0.25, 8, 0, 4, 12), MemorySample(0.5, 8, 2, 4, 12)),
    versions={"torch": "2.13.0"},
    error="ValueError: no",
    dropped=3,
)


def events(path: Path, phase: str) -> list[dict[str, Any]]:
    return [event for event in json.loads(path.read_text())["traceEvents"] if event["ph"] == phase]


def test_what_is_written_is_read_again(path: Path) -> None:
    write_trace(TRACE, path)
    assert read_trace(path) == TRACE
    assert read_trace(str(path)).devices == ("cpu", "cuda:1")
    assert TRACE.slices[2].stop == 0.1875


def test_times_are_microseconds_and_tracks_go_by_their_names(path: Path) -> None:
    write_trace(TRACE, path)
    found, counters = events(path, "X"), events(path, "C")
    assert [(one["ts"], one["dur"]) for one in found[:3]] == [
        (0.0, 500_000.0),
        (1_000.0, 250_000.0),
        (125_000.0, 62_500.0),
    ]
    assert [(one["pid"], one["tid"]) for one in found] == [(one.device, one.track) for one in TRACE.slices]
    assert [one["args"] for one in counters] == [
        {"device": device, "host": host, "disk": disk, "without_offload": without}
        for _, device, host, disk, without in TRACE.memory
    ]


def test_a_trace_has_the_rights_of_any_new_file(tmp_path: Path) -> None:
    (tmp_path / "other").touch()
    write_trace(TRACE, tmp_path / "step.json")
    assert (tmp_path / "step.json").stat().st_mode == (tmp_path / "other").stat().st_mode
