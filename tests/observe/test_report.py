"""What a page says of a trace, and what the command does with something that is none."""

from __future__ import annotations

import dataclasses
import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch

import eager_offload as eo
from eager_offload.__main__ import main
from eager_offload.observe.report import figures
from eager_offload.observe.report.figures import OutcomeBytes, Saver
from eager_offload.observe.report.page import REASONS, render
from eager_offload.stats import KeepReason
from eager_offload.trace_file import FORMAT, MemorySample, SavedGroup, Slice, SliceKind, Trace, read_trace, write_trace
from tests.observe.traces import AWKWARD, LAYERS, example

MIB = 1 << 20
PACKAGE = Path(eo.__file__).parent


# -- figures --------------------------------------------------------------------------------------------------------


def test_time_that_overlaps_counts_once() -> None:
    slices = (
        Slice(SliceKind.COMPUTE, "outer", "cpu", "compute forward", 1.0, 4.0),
        Slice(SliceKind.COMPUTE, "inner", "cpu", "compute forward", 2.0, 1.0),
        Slice(SliceKind.COMPUTE, "beyond", "cpu", "compute forward 2", 4.0, 3.0),
        Slice(SliceKind.COMPUTE, "later", "cpu", "compute forward", 10.0, 0.5),
        Slice(SliceKind.OFFLOAD, "offload", "cuda:1", "offload", 0.0, 0.5, 100),
        Slice(SliceKind.OFFLOAD, "offload", "cuda:1", "offload", 1.0, 1.5, 300),
    )
    compute, offload = figures.work_totals(Trace(12.0, {}, {}, slices=slices))
    assert (compute.device, compute.kind, compute.count) == ("cpu", SliceKind.COMPUTE, 4)
    assert compute.seconds == pytest.approx(6.5)
    assert compute.rate is None
    assert (offload.device, offload.count, offload.nbytes, offload.rate) == ("cuda:1", 2, 400, 200)


def test_what_the_host_of_an_accelerator_waits_is_no_stall_of_compute() -> None:
    slices = (
        Slice(SliceKind.STALL, "reload", "cuda:0", "stall", 0.0, 0.25),
        Slice(SliceKind.STALL, "window is full", "cuda:0", "stall host", 1.0, 4.0),
        Slice(SliceKind.STALL, "window is full", "cuda:0", "stall host 2", 5.0, 2.0),
    )
    trace = Trace(12.0, {}, {"stall_seconds": 0.25, "host_wait_seconds": 6.0}, slices=slices)
    found = [(one.name, one.count, one.seconds) for one in figures.work_totals(trace)]
    assert found == [("stall", 1, 0.25), ("stall host", 2, 6.0)]
    page = render(trace)
    for text in (
        'data-figure="stall_seconds">250.0 ms<',
        'data-figure="host_wait_seconds">6.00 s<',
        "Stall host, cuda:0",
    ):
        assert text in page, text


def test_alike_modules_count_as_one() -> None:
    groups = [
        SavedGroup("Mm", "Net.layers.0.mlp", "offloaded", "", 1, 10),
        SavedGroup("Mm", "Net.layers.1.mlp", "offloaded", "", 2, 20),
        SavedGroup("Mm", "Net.layers.1.mlp", "kept", "newest", 1, 40),
        SavedGroup("Mm", "Net.head2", "kept", "newest", 1, 5),
        SavedGroup("Mm", "Net.blocks.7", "shared", "", 1, 3),
    ]
    alike, newest = figures.savers(groups, alike=True), OutcomeBytes("newest", True, 40)
    assert alike == [
        Saver("Mm", "Net.layers.*.mlp", 2, 4, 70, (newest, OutcomeBytes("offloaded", False, 30))),
        Saver("Mm", "Net.head2", 1, 1, 5, (OutcomeBytes("newest", True, 5),)),
        Saver("Mm", "Net.blocks.7", 1, 1, 3, (OutcomeBytes("shared", False, 3),)),
    ]
    each = figures.savers(groups, alike=False)
    assert [(one.module, one.nbytes) for one in each] == [
        ("Net.layers.1.mlp", 60),
        ("Net.layers.0.mlp", 10),
        ("Net.head2", 5),
        ("Net.blocks.7", 3),
    ]


