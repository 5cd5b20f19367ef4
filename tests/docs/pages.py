"""The pages of the documentation, and the blocks of code in them.

What a page's ``python`` blocks need and its reader does not (a small model, a loader) stands in a comment that begins
with ``setup``, which no renderer shows::

    <!-- setup
    model, loader = ...
    -->

A page may have several; each runs in its place among the blocks. See ``test_code_blocks.py`` for what runs how.
"""

from __future__ import annotations

import re
import textwrap
from pathlib import Path
from typing import NamedTuple
from urllib.parse import SplitResult, urlsplit

ROOT = Path(__file__).parents[2]
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "tests" / "hazards.md",
    *sorted((ROOT / "docs").rglob("*.md")),
]

# A fence may be indented, in a list or a tab; it ends at one as long that is indented alike.
_BLOCK = re.compile(
    r"^(?P<indent>[ \t]*)(?P<fence>`{3,})[ \t]*(?P<language>[\w+-]*)(?P<options>[^\n`]*)\n"
    r"(?P<code>.*?)^(?P=indent)(?P=fence)[ \t]*$"
    r"|^<!-- setup[ \t]*\n(?P<setup>.*?)^-->[ \t]*$",
    re.MULTILINE | re.DOTALL,
)


class Block(NamedTuple):
    """A block of a page: ``language`` is what its fence says, ``line`` where its code begins in the file."""

    line: int
    language: str
    code: str


def name(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def blocks(page: Path, *languages: str) -> list[Block]:
    """The blocks of ``page`` in these languages (all by default), in order; a hidden setup is one of ``python``."""
    text = page.read_text()
    found = []
    for match in _BLOCK.finditer(text):
        part, language = ("code", match["language"]) if match["setup"] is None else ("setup", "python")
        if not languages or language in languages:
            line = text.count("\n", 0, match.start(part)) + 1
            found.append(Block(line, language, textwrap.dedent(match[part])))
    return found


def prose(page: Path) -> str:
    """What ``page`` has outside of its blocks."""
    return _BLOCK.sub("", page.read_text())


def links(page: Path) -> list[SplitResult]:
    """Where the text of ``page`` links to in this repository, its pictures among them."""
    # Images have attributes that only the site reads.
    found = map(urlsplit, re.findall(r"\]\(([^)\s]+)\)", prose(page)))
    return [link for link in found if not link.scheme]
