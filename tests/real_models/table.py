"""The table in ``docs/models.md``: its lines, which versions they were made with, and its place on the page."""

from __future__ import annotations

import re
from pathlib import Path

import peft
import torch
import transformers

from eager_offload import OffloadStats
from tests.real_models.training import Case

PAGE = Path(__file__).parents[2] / "docs" / "models.md"
#: Why a saved tensor may stay without counting: too small to be worth it, held for good anyway, asked for at once.
EXCUSED = ("small", "parameter", "newest")

_COLUMNS = ("small", "parameter", "alive")
_HEAD = "| model | variant | saved | offloaded | shared | kept: small | parameter | alive | else | share |"
_BEGIN, _END = "<!-- table: python -m tests.real_models -->", "<!-- end of table -->"


def made_with() -> str:
    """The line above a table that is made here and now; with other versions, other bytes may be saved."""
    release = torch.__version__.split("+")[0]
    frameworks = f"transformers {transformers.__version__} and peft {peft.__version__}"
    return f"Made with torch {release}, {frameworks}; KiB, of three steps together."


def share(stats: OffloadStats) -> float:
    """The part of the saved bytes that stays without an excuse."""
    return sum(nbytes for reason, nbytes in stats.kept_bytes.items() if reason not in EXCUSED) / stats.saved_bytes


def line(case: Case, stats: OffloadStats) -> str:
    """One case's line, in KiB."""
    kept = stats.kept_bytes
    rest = sum(nbytes for reason, nbytes in kept.items() if reason not in _COLUMNS)
    numbers = (
        *(stats.saved_bytes, stats.offloaded_bytes, stats.shared_bytes),
        *(*(kept.get(reason, 0) for reason in _COLUMNS), rest),
    )
    cells = [case.architecture.name, _variant(case), *(f"{nbytes / 1024:,.0f}" for nbytes in numbers)]
    return f"| {' | '.join(cells)} | {share(stats):.1%} |"


def committed() -> tuple[str, dict[tuple[str, str], str]]:
    """The line above the page's table, and the table's own by model and variant."""
    above, _, *lines = _table(PAGE.read_text()).strip().splitlines()
    head, _, *lines = lines
    assert head == _HEAD
    cells = [[cell.strip() for cell in line.split("|")] for line in lines]
    return above, {(row[1], row[2]): line for row, line in zip(cells, lines, strict=True)}


def agree(first: str, second: str) -> bool:
    """Whether two lines say the same, but for a hundredth of what is saved: kernels differ among processors."""
    (*named, _), (*others, _) = ([cell.strip() for cell in one.strip("| ").split("|")] for one in (first, second))
    numbers, found = ([int(cell.replace(",", "")) for cell in cells[2:]] for cells in (named, others))
    least = max(numbers[0] // 100, 1)
    return named[:2] == others[:2] and all(abs(a - b) <= least for a, b in zip(numbers, found, strict=True))


def key(case: Case) -> tuple[str, str]:
    """Where ``committed`` has a case."""
    return case.architecture.name, _variant(case)


def write(lines: list[str]) -> None:
    """Puts a table in the place of the page's."""
    text = PAGE.read_text()
    ruler = "| --- | --- |" + " ---: |" * (_HEAD.count("|") - 3)
    table = "\n".join(["", made_with(), "", _HEAD, ruler, *lines, ""])
    PAGE.write_text(text.replace(_table(text), table))


def _variant(case: Case) -> str:
    name = case.variant.name
    return f"`{name}`" if re.search(r"[\"=]", name) else name


def _table(text: str) -> str:
    assert text.count(_BEGIN) == text.count(_END) == 1, f"{PAGE} has no one place for the table"
    assert text.count(_HEAD) == 1, f"{PAGE} has another table of this kind"
    return text.split(_BEGIN)[1].split(_END)[0]
