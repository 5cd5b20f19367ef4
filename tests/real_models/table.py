"""The table of all cases in ``table.md``, and the one of models in ``docs/models.md``: lines, versions, places."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

import peft
import torch
import transformers

from eager_offload import OffloadStats
from tests.real_models.training import Case

TABLE = Path(__file__).with_name("table.md")
PAGE = Path(__file__).parents[2] / "docs" / "models.md"
#: Why a saved tensor may stay without counting: too small to be worth it, held for good anyway, asked for at once.
EXCUSED = ("small", "parameter", "newest")

_COLUMNS = ("small", "parameter", "alive")
_HEAD = "| model | variant | saved | offloaded | shared | kept: small | parameter | alive | else | share |"
#: Of a model's plain row, what the page has.
_SHORT_HEAD = "| model | saved | offloaded | shared | small | parameter |"
_BEGIN, _END = "<!-- table: python -m tests.real_models -->", "<!-- end of table -->"


def made_with() -> str:
    """The line above a table that is made here and now; with other versions, other bytes may be saved."""
    release = torch.__version__.split("+")[0]
    frameworks = f"transformers {transformers.__version__} and peft {peft.__version__}"
    return f"Made with torch {release}, {frameworks}; KiB, of three steps together."


def share(stats: OffloadStats) -> float:
    """The part of the saved bytes that stays without an excuse."""
    return sum(nbytes for reason, nbytes in stats.kept_bytes.items() if reason not in EXCUSED) / stats.saved_bytes


def key(case: Case) -> tuple[str, str]:
    """A case's model and variant, as its line has them."""
    name = case.variant.name
    return case.architecture.name, f"`{name}`" if re.search(r"[\"=]", name) else name


def numbers(stats: OffloadStats) -> list[int]:
    """A case's numbers, in KiB."""
    kept = [stats.kept_bytes.get(reason, 0) for reason in _COLUMNS]
    rest = sum(stats.kept_bytes.values()) - sum(kept)
    return [round(one / 1024) for one in (stats.saved_bytes, stats.offloaded_bytes, stats.shared_bytes, *kept, rest)]


def committed() -> tuple[str, dict[tuple[str, str], list[int]]]:
    """The line above the table, and the table's numbers by model and variant."""
    above, _, head, _, *lines = _table(TABLE.read_text()).strip().splitlines()
    assert head == _HEAD
    rows = [[cell.strip() for cell in line.strip("| ").split("|")] for line in lines]
    return above, {(row[0], row[1]): [int(cell.replace(",", "")) for cell in row[2:-1]] for row in rows}


def write(measured: Iterable[tuple[Case, OffloadStats]]) -> None:
    """Puts a table in the place of the one that is there, and the models' rows on the page."""
    rows = [
        [*key(case), *(f"{number:,}" for number in numbers(stats)), f"{share(stats):.1%}"] for case, stats in measured
    ]
    TABLE.write_text(_with_table(TABLE.read_text(), made_with(), _HEAD, rows))
    PAGE.write_text(page())


def page() -> str:
    """The page with the first row of each model of the table."""
    above, lines = committed()
    first = dict(reversed(lines))
    rows = [
        [model if variant == "plain" else f"{model}, {variant}", *(f"{number:,}" for number in line[:5])]
        for (model, variant), line in lines.items()
        if first[model] == variant
    ]
    return _with_table(PAGE.read_text(), above, _SHORT_HEAD, rows)


def _with_table(text: str, above: str, head: str, rows: list[list[str]]) -> str:
    names = 2 if "variant" in head else 1
    ruler = "| --- " * names + "| ---: " * (head.count("|") - 1 - names) + "|"
    table = "\n".join(["", above, "", head, ruler, *(f"| {' | '.join(row)} |" for row in rows), ""])
    return table.join((text.split(_BEGIN)[0] + _BEGIN, _END + text.split(_END)[1]))


def _table(text: str) -> str:
    return text.split(_BEGIN)[1].split(_END)[0]