def test_what_lies_inside_is_drawn_below() -> None:
    slices = [
        Slice(SliceKind.COMPUTE, "inner", "cpu", "compute forward", 1.0, 1.0),
        Slice(SliceKind.COMPUTE, "outer", "cpu", "compute forward", 1.0, 3.0),
        Slice(SliceKind.COMPUTE, "beside", "cpu", "compute forward", 2.0, 1.0),
        Slice(SliceKind.COMPUTE, "innermost", "cpu", "compute forward", 2.5, 0.25),
        # Rounded: it begins a moment before its neighbour is over.
        Slice(SliceKind.COMPUTE, "next", "cpu", "compute forward", 3.9999, 1.0),
    ]
    (track,) = figures.tracks(Trace(5.0, {}, {}, slices=tuple(slices)))
    assert [(one.slice.name, one.depth) for one in track.placed] == [
        ("outer", 0),
        ("inner", 1),
        ("beside", 1),
        ("innermost", 2),
        ("next", 0),
    ]
    assert track.depth == 3


def test_tracks_stand_in_the_order_of_their_kinds() -> None:
    assert [(one.device, one.name) for one in figures.tracks(example())] == [
        ("cpu", "compute forward"),
        ("cpu", "compute backward"),
        *(("cpu", kind) for kind in ("offload", "reload", "prefetch", "stall", "demotion")),
        ("cuda:0", "offload"),
    ]


def test_peaks_are_those_of_memory() -> None:
    most = figures.peaks(example())
    assert (most.device, most.disk, most.host, most.without_offload) == (45 * MIB, 123 * MIB, 0, LAYERS * 28 * MIB)


# -- the page -------------------------------------------------------------------------------------------------------


