"""The page of a plan, as text and in a real browser."""

from __future__ import annotations

import io
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from PIL import Image

import eager_offload as eo
from eager_offload.planning.command import main
from tests.observe.browser import CHROMIUM, Browser
from tests.observe.test_report_browser import BOX, CONTRASTS, WIDTHS

MODELS = "tests.planning.models_of_a_user"
AWKWARD = "</script><img src=x onerror=alert(1)>"
GIB = 1 << 30
in_a_browser = [
    pytest.mark.long,
    pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed"),
    pytest.mark.xdist_group("report in a browser"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("plan")


@pytest.fixture(scope="module")
def plan(folder: Path) -> eo.Plan:
    arguments = ["--device", "h200", "--budget", "2GiB", "--save", str(folder / "plan.json")]
    assert main([f"{MODELS}:two_blocks", *arguments, "--html", str(folder / "by_command.html")]) == 1
    found = replace(eo.Plan.load(folder / "plan.json"), model=AWKWARD)
    found.html(folder / "plan.html")
    return found


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with Browser(tmp_path_factory.mktemp("profile")) as browser:
        yield browser


def test_the_command_writes_the_page_of_the_plan(plan: eo.Plan, folder: Path) -> None:
    written = (folder / "by_command.html").read_text("utf-8")
    assert written.startswith("<!doctype html>")
    assert "It does not fit" in written
    assert AWKWARD not in (folder / "plan.html").read_text("utf-8"), "a name is never markup"


def test_the_fixed_ways_are_those_decisions(plan: eo.Plan) -> None:
    nothing, half, everything = plan.fixed_ways()
    assert nothing.step_seconds == pytest.approx(plan.compute_seconds, rel=1e-3)
    assert nothing.peak_bytes == pytest.approx(plan.problem.predict((False,) * len(plan.moves)).peak_bytes)
    assert everything.peak_bytes < half.peak_bytes, "of two blocks the windows hold half"
    assert nothing.step_seconds < min(half.step_seconds, everything.step_seconds)


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("width", WIDTHS)
class TestInABrowser:
    pytestmark = in_a_browser

    def test_it_is_drawn_and_read(self, opened: Browser, plan: eo.Plan, folder: Path, width: int, dark: bool) -> None:
        reported = opened.open(folder / "plan.html", width, dark=dark)
        asked = [one["params"]["request"]["url"] for one in reported if one["method"] == "Network.requestWillBeSent"]
        assert asked == [(folder / "plan.html").as_uri()]
        assert not [
            one
            for one in reported
            if one["method"].startswith(("Runtime.exceptionThrown", "Runtime.consoleAPI", "Log."))
        ]
        assert opened.run("[innerWidth, document.documentElement.scrollWidth]") == [width, width]
        assert opened.run("document.querySelectorAll('img').length") == 0
        assert AWKWARD in opened.run("document.title")
        contrasts = opened.run(CONTRASTS)
        assert len(contrasts) > 60
        assert [one for one in contrasts if one[0] < 4.5] == []
        left, top, right, bottom = map(round, opened.run(BOX))
        image = Image.open(io.BytesIO(opened.screenshot())).convert("RGB").crop((left, top, right, bottom))
        colours = {"#{:02x}{:02x}{:02x}".format(*colour) for _, colour in image.getcolors(image.width * image.height)}
        for name in ("device", "without", "line"):
            assert opened.run(f"colour('{name}')") in colours, name

    def test_the_figures_are_those_of_the_plan(
        self, opened: Browser, plan: eo.Plan, folder: Path, width: int, dark: bool
    ) -> None:
        opened.open(folder / "plan.html", width, dark=dark)
        shown = opened.run(
            "Object.fromEntries([...document.querySelectorAll('data')].map(one => [one.dataset.figure, +one.value]))"
        )
        for name in ("peak_bytes", "step_seconds", "compute_seconds", "moved_bytes", "kept_bytes", "least_budget"):
            assert shown[name] == pytest.approx(getattr(plan, name)), name
        moved = [value for key, value in shown.items() if key.startswith("rows.") and key.endswith(".move")]
        assert sum(moved) == plan.moved_bytes
        for number, way in enumerate(plan.fixed_ways()):
            assert shown[f"ways.{number}.peak"] == way.peak_bytes
            assert shown[f"ways.{number}.step"] == pytest.approx(way.step_seconds)
        peaks = [value for key, value in shown.items() if key.startswith("front.") and key.endswith(".peak")]
        assert peaks
        assert peaks == sorted(set(peaks)), "of budgets that buy the same one"
        assert shown["front.0.budget"] == plan.least_budget
        outside = """[...document.querySelectorAll(".plot .mark")].filter(one => {
            const [mark, plot] = [one, one.parentElement].map(one => one.getBoundingClientRect());
            const [x, y] = [(mark.left + mark.right) / 2, (mark.top + mark.bottom) / 2];
            return x < plot.left || x > plot.right || y < plot.top || y > plot.bottom;
        }).length"""
        assert opened.run("document.querySelectorAll('.plot .mark').length") == 4
        assert opened.run(outside) == 0
