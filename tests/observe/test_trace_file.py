"""The file of a trace: what is written can be read again, and what is something else is refused."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import Any

import pytest

import eager_offload as eo
from eager_offload.observe import trace as module
from eager_offload.observe.trace import FORMAT, Kind, MemorySample, SavedGroup, Slice, Trace, read_trace, write_trace

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
        Slice(Kind.COMPUTE, "Net", "cpu", "compute forward", 0.0, 0.5),
        Slice(Kind.COMPUTE, "Net.layers.0", "cpu", "compute forward", 0.001, 0.25, module="Net.layers.0"),
        Slice(Kind.OFFLOAD, "offload", "cpu", "offload", 0.125, 0.0625, 8, "Net.layers.0", "MmBackward0", "disk"),
        Slice(Kind.OFFLOAD, "offload", "cuda:1", "offload", 0.25, 0.0625, 8, tier="host", error="no room"),
        Slice(Kind.STALL, "reload", "cpu", "stall", 1.0, 0.0),
    ),
    memory=(MemorySample(0.0, 0, 0, 0, 0), MemorySample(0.25, 8, 0, 4, 12), MemorySample(0.5, 8, 2, 4, 12)),
    versions={"torch": "2.13.0"},
    error="ValueError: no",
    dropped=3,
)


def events(path: Path, phase: str) -> list[dict[str, Any]]:
    return [event for event in json.loads(path.read_text())["traceEvents"] if event["ph"] == phase]


def test_what_is_written_is_read_again(tmp_path: Path) -> None:
    path = tmp_path / "step.json"
    write_trace(TRACE, path)
    assert read_trace(path) == TRACE
    assert read_trace(str(path)).devices == ("cpu", "cuda:1")
    assert TRACE.slices[2].stop == 0.1875


def test_an_empty_trace_is_one_too(tmp_path: Path) -> None:
    path = tmp_path / "step.json"
    empty = Trace(seconds=0.0, config={}, stats={})
    write_trace(empty, path)
    assert read_trace(path) == empty


def test_times_are_microseconds_and_every_track_has_a_name(tmp_path: Path) -> None:
    path = tmp_path / "step.json"
    write_trace(TRACE, path)
    found = events(path, "X")
    assert [(one["ts"], one["dur"]) for one in found[:3]] == [
        (0.0, 500_000.0),
        (1_000.0, 250_000.0),
        (125_000.0, 62_500.0),
    ]
    named = {(one["pid"], one["tid"]): one["args"]["name"] for one in events(path, "M") if one["name"] == "thread_name"}
    assert [named[one["pid"], one["tid"]] for one in found] == [one.track for one in TRACE.slices]
    assert len({one["tid"] for one in found}) == 4, "no two tracks share a number"
    assert {one["args"]["bytes"] for one in events(path, "C") if one["name"] == "without offload"} == {0, 12}


def test_a_counter_is_written_where_it_changes(tmp_path: Path) -> None:
    path = tmp_path / "step.json"
    write_trace(TRACE, path)
    found = [(one["name"], one["args"]["bytes"]) for one in events(path, "C")]
    assert found[4:] == [("device", 8), ("disk", 4), ("without offload", 12), ("host", 2)]


def test_a_file_that_was_there_stays_until_the_new_one_is_complete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "step.json"
    path.write_text("before")

    def fail(*arguments: object, **named: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(module.json, "dump", fail)
    with pytest.raises(OSError, match="No space"):
        write_trace(TRACE, path)
    assert path.read_text() == "before"
    assert list(tmp_path.iterdir()) == [path]


def test_a_trace_has_the_rights_of_any_new_file(tmp_path: Path) -> None:
    (tmp_path / "other").touch()
    write_trace(TRACE, tmp_path / "step.json")
    assert (tmp_path / "step.json").stat().st_mode == (tmp_path / "other").stat().st_mode


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="this system has no /proc, so umask has to be set")
def test_no_other_thread_meets_another_umask(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(mask: int) -> int:
        raise AssertionError(f"the umask of the whole process became {mask:o}")

    before = os.umask(0o027)
    try:
        with monkeypatch.context() as patched:
            patched.setattr(os, "umask", refuse)
            write_trace(TRACE, tmp_path / "step.json")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "step.json").stat().st_mode) == 0o640


def test_where_the_system_does_not_tell_the_umask_it_stays_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_STATUS", str(tmp_path / "missing"))
    before = os.umask(0o027)
    try:
        assert module._umask() == 0o027
        assert os.umask(0o027) == 0o027
    finally:
        os.umask(before)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"traceEvents": []}', '{"eager_offload": {}}', '"eager_offload"'])
def test_something_else_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "other.json"
    path.write_text(text)
    with pytest.raises(eo.ConfigError, match=r"other\.json.*no trace of eager_offload"):
        read_trace(path)


def test_a_newer_format_is_refused_and_a_damaged_one_told(tmp_path: Path) -> None:
    path = tmp_path / "step.json"
    write_trace(TRACE, path)
    content = json.loads(path.read_text())
    content["eager_offload"]["format"] = FORMAT + 1
    path.write_text(json.dumps(content))
    with pytest.raises(eo.ConfigError, match=f"format {FORMAT + 1}.*Upgrade"):
        read_trace(path)
    content["eager_offload"]["format"] = FORMAT
    del content["eager_offload"]["saved"]
    path.write_text(json.dumps(content))
    with pytest.raises(eo.OffloadError, match="damaged"):
        read_trace(path)
