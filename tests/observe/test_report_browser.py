"""The page of a trace in a real browser, at the widths of a phone and of a desktop, light and dark."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from eager_offload.__main__ import main
from eager_offload.trace_file import Trace, read_trace, write_trace
from tests.observe.browser import CHROMIUM, Browser
from tests.observe.traces import AWKWARD, example

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed"),
    pytest.mark.xdist_group("report in a browser"),
]

#: CSS pixels of a phone and of a desktop.
WIDTHS = (390, 1280)
#: Pixels of the drawing that memory takes, above what ran when.
MEMORY = 200


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with Browser(tmp_path_factory.mktemp("profile")) as opened:
        yield opened


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("page")
    write_trace(example(), folder / "step.json")
    assert main(["report", str(folder / "step.json")]) == 0
    return folder / "step.html"


@pytest.fixture(scope="module")
def trace(page: Path) -> Trace:
    return read_trace(page.with_suffix(".json"))


@dataclass(frozen=True)
class Look:
    """The page as it is seen."""

    browser: Browser
    width: int
    reported: list[dict[str, Any]]

    def what(self, method: str) -> list[dict[str, Any]]:
        return [event["params"] for event in self.reported if event["method"] == method]


@pytest.fixture(
    scope="module",
    params=[(w, d) for w in WIDTHS for d in (False, True)],
    ids=lambda p: f"{p[0]}-{'dark' if p[1] else 'light'}",
)
def look(request: pytest.FixtureRequest, browser: Browser, page: Path) -> Look:
    width, dark = request.param
    return Look(browser, width, browser.open(page, width, dark=dark))


def test_it_asks_for_nothing_but_itself_and_no_script_fails(look: Look, page: Path) -> None:
    assert [asked["request"]["url"] for asked in look.what("Network.requestWillBeSent")] == [page.as_uri()]
    assert look.what("Runtime.exceptionThrown") == []
    assert look.what("Runtime.consoleAPICalled") == []
    assert look.what("Log.entryAdded") == []


def test_nothing_is_wider_than_the_window(look: Look) -> None:
    assert look.browser.run("[innerWidth, document.documentElement.scrollWidth]") == [look.width, look.width]
    beyond = """[...document.querySelectorAll("body *:not(.visually-hidden)")].filter(one => {
        const box = one.getBoundingClientRect();
        return box.width && (box.right > innerWidth + 0.5 || box.left < -0.5);
    }).map(one => one.outerHTML.slice(0, 80))"""
    assert look.browser.run(beyond) == []


def test_every_text_stands_out_from_what_is_behind_it(look: Look) -> None:
    """WCAG 2.2, 1.4.3: a contrast of 4.5."""
    found = look.browser.run(CONTRASTS)
    assert len(found) > 60
    assert [one for one in found if one[0] < 4.5] == []


def test_what_is_drawn_is_what_was_traced(look: Look, trace: Trace) -> None:
    drawn = look.browser.run("[...document.querySelectorAll('canvas')].map(one => ({...one.dataset}))")
    assert drawn == [{"samples": str(len(trace.memory)), "tracks": "8", "slices": str(len(trace.slices))}]
    memory, timeline = colours_of(look.browser.screenshot(), look.browser.run(BOX), MEMORY)
    for name in ("device", "without", "disk", "line"):
        assert look.browser.run(f"colour('{name}')") in memory, name
    for name in ("compute", "offload", "reload", "prefetch", "stall", "demotion", "line"):
        assert look.browser.run(f"colour('{name}')") in timeline, name


def test_the_figures_are_those_of_the_trace(look: Look, trace: Trace) -> None:
    shown = look.browser.run(
        "Object.fromEntries([...document.querySelectorAll('data')].map(one => [one.dataset.figure, +one.value]))"
    )
    stats = trace.stats
    names = (
        "saved_bytes",
        "saved_tensors",
        "offloaded_bytes",
        "shared_bytes",
        "stall_seconds",
        "bytes_out",
        "bytes_in",
        "disk_bytes_written",
    )
    expected = {name: stats[name] for name in names}
    expected |= {"seconds": trace.seconds, "dropped": trace.dropped, "fallbacks": sum(stats["demotions"].values())}
    expected |= {f"kept.{reason}": nbytes for reason, nbytes in stats["kept_bytes"].items()}
    expected["kept_bytes"] = sum(stats["kept_bytes"].values())
    expected["peak.device"] = max(one.device for one in trace.memory)
    expected["peak.without_offload"] = max(one.without_offload for one in trace.memory)
    for one in trace.slices:
        for what, amount in (("count", 1), ("bytes", one.nbytes)):
            key = f"work.{one.device}.{one.kind}.{what}"
            if what == "count" or one.nbytes:
                expected[key] = expected.get(key, 0) + amount
    given = {key: value for key, value in shown.items() if key in expected}
    assert given == expected
    for prefix in ("savers", "each"):
        counted = sum(value for key, value in shown.items() if key.startswith(prefix) and key.endswith(".bytes"))
        assert counted == sum(group.nbytes for group in trace.saved)
    empty = "[...document.querySelectorAll('data')].filter(one => !/[0-9]/.test(one.textContent)).length"
    assert look.browser.run(empty) == 0


def test_a_name_is_never_markup(look: Look) -> None:
    assert look.browser.run("document.title") == "step.json · eager_offload"
    assert look.browser.run("document.querySelectorAll('img').length") == 0
    assert AWKWARD in look.browser.run("document.body.innerText")


def test_it_can_be_zoomed_and_moved(browser: Browser, page: Path, trace: Trace) -> None:
    browser.open(page, 1280, dark=False)
    whole = trace.seconds * 1e6
    assert looked_at(browser) == [0, whole]
    assert looked_at(browser, "document.querySelector('[data-zoom=in]').click()") == [whole / 4, whole * 3 / 4]
    assert looked_at(browser, press("ArrowRight")) == [whole / 2, whole]
    assert looked_at(browser, press("0")) == [0, whole]


def test_what_is_pointed_at_is_read_out(browser: Browser, page: Path) -> None:
    browser.open(page, 1280, dark=False)
    reading = "document.getElementById('reading').textContent"
    assert "Point at the drawing" in browser.run(reading)
    # The one reload lies from 0.7 s to 0.73 s of 0.9, on the fourth track: below those of depth 3, 2 and 1.
    point = """(([x, y]) => {
        const canvas = document.getElementById("drawing");
        const box = canvas.getBoundingClientRect();
        const place = {clientX: box.left + x * box.width, clientY: box.top + y};
        canvas.dispatchEvent(new PointerEvent("pointermove", place));
    })"""
    top = MEMORY + 8 + 3 * (18 + 8) + (3 + 2 + 1) * 16 + 18
    browser.run(f"{point}([{0.715 / 0.9}, {top + 8}])")
    assert browser.run(reading) == (
        "cpu reload: Net.layers.0.mlp · 30.00 ms at 700.00 ms · 16.0 MiB · GeluBackward0 · disk"
    )
    browser.run(f"{point}([{0.32 / 0.9}, 10])")
    assert browser.run(reading) == (
        "at 320.00 ms: 123.0 MiB on disk, 45.0 MiB on the device, 168.0 MiB without offload"
    )


def looked_at(browser: Browser, script: str = "0") -> list[float]:
    """The part of the trace that is shown, in microseconds, after a script has run and been drawn."""
    text = browser.run(
        f"{script}; new Promise(done => requestAnimationFrame(() => requestAnimationFrame("
        "() => done(document.documentElement.dataset.view))))"
    )
    return [float(number) for number in text.split()]


def press(key: str) -> str:
    return f"document.getElementById('drawing').dispatchEvent(new KeyboardEvent('keydown', {{key: {json.dumps(key)}}}))"


def colours_of(png: bytes, box: list[float], height: int) -> list[set[str]]:
    """The colours of the upper ``height`` pixels of a box, and of the rest, as ``"#rrggbb"``."""
    image = Image.open(io.BytesIO(png)).convert("RGB")
    left, top, right, bottom = (round(edge) for edge in box)
    found = []
    for part in (image.crop((left, top, right, top + height)), image.crop((left, top + height, right, bottom))):
        counted = part.getcolors(part.width * part.height)
        found.append({"#{:02x}{:02x}{:02x}".format(*colour) for _, colour in counted})
    return found


BOX = """
    globalThis.colour = name => getComputedStyle(document.documentElement).getPropertyValue("--" + name).trim();
    (box => [box.left + scrollX, box.top + scrollY, box.right + scrollX, box.bottom + scrollY])(
        document.getElementById("drawing").getBoundingClientRect())
