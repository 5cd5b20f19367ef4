"""The figure of a plan has the plan's numbers, and the command writes it as a page."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

import eager_offload as eo
from eager_offload.__main__ import main
from eager_offload.config import size_text

MODELS = "tests.planning.models_of_a_user"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("plan")


@pytest.fixture(scope="module")
def plan(folder: Path) -> eo.Plan:
    arguments = ["--device", "h200", "--budget", "2GiB", "--save", str(folder / "plan.json")]
    assert main(["plan", f"{MODELS}:two_blocks", *arguments, "--html", str(folder / "plan.html")]) == 1
    return eo.Plan.load(folder / "plan.json")


def test_the_command_writes_the_page_of_the_plan(plan: eo.Plan, folder: Path) -> None:
    page = (folder / "plan.html").read_text("utf-8")
    assert "it does not fit" in page
    assert "Plotly.newPlot" in page


def test_the_figure_has_the_numbers_of_the_plan(plan: eo.Plan) -> None:
    awkward = "<img src=x onerror=alert(1)>"
    figure = replace(plan, model=awkward).figure()
    assert awkward not in figure.layout.title.text
    tiles, said, modules = (one for one in figure.data if one.type == "table")
    assert [column[0] for column in tiles.cells.values] == [
        f"<b>{shown}</b>"
        for shown in (
            size_text(plan.peak_bytes),
            size_text(plan.fixed_ways()[0].peak_bytes),
            f"{1e3 * plan.step_seconds:.1f} ms",
            size_text(plan.moved_bytes),
            size_text(plan.least_budget),
        )
    ]
    assert said.cells.values[0][0] in str(plan)
    rows = plan.rows()
    assert list(modules.cells.values[0]) == [row.kind for row in rows]
    assert list(modules.cells.values[3]) == [size_text(row.moved_bytes) for row in rows]
    drawn = {one.name.partition(",")[0]: one for one in figure.data if one.type == "scatter"}
    assert max(drawn["with this plan"].y) == plan.peak_bytes
    assert max(drawn["without offload"].y) <= plan.fixed_ways()[0].peak_bytes
    assert set(drawn["budget"].y) == {plan.device_budget}
    for way in plan.fixed_ways():
        assert (drawn[way.name].x, drawn[way.name].y) == ((way.peak_bytes,), (way.step_seconds / plan.compute_seconds,))
    assert drawn["this plan"].x == (plan.peak_bytes,)
    peaks = list(drawn["best plans"].x)
    assert peaks == sorted(set(peaks)), "of budgets that buy the same one"
    assert peaks[0] == plan.front(2)[0].peak_bytes


def test_the_fixed_ways_are_those_decisions(plan: eo.Plan) -> None:
    nothing, half, everything = plan.fixed_ways()
    assert nothing.step_seconds == pytest.approx(plan.compute_seconds, rel=1e-3)
    assert nothing.peak_bytes == pytest.approx(plan.problem.predict((False,) * len(plan.moves)).peak_bytes)
    assert everything.peak_bytes < half.peak_bytes, "of two blocks the windows hold half"
    assert nothing.step_seconds < min(half.step_seconds, everything.step_seconds)
