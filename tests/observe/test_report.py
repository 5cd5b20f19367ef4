"""What a report says of a trace, what its figure draws, and what the command does with something that is no trace."""

from __future__ import annotations

import dataclasses
import json
import re
import sys
from pathlib import Path
from typing import Any

import plotly.graph_objects as go
import pytest

import eager_offload as eo
from eager_offload.__main__ import main
from eager_offload.observe.figure import trace_figure, write_page
from eager_offload.observe.report import SavedRow, saved_rows, summary, to_text
from eager_offload.trace_file import FORMAT, SavedGroup, Slice, SliceKind, Trace, read_trace, write_trace
from tests.observe.steps import WIDTH, Net, step
from tests.observe.traces import AWKWARD, LAYERS, MIB, example


def tiles(trace: Trace) -> dict[str, tuple[str, str]]:
    return {tile.name: (tile.value, tile.rest) for tile in summary(trace)}


def tables(figure: go.Figure) -> list[go.Table]:
    return [one for one in figure.data if one.type == "table"]


def curves(figure: go.Figure) -> dict[str, go.Scatter]:
    return {one.name.partition(",")[0]: one for one in figure.data if one.type == "scatter"}


def bars(figure: go.Figure) -> dict[str, go.Bar]:
    return {one.name: one for one in figure.data if one.type == "bar"}


# -- numbers ----------------------------------------------------------------------------------------------------------


def test_the_summary_has_the_numbers_of_the_stats() -> None:
    found = tiles(example())
    assert found["Peak on the device"] == ("45.0 MiB", "168.0 MiB without offload (-73 %)")
    assert found["Saved"] == ("196.0 MiB", "in 60 tensors")
    assert found["Offloaded"][1] == "and 20.0 MiB shared with them: 82 % of what is saved"
    assert found["Kept"] == ("36.0 MiB", "newest 28.0 MiB, parameter 5.0 MiB, small 3.0 MiB")
    assert found["Compute stalled"] == ("15.0 ms", "1.7 % of 900.0 ms")
    assert found["Fallbacks"] == ("2", "budget 2")


def test_time_that_overlaps_counts_once_in_a_rate() -> None:
    slices = (
        Slice(SliceKind.OFFLOAD, "offload", "cuda:1", "offload", 0.0, 0.5, 100 * 10**6),
        Slice(SliceKind.OFFLOAD, "offload", "cuda:1", "offload", 0.25, 0.25, 200 * 10**6),
        Slice(SliceKind.OFFLOAD, "offload disk", "cuda:1", "offload disk", 0.0, 9.0, 300 * 10**6),  # a part of its way
    )
    assert tiles(Trace(12.0, {}, {"bytes_out": MIB}, slices=slices))["Moved out"][0] == "1.0 MiB at 600.0 MB/s"


def test_what_the_host_of_an_accelerator_waits_is_no_stall_of_compute() -> None:
    trace = Trace(12.0, {}, {"stall_seconds": 0.25, "host_wait_seconds": 6.0})
    assert tiles(trace)["Compute stalled"] == ("250.0 ms", "2.1 % of 12.00 s; the host waited 6.00 s")


def test_alike_modules_count_as_one() -> None:
    groups = [
        SavedGroup("Mm", "Net.layers.0.mlp", "offloaded", "", 1, 10),
        SavedGroup("Mm", "Net.layers.1.mlp", "offloaded", "", 2, 20),
        SavedGroup("Mm", "Net.layers.1.mlp", "kept", "newest", 1, 40),
        SavedGroup("Mm", "Net.head2", "kept", "newest", 1, 5),
        SavedGroup("Mm", "Net.blocks.7", "shared", "", 1, 3),
    ]
    first = SavedRow("Mm", "Net.layers.*.mlp", 2, 4, 70, {"offloaded": 30, "newest": 40})
    last = SavedRow("Mm", "Net.blocks.7", 1, 1, 3, {"shared": 3})
    assert saved_rows(groups) == [first, SavedRow("Mm", "Net.head2", 1, 1, 5, {"newest": 5}), last]
    assert first.became == "newest 40 B, offloaded 30 B"
    assert saved_rows(groups, most=1) == [first, SavedRow("2 others", "", 2, 2, 8, {"newest": 5, "shared": 3})]


