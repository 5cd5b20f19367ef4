"""The last column of tests/hazards.md: which files prove each hazard.

    python -m tests.hazards_page     writes it anew

A hazard is proven by the programs of the corpus and by the tests whose names carry its id.
"""

from __future__ import annotations

import re
from collections import defaultdict
from pathlib import Path

from tests.programs import corpus

TESTS = Path(__file__).parent
PAGE = TESTS / "hazards.md"
#: A row of a table: all before the last column, with the id in it, and the last column.
_ROW = re.compile(r"^(?P<said>\| (?P<id>H\d\d) \|.*\|) (?P<proof>[^|]+) \|$", re.MULTILINE)


def proofs() -> dict[str, list[str]]:
    """By id, the files with programs or tests that carry it, as named from ``tests/`` on; programs come first."""
    found: defaultdict[str, set[str]] = defaultdict(set)
    for program in corpus():
        for number in program.hazards:
            found[number].add(program.file)
    for path in TESTS.rglob("test_*.py"):
        for name in re.findall(r"^ *def test_(\w+)", path.read_text(), re.MULTILINE):
            for number in re.findall(r"h(\d\d)_", name):
                found[f"H{number}"].add(str(path.relative_to(TESTS)))
    return {
        number: sorted(files, key=lambda file: (not file.startswith("programs/"), file))
        for number, files in found.items()
    }


def written() -> str:
    """The page as it should be.

    Raises:
        KeyError: a hazard of the page has no program and no test.
    """
    found = proofs()

    def row(match: re.Match[str]) -> str:
        return f"{match['said']} {', '.join(f'`{file}`' for file in found[match['id']])} |"

    return _ROW.sub(row, PAGE.read_text())


def ids() -> list[str]:
    """The ids on the page, in its order."""
    return [match["id"] for match in _ROW.finditer(PAGE.read_text())]


if __name__ == "__main__":
    PAGE.write_text(written())
