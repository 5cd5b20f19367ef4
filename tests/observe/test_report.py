"""The file of a trace, what the report says of it, and what the command does with something that is no trace."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

from eager_offload.__main__ import main
from eager_offload.observe.figure import trace_figure, write_page
from eager_offload.observe.report import SaverRow, saved_rows, summary, to_text
from eager_offload.observe.timeline import Slice, SliceKind
from eager_offload.observe.trace import FORMAT, MemorySample, SavedGroup, Trace, read_trace, write_trace

MIB = 1 << 20
#: No module is called that, and nothing may come of it.
AWKWARD = '</script><img src=x onerror="document.title=1">&amp;'
SAVED = (
    SavedGroup("Mm", "Net.layers.0.mlp", "offloaded", "", 1, 10),
    SavedGroup("Mm", "Net.layers.1.mlp", "offloaded", "", 2, 20),
    SavedGroup("Mm", "Net.layers.1.mlp", "kept", "newest", 1, 40),
    SavedGroup("Mm", "Net.head2", "kept", "newest", 1, 5),
    SavedGroup("Mm", AWKWARD, "shared", "", 1, 3),
)
EXAMPLE = Trace(
    seconds=0.9,
    config={"tier": "disk", "min_bytes": MIB},
    stats={
        "saved_tensors": 60,
        "saved_bytes": 196 * MIB,
        "offloaded_bytes": 140 * MIB,
        "shared_bytes": 20 * MIB,
        "kept_bytes": {"small": 8 * MIB, "newest": 28 * MIB},
        "bytes_out": MIB,
        "stall_seconds": 0.015,
        "host_wait_seconds": 6.0,
        "fallbacks": {"budget": 2},
    },
    advice=("Raise prefetch_bytes.", AWKWARD),
    saved=SAVED,
    slices=(
        Slice(SliceKind.COMPUTE, "Net", "cpu", "compute forward", 0.1, 0.3),
        Slice(SliceKind.COMPUTE, "Net.inner", "cpu", "compute forward", 0.2, 0.1),
        # Two copies overlap, and the way to the disk is a part of a third one's.
        Slice(SliceKind.OFFLOAD, "offload", "cuda:1", "offload", 0.0, 0.5, 100 * 10**6, operation="Mm", tier="host"),
        Slice(SliceKind.OFFLOAD, "offload", "cuda:1", "offload", 0.25, 0.25, 200 * 10**6),
        Slice(SliceKind.OFFLOAD, "offload disk", "cuda:1", "offload disk", 0.0, 0.75, 300 * 10**6),
        Slice(SliceKind.STALL, AWKWARD, "cpu", "stall", 0.8, 0.015),
    ),
    memory=(
        MemorySample(0.0, 0, 0, 0, 0),
        MemorySample(0.25, 45 * MIB, 0, 123 * MIB, 168 * MIB),
        MemorySample(0.5, 0, 0, 0, 0),
    ),
    versions={"torch": "2.13.0"},
    error=f"ValueError: {AWKWARD}",
    dropped=7,
)


def test_what_is_written_is_read_again_and_stands_where_viewers_look(path: Path) -> None:
    write_trace(EXAMPLE, path)
    assert read_trace(str(path)) == EXAMPLE
    events = json.loads(path.read_text())["traceEvents"]
    slices, counters = ([one for one in events if one["ph"] == phase] for phase in "XC")
    assert [(one["pid"], one["tid"]) for one in slices] == [(one.device, one.track) for one in EXAMPLE.slices]
    assert [(one["ts"], one["dur"]) for one in slices[:2]] == [(100_000.0, 300_000.0), (200_000.0, 100_000.0)]
    assert [one["ts"] for one in counters] == [0, 250_000, 500_000]


def test_the_report_has_the_numbers_of_the_trace() -> None:
    assert {tile.name: (tile.value, tile.rest) for tile in summary(EXAMPLE)} == {
        "Peak on the device": ("45.0 MiB", "168.0 MiB without offload (-73 %)"),
        "Saved": ("196.0 MiB", "in 60 tensors"),
        "Offloaded": ("140.0 MiB", "and 20.0 MiB shared with them: 82 % of the saved bytes"),
        "Kept": ("36.0 MiB", "newest 28.0 MiB, small 8.0 MiB"),
        "Moved out": ("1.0 MiB at 600.0 MB/s", "0 B back"),  # time that overlaps counts once
        "Compute stalled": ("15.0 ms", "1.7 % of 900.0 ms; the host waited 6.00 s"),
        "Fallbacks": ("2", "budget 2"),
    }
    first = SaverRow("Mm", "Net.layers.*.mlp", 2, 4, 70, {"offloaded": 30, "newest": 40})
    assert saved_rows(SAVED) == [
        first,
        SaverRow("Mm", "Net.head2", 1, 1, 5, {"newest": 5}),
        SaverRow("Mm", AWKWARD, 1, 1, 3, {"shared": 3}),
    ]
    assert saved_rows(SAVED, most=1) == [first, SaverRow("2 others", "", 2, 2, 8, {"newest": 5, "shared": 3})]
    text = to_text(EXAMPLE)
    assert "Net.layers.*.mlp (newest 40 B, offloaded 30 B)" in text
    assert "The run ended early: ValueError" in text
    assert "7 slices, samples and saves were too many" in text
    assert "Raise prefetch_bytes." in text


# -- the page -------------------------------------------------------------------------------------------------------


def test_the_page_stands_by_itself_and_names_cannot_become_markup(tmp_path: Path) -> None:
    write_page(trace_figure(EXAMPLE, AWKWARD), tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text("utf-8")
    assert not re.search(r"<(script|link|img|iframe)[^>]*\s(src|href)=", page)
    assert "&lt;img src=x onerror=" in page
    assert "<img src=x" not in page
    assert "Plotly.newPlot" in page


# -- the command ------------------------------------------------------------------------------------------------------


def test_the_page_goes_beside_the_trace_or_to_the_output_and_never_over_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, page = tmp_path / "step.json", tmp_path / "step.html"
    write_trace(EXAMPLE, source)
    assert main(["report", str(source)]) == 0
    assert main(["report", str(source), "-o", str(tmp_path / "other.html")]) == 0
    assert page.stat().st_size > MIB, "with plotly in it"
    assert str(tmp_path / "other.html") in capsys.readouterr().out
    assert main(["report", str(source), "-o", str(tmp_path / "missing" / "page.html")]) == 2
    assert "No such file or directory" in capsys.readouterr().err
    source.rename(page)
    assert main(["report", str(page)]) == 2
    assert "is the trace itself" in capsys.readouterr().err
    assert read_trace(page) == EXAMPLE


def test_without_plotly_one_error_names_the_extra_and_text_works(
    path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("plotly", "plotly.graph_objects"):
        monkeypatch.setitem(sys.modules, name, None)
    assert main(["report", str(path)]) == 2, "at once: before the trace is read"
    assert main(["plan", "no.such.module:model", "--html", str(path)]) == 2
    errors = capsys.readouterr().err.splitlines()
    assert ["pip install '.[report]'" in line for line in errors] == [True, True]
    write_trace(EXAMPLE, path)
    assert main(["report", str(path), "--text"]) == 0
    assert capsys.readouterr().out.strip() == to_text(EXAMPLE)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "No such file or directory"),
        (b"", "no trace of eager_offload"),
        (b'{"traceEvents": []}', "no trace of eager_offload"),
        (b"[]", "no trace of eager_offload"),
        (b'{"eager_offload": {"format": %d}}' % (FORMAT + 1), "Upgrade eager_offload"),
        (b'{"eager_offload": {"format": %d}}' % FORMAT, "damaged"),
        (b"\xff\xfe\x00", "no trace of eager_offload"),
    ],
)
def test_what_is_no_trace_is_refused_in_one_line(
    path: Path, capsys: pytest.CaptureFixture[str], content: bytes | None, said: str
) -> None:
    if content is not None:
        path.write_bytes(content)
    assert main(["report", str(path)]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    assert said in captured.err
    assert "step.json" in captured.err
    assert not path.with_suffix(".html").exists()