def test_the_text_has_what_the_page_has() -> None:
    found = to_text(dataclasses.replace(example(), error="KeyboardInterrupt: "))
    for text in ("168.0 MiB without offload", "raise prefetch_bytes", "The run ended early: KeyboardInterrupt"):
        assert text in found
    assert "7 slices, samples and saves were too many" in found
    assert "Net.layers.*.mlp (offloaded 80.0 MiB, newest 16.0 MiB)" in found


# -- the figure -------------------------------------------------------------------------------------------------------


def assert_drawn(figure: go.Figure, trace: Trace) -> None:
    """The sums of what is drawn are those of the trace."""
    drawn = bars(figure)
    for kind in SliceKind:
        slices = [one for one in trace.slices if one.kind is kind]
        name = "compute, by module" if kind is SliceKind.COMPUTE else kind.value
        assert (name in drawn) == bool(slices)
        if slices:
            assert sum(drawn[name].x) == pytest.approx(1e3 * sum(one.seconds for one in slices))
            assert sorted(drawn[name].base) == pytest.approx(sorted(1e3 * one.start for one in slices))
    found = curves(figure)
    assert list(found["on the device"].y) == [one.device for one in trace.memory]
    assert list(found["without offload"].y) == [one.without_offload for one in trace.memory]
    assert list(found["on the device"].x) == pytest.approx([1e3 * one.seconds for one in trace.memory])
    assert {one.xaxis for one in (*drawn.values(), *found.values())} == {"x"}, "one axis of time"
    saves = tables(figure)[-1].cells.values[2]
    assert sum(int(count.replace(",", "")) for count in saves) == sum(group.count for group in trace.saved)


def test_the_figure_of_a_real_run_has_the_numbers_of_its_trace(path: Path, net: Net, offload: eo.Offload) -> None:
    with offload.trace(path):
        step(net, offload)
    trace = read_trace(path)
    figure = trace_figure(trace, path.name)
    assert_drawn(figure, trace)
    moved = bars(figure)["offload"]
    assert len(moved.x) * WIDTH * WIDTH * 4 == trace.stats["bytes_out"] > 0
    assert max(curves(figure)["on disk"].y) == max(one.disk for one in trace.memory) > 0
    assert any("Net.layers.*" in module for module in tables(figure)[-1].cells.values[1])


def test_a_figure_shows_every_kind_of_slice_each_in_its_lane() -> None:
    figure = trace_figure(example())
    assert_drawn(figure, example())
    assert list(figure.layout.yaxis2.ticktext) == [
        *("cpu compute forward", "cpu compute backward", "cpu offload", "cpu reload", "cpu prefetch", "cpu stall"),
        "cuda:0 offload",
    ]
    compute = bars(figure)["compute, by module"]
    assert sorted(set(compute.y)) == [0, 1, 2, 3, 4], "three depths of forward, two of backward"
    assert len([row for row in compute.y if row == 1]) == LAYERS
    assert max(curves(figure)["on disk"].y) == 123 * MIB


def test_what_lies_inside_is_drawn_below() -> None:
    spans = {"inner": (1.0, 1.0), "outer": (1.0, 3.0), "beside": (2.0, 1.0), "innermost": (2.5, 0.25)}
    spans["next"] = (3.9999, 1.0)  # rounded: it begins a moment before its neighbour is over
    slices = [Slice(SliceKind.COMPUTE, name, "cpu", "compute forward", *span) for name, span in spans.items()]
    (drawn,) = bars(trace_figure(Trace(5.0, {}, {}, slices=tuple(slices)))).values()
    rows = dict(zip(drawn.text, drawn.y, strict=True))
    assert rows == {"outer": 0, "inner": 1, "beside": 1, "innermost": 2, "next": 0}