"""

#: Of every text, and of the names in slices: the contrast, and what it is.
CONTRASTS = """
(() => {
    const channels = text => {
        if (text.startsWith("#")) return [1, 3, 5].map(at => parseInt(text.slice(at, at + 2), 16));
        return text.match(/[\\d.]+/g).map(Number);
    };
    const luminance = ([r, g, b]) => [r, g, b].map(v => v / 255)
        .map(v => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4)
        .reduce((sum, v, at) => sum + v * [0.2126, 0.7152, 0.0722][at], 0);
    const contrast = (one, other) => {
        const [low, high] = [luminance(channels(one)), luminance(channels(other))].sort((a, b) => a - b);
        return (high + 0.05) / (low + 0.05);
    };
    const behind = one => {
        for (; one; one = one.parentElement) {
            const colour = channels(getComputedStyle(one).backgroundColor);
            if (colour.length === 3 || colour[3] === 1) return getComputedStyle(one).backgroundColor;
        }
        return "rgb(255, 255, 255)";
    };
    const found = [];
    const walker = document.createTreeWalker(document.querySelector("main"), NodeFilter.SHOW_TEXT);
    while (walker.nextNode()) {
        const text = walker.currentNode.textContent.trim(), parent = walker.currentNode.parentElement;
        if (text) found.push([contrast(getComputedStyle(parent).color, behind(parent)), text]);
    }
    const named = name => getComputedStyle(document.documentElement).getPropertyValue("--" + name).trim();
    for (const kind of ["compute", "offload", "reload", "prefetch", "stall", "demotion"]) {
        found.push([contrast(named("on-data"), named(kind)), kind]);
    }
    for (const text of ["text", "muted"]) found.push([contrast(named(text), named("card")), text]);
    return found;
})()
"""
