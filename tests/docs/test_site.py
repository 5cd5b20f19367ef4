"""The site: it builds without a warning, its links lead somewhere, and it asks no network for anything."""

from __future__ import annotations

import dataclasses
import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
import yaml

import eager_offload as eo
from eager_offload import graphs, kernels
from eager_offload.version import VERSION
from tests.docs.pages import PAGES, ROOT, links, name

pytestmark = [pytest.mark.long, pytest.mark.xdist_group("site")]

needs_mkdocs = pytest.mark.skipif(
    any(importlib.util.find_spec(one) is None for one in ("mkdocs", "material", "mkdocstrings")),
    reason="the docs' extra is not installed",
)


class Page(HTMLParser):
    """What a page of HTML links to, what it loads, and what can be linked to in it."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.links: list[str] = []
        self.loads: list[str] = []
        self.anchors: set[str] = {""}
        self.text = ""
        self.feed(path.read_text())

    def handle_data(self, data: str) -> None:
        self.text += data

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        given = {key: value or "" for key, value in attributes}
        self.anchors |= {given[key] for key in ("id", "name") if key in given}
        if tag == "a" and "href" in given:
            self.links.append(given["href"])
        elif tag == "link" and "href" in given:
            self.loads.append(given["href"])
        elif tag in ("script", "img", "iframe", "source", "video", "audio", "object", "embed"):
            self.loads += [given[key] for key in ("src", "srcset", "data") if given.get(key)]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("site")
    # What makes the pages is installed by itself: they are made of the sources, and import none of them.
    alone = (
        "import sys; sys.modules['torch'] = sys.modules['eager_offload'] = None; import mkdocs.__main__ as m; m.cli()"
    )
    built = subprocess.run(
        [sys.executable, "-c", alone, "build", "--strict", "--site-dir", str(out)],
        cwd=ROOT,
        env=os.environ | {"NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert built.returncode == 0, built.stdout + built.stderr
    assert not re.search(r"WARNING|ERROR", built.stderr), built.stderr
    return out


def html(site: Path) -> Iterator[tuple[Path, Page]]:
    for path in sorted(site.rglob("*.html")):
        yield path, Page(path)


@needs_mkdocs
def test_every_page_is_built_and_what_the_navigation_names_is_there(site: Path) -> None:
    pages = {page.relative_to(ROOT / "docs").as_posix() for page in PAGES if page.is_relative_to(ROOT / "docs")}
    listed = set(re.findall(r"[\w/]+\.md", (ROOT / "mkdocs.yml").read_text()))
    assert listed == pages
    assert all((site / page).with_suffix(".html").is_file() for page in pages)


@needs_mkdocs
def test_the_site_has_the_version_and_what_is_new(site: Path) -> None:
    assert f"eager_offload {VERSION} " in (site / "index.html").read_text()
    assert VERSION in Page(site / "changelog.html").text


@needs_mkdocs
def test_the_page_of_the_api_has_what_the_contract_has_and_no_internals(site: Path) -> None:
    anchors = Page(site / "api.html").anchors
    shown = {anchor.removeprefix("eager_offload.") for anchor in anchors if anchor.startswith("eager_offload.")}
    methods = {name.removeprefix("Offload.") for name in shown if name.startswith("Offload.")}
    assert methods == {"stats", "reset_stats", "step_plan", "compile", "trace", "reserve", "close"}
    assert {f"OffloadStats.{name}" for name in ("device_bytes_peak", "to_dict", "advice")} <= shown
    settings = {name.removeprefix("OffloadConfig.") for name in shown if name.startswith("OffloadConfig.")}
    assert settings >= {field.name for field in dataclasses.fields(eo.OffloadConfig)} | {"from_env", "from_dict"}
    assert not settings & {"to_text", "size", "newest_bytes"}


@needs_mkdocs
def test_every_link_of_the_site_leads_somewhere(site: Path) -> None:
    pages = dict(html(site))
    assert len(pages) > 10
    for path, page in pages.items():
        if path.name == "404.html":  # its links are from the root of wherever the site is
            continue
        for link in page.links + page.loads:
            to = urlsplit(link)
            if to.scheme in ("http", "https", "mailto", "data"):
                continue
            target = (path.parent / unquote(to.path)).resolve() if to.path else path
            target = target / "index.html" if target.is_dir() else target
            assert target.is_file(), f"{path.name}: {link}"
            if to.fragment and target.suffix == ".html":
                assert unquote(to.fragment) in pages[target].anchors, f"{path.name}: {link}"


@needs_mkdocs
def test_no_page_loads_anything_from_the_network(site: Path) -> None:
    for path, page in html(site):
        assert not [link for link in page.loads if re.match(r"(https?:)?//", link)], path.name
    for sheet in site.rglob("*.css"):
        assert not re.search(r"url\(\s*[\"']?(https?:)?//|@import", sheet.read_text()), sheet.name


@needs_mkdocs
def test_every_public_name_is_on_the_page_of_the_api(site: Path) -> None:
    anchors = Page(site / "api.html").anchors
    assert not [one for one in eo.__all__ if f"eager_offload.{one}" not in anchors]
    for room in (graphs, kernels):
        assert not [one for one in room.__all__ if f"{room.__name__}.{one}" not in anchors]


def slug(heading: str) -> str:
    """The anchor of a heading, where README is shown."""
    plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).strip().lower()
    return re.sub(r"[^\w\- ]", "", plain).replace(" ", "-")


@pytest.mark.parametrize("page", [pytest.param(page, id=name(page)) for page in PAGES])
def test_every_link_of_a_source_leads_somewhere(page: Path) -> None:
    """Where the sources are read as they are, beside the code."""
    for file in re.findall(r"`((?:benchmarks|examples|tests)/[\w/]+\.\w+)`", page.read_text()):
        assert (ROOT / file).is_file(), f"{name(page)}: {file}"
    for to in links(page):
        target = (page.parent / to.path).resolve() if to.path else page
        assert target.exists(), f"{name(page)}: {to.geturl()}"
        if to.fragment and target.suffix == ".md" and target.name != "api.md":  # its anchors come from docstrings
            headings = re.findall(r"^#+ (.*)$", target.read_text(), re.MULTILINE)
            assert to.fragment in {slug(heading) for heading in headings}, f"{name(page)}: {to.geturl()}"


def test_the_navigation_names_each_page_once() -> None:
    listed = re.findall(r"[\w/]+\.md", (ROOT / "mkdocs.yml").read_text())
    assert len(listed) == len(set(listed)) > 5


def test_make_docs_builds_strictly() -> None:
    makefile = (ROOT / "Makefile").read_text()
    rule = re.search(r"^docs: \$\(DOCS\).*\n\t(.*)$", makefile, re.MULTILINE)
    assert rule
    assert "mkdocs build --strict" in rule[1]
    assert "/site/" in (ROOT / ".gitignore").read_text().split()
    assert yaml.safe_load((ROOT / "mkdocs.yml").read_text())["theme"]["font"] is False
