"""The site: it builds without a warning, its links lead somewhere, and it asks no network for anything."""

from __future__ import annotations

import dataclasses
import importlib.util
import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

import eager_offload as eo
from eager_offload import graphs, kernels
from tests.docs.pages import PAGES, ROOT, links, name

pytestmark = pytest.mark.long


class Page(HTMLParser):
    """What a page of HTML links to, what it loads, and what can be linked to in it."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.links: list[str] = []
        self.loads: list[str] = []
        self.anchors: set[str] = {""}
        self.feed(path.read_text())

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        given = {key: value or "" for key, value in attributes}
        self.anchors |= {given[key] for key in ("id", "name") if key in given}
        if tag == "a" and "href" in given:
            self.links.append(given["href"])
        elif tag == "link" and "href" in given:
            self.loads.append(given["href"])
        elif tag in ("script", "img", "iframe", "source", "video", "audio", "object", "embed"):
            self.loads += [given[key] for key in ("src", "srcset", "data") if given.get(key)]


@pytest.mark.skipif(
    any(importlib.util.find_spec(one) is None for one in ("mkdocs", "material", "mkdocstrings")),
    reason="the docs' extra is not installed",
)
def test_the_site_is_built_and_every_link_leads_somewhere(tmp_path: Path) -> None:
    # What makes the pages is installed by itself: they are made of the sources, and import none of them.
    alone = (
        "import sys; sys.modules['torch'] = sys.modules['eager_offload'] = None; import mkdocs.__main__ as m; m.cli()"
    )
    built = subprocess.run(
        [sys.executable, "-c", alone, "build", "--strict", "--site-dir", str(tmp_path)],
        cwd=ROOT,
        env=os.environ | {"NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert built.returncode == 0, built.stdout + built.stderr
    assert not re.search(r"WARNING|ERROR", built.stderr), built.stderr
    documents = {page.relative_to(ROOT / "docs").as_posix() for page in PAGES if page.is_relative_to(ROOT / "docs")}
    listed = re.findall(r"[\w/]+\.md", (ROOT / "mkdocs.yml").read_text())
    assert sorted(listed) == sorted(documents), "the navigation names each page once"
    pages = {path: Page(path) for path in tmp_path.rglob("*.html") if path.name != "404.html"}
    assert pages.keys() >= {(tmp_path / document).with_suffix(".html") for document in documents}
    for path, page in pages.items():
        assert not [link for link in page.loads if re.match(r"(https?:)?//", link)], f"{path.name} needs the network"
        for link in page.links + page.loads:
            to = urlsplit(link)
            if not to.scheme:
                target = (path.parent / unquote(to.path)).resolve() if to.path else path
                target = target / "index.html" if target.is_dir() else target
                assert target.is_file(), f"{path.name}: {link}"
                assert target.suffix != ".html" or unquote(to.fragment) in pages[target].anchors, f"{path.name}: {link}"
    for sheet in tmp_path.rglob("*.css"):
        assert not re.search(r"url\(\s*[\"']?(https?:)?//|@import", sheet.read_text()), sheet.name
    anchors = pages[tmp_path / "api.html"].anchors
    public = {f"{module.__name__}.{one}" for module in (eo, graphs, kernels) for one in module.__all__}
    fields = {f"eager_offload.OffloadConfig.{field.name}" for field in dataclasses.fields(eo.OffloadConfig)}
    assert public | fields <= anchors
    assert not {anchor for anchor in anchors if re.search(r"\._(?!_)|Config\.(to_text|size)$", anchor)}, "internals"


def slug(heading: str) -> str:
    """The anchor of a heading, where README is shown."""
    plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).strip().lower()
    return re.sub(r"[^\w\- ]", "", plain).replace(" ", "-")


@pytest.mark.parametrize("page", PAGES, ids=name)
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
