"""Writes the description that a package index shows; all else is in ``pyproject.toml``.

An index shows README without the files beside it, and the project has no public address that links could lead to: so
each link to a page becomes the page's path in the source distribution, which has them all, and pictures are left out.
"""

import re
from pathlib import Path

from setuptools import setup

_NOTE = (
    "\nPages that are named by their path here, such as `docs/index.md`, are in the source distribution, and "
    "`make docs` builds a site of them there.\n"
)


def _page(link: re.Match[str]) -> str:
    """Returns the text of a link, with the path of the page behind it if the text is another one."""
    text, path = link["text"], link["to"].partition("#")[0]
    return text if not path or text.strip("`") == path else f"{text} (`{path}`)"


def description(readme: str) -> str:
    """Returns ``readme`` with nothing that needs the files beside it, and without comments."""
    shown = re.sub(r"<!--.*?-->\n?", "", readme, flags=re.DOTALL)
    shown = re.sub(r"!\[[^\]]*\]\((?!https?:)[^)]*\)\n\n?", "", shown)
    return re.sub(r"\[(?P<text>[^\]]*)\]\((?!https?:)(?P<to>[^)\s]+)\)", _page, shown) + _NOTE


setup(
    long_description=description((Path(__file__).parent / "README.md").read_text(encoding="utf-8")),
    long_description_content_type="text/markdown",
)