class Links(HTMLParser):
    """Everything that a page could ask the network for."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found += [str(value) for name, value in attrs if name in ("src", "href", "action", "data", "srcset")]


def test_the_page_stands_by_itself() -> None:
    page = render(example(), "step.json")
    links = Links()
    links.feed(page)
    assert links.found == ["data:,"]
    assert "Content-Security-Policy" in page
    assert not re.search(r"https?://|@import|url\(", page)


def test_names_cannot_become_markup() -> None:
    trace = dataclasses.replace(example(), error=f"ValueError: {AWKWARD}", advice=(AWKWARD,))
    page = render(trace, AWKWARD)
    assert "<img" not in page
    assert page.count("</script>") == 2


def test_an_empty_trace_has_a_page() -> None:
    page = render(Trace(0.0, {}, {}))
    assert "Nothing limited this run" in page
    assert page.count("Nothing.</p>") == 4


def test_what_ended_the_trace_and_what_it_lacks_is_said() -> None:
    page = render(dataclasses.replace(example(), error="KeyboardInterrupt: ", dropped=1234))
    assert "The run ended early: KeyboardInterrupt" in page
    assert ">1,234</data> slices, samples and saves were too many" in page


def test_every_reason_that_the_stats_have_is_explained() -> None:
    assert set(REASONS) == set(KeepReason)


def test_numbers_are_short_and_exact_beside_it() -> None:
    slices = (Slice(SliceKind.OFFLOAD, "offload", "cpu", "offload", 0.0, 0.0125, 3 << 20),)
    page = render(Trace(61.5, {"min_bytes": 1536, "verify": False, "disk_path": ["/a", "/b"]}, {}, slices=slices))
    for text in (
        *(
            '<data value="61.5" data-figure="seconds">61.50 s</data>',
            '<data value="0.0" data-figure="stall_seconds">0 s<',
        ),
        *('data-figure="work.cpu.offload.seconds">12.5 ms</data>', "<td>251.7 MB/s</td>"),
        *(
            'data-figure="work.cpu.offload.bytes">3.0 MiB</data>',
            "<td>1.5 KiB</td>",
            "<td>False</td>",
            "<td>/a, /b</td>",
        ),
    ):
        assert text in page, text


def test_the_page_of_a_real_run_has_the_numbers_of_its_stats(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.GELU()) for _ in range(4)))
    small = {"max_inflight_bytes": "4MiB", "prefetch_bytes": "4MiB", "keep_last_bytes": 0, "min_bytes": "64KiB"}
    offload = eo.Offload(disk_path=tmp_path, **small)
    with offload.trace(tmp_path / "step.json"):
        with offload:
            loss = model(torch.ones(1024, 256)).square().mean()
        loss.backward()
    stats = offload.stats()
    offload.close()
    assert stats.bytes_out > 4 * MIB
    trace = read_trace(tmp_path / "step.json")
    page = render(trace, "step.json")
    for name in ("saved_bytes", "offloaded_bytes", "shared_bytes", "bytes_out", "bytes_in", "stall_seconds"):
        assert f'<data value="{getattr(stats, name)}" data-figure="{name}">' in page, name
    for reason, nbytes in stats.kept_bytes.items():
        assert f'<data value="{nbytes}" data-figure="kept.{reason}">' in page
    assert sum(one.nbytes for one in figures.savers(trace.saved, alike=True)) == stats.saved_bytes
    assert "Sequential.*.*" in page
    assert {one.kind for one in figures.tracks(trace)} >= {SliceKind.COMPUTE, SliceKind.OFFLOAD}
    assert figures.peaks(trace).without_offload > figures.peaks(trace).device


def test_the_page_speaks_of_fallbacks_of_shares_with_a_sign_and_shows_code_as_code() -> None:
    memory = (MemorySample(0.0, 0, 0, 0, 0), MemorySample(0.5, 2 * MIB, 0, 8 * MIB, 10 * MIB))
    advice = ("Put `with offload:` around <x>.",)
    page = render(dataclasses.replace(example(), advice=advice, memory=memory))
    assert "<li>Put <code>with offload:</code> around &lt;x&gt;.</li>" in page
    assert "without offload (-80 %)" in page
    text = re.sub(r"<(style|script)[^>]*>.*?</\1>|<[^>]*>", "", page, flags=re.DOTALL)
    assert "emotion" not in text
    assert "Fallbacks" in text
    assert "Fallback, cpu" in text


# -- the command ----------------------------------------------------------------------------------------------------


def test_the_page_goes_beside_the_trace_or_to_the_output(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = tmp_path / "step.json"
    write_trace(example(), source)
    assert main(["report", str(source)]) == 0
    assert main(["report", str(source), "-o", str(tmp_path / "other.html")]) == 0
    assert (tmp_path / "step.html").read_text() == (tmp_path / "other.html").read_text()
    assert str(tmp_path / "other.html") in capsys.readouterr().out


NEWER = json.dumps({"traceEvents": [], "eager_offload": {"format": FORMAT + 1}})


@pytest.mark.parametrize(
    ("content", "reported"),
    [
        (None, "No such file or directory"),
        ("", "no trace of eager_offload"),
        ("not JSON", "no trace of eager_offload"),
        ('{"traceEvents": []}', "no trace of eager_offload"),
        ("[]", "no trace of eager_offload"),
        (NEWER, "Upgrade eager_offload"),
        ('{"eager_offload": {"format": 1}}', "damaged"),
        (b"\xff\xfe\x00", "no trace of eager_offload"),
    ],
)
def test_what_is_no_trace_is_refused_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str | bytes | None, reported: str
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


def test_a_page_that_cannot_be_written_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = tmp_path / "step.json"
    write_trace(example(), source)
    assert main(["report", str(source), "-o", str(tmp_path / "missing" / "page.html")]) == 2
    assert "No such file or directory" in capsys.readouterr().err


def test_the_trace_is_not_written_over(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = tmp_path / "step.html"
    write_trace(example(), source)
    before = source.read_bytes()
    assert main(["report", str(source)]) == 2
    assert "is the trace itself" in capsys.readouterr().err
    assert source.read_bytes() == before