def test_too_much_to_draw_is_thinned_and_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("eager_offload.observe.figure._MOST_SLICES", 4)
    monkeypatch.setattr("eager_offload.observe.figure._MOST_SAMPLES", 5)
    figure, memory = trace_figure(example()), example().memory
    assert sum(len(one.x) for one in bars(figure).values()) == 4
    assert max(bars(figure)["compute, by module"].x) == pytest.approx(580.0), "the longest"
    assert max(curves(figure)["on the device"].y) == max(one.device for one in memory), "peaks stay"
    assert len(curves(figure)["on the device"].y) <= 5
    assert "The 4 longest of" in tables(figure)[1].cells.values[0][-1]


def test_an_empty_trace_has_a_figure() -> None:
    said = tables(trace_figure(Trace(0.0, {}, {})))[1].cells.values[0]
    assert list(said) == ["Nothing limited this run that a setting would change."]


def test_the_page_stands_by_itself_and_names_cannot_become_markup(tmp_path: Path) -> None:
    trace = dataclasses.replace(example(), error=f"ValueError: {AWKWARD}", advice=(AWKWARD,))
    write_page(trace_figure(trace, AWKWARD), tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text("utf-8")
    assert not re.search(r"<(script|link|img|iframe)[^>]*\s(src|href)=", page)
    assert "onerror" in page
    assert '<img src=x onerror="' not in page
    assert "Plotly.newPlot" in page


# -- the command ------------------------------------------------------------------------------------------------------


def test_the_page_goes_beside_the_trace_or_to_the_output(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = tmp_path / "step.json"
    write_trace(example(), source)
    assert main(["report", str(source)]) == 0
    assert main(["report", str(source), "-o", str(tmp_path / "other.html")]) == 0
    assert (tmp_path / "step.html").stat().st_size > MIB, "with plotly in it"
    assert str(tmp_path / "other.html") in capsys.readouterr().out
    assert main(["report", str(source), "--text"]) == 0
    assert "Peak on the device" in capsys.readouterr().out


def without_plotly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "plotly", None)
    monkeypatch.setitem(sys.modules, "plotly.graph_objects", None)


def test_without_plotly_one_error_names_the_extra_and_text_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    without_plotly(monkeypatch)
    assert main(["report", str(tmp_path / "none.json")]) == 2, "at once: before the trace is read"
    assert main(["plan", "no.such.module:model", "--html", str(tmp_path / "plan.html")]) == 2
    errors = capsys.readouterr().err.splitlines()
    assert len(errors) == 2
    assert all("pip install 'eager_offload[report]'" in line for line in errors)
    write_trace(example(), tmp_path / "step.json")
    assert main(["report", str(tmp_path / "step.json"), "--text"]) == 0


NEWER = json.dumps({"traceEvents": [], "eager_offload": {"format": FORMAT + 1}})


@pytest.mark.parametrize(
    ("content", "reported"),
    [
        (None, "No such file or directory"),
        ("", "no trace of eager_offload"),
        ('{"traceEvents": []}', "no trace of eager_offload"),
        ("[]", "no trace of eager_offload"),
        (NEWER, "Upgrade eager_offload"),
        (json.dumps({"eager_offload": {"format": FORMAT}}), "damaged"),
        (b"\xff\xfe\x00", "no trace of eager_offload"),
    ],
)
def test_what_is_no_trace_is_refused_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: Any, reported: str
) -> None:
    source = tmp_path / "step.json"
    if content is not None:
        source.write_bytes(content if isinstance(content, bytes) else content.encode())
    assert main(["report", str(source), "-o", str(tmp_path / "page.html")]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    assert reported in captured.err
    assert "step.json" in captured.err
    assert not (tmp_path / "page.html").exists()


def test_a_page_that_cannot_be_written_is_said_and_the_trace_is_not_written_over(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = tmp_path / "step.html"
    write_trace(example(), source)
    before = source.read_bytes()
    assert main(["report", str(source), "-o", str(tmp_path / "missing" / "page.html")]) == 2
    assert "No such file or directory" in capsys.readouterr().err
    assert main(["report", str(source)]) == 2
    assert "is the trace itself" in capsys.readouterr().err
    assert source.read_bytes() == before
