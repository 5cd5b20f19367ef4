"""Pages say what the code, the tests and the files of results say."""

from __future__ import annotations

import json
import re

import pytest

import eager_offload as eo
from eager_offload.observe import advice
from tests import hazards_page
from tests.docs.pages import ROOT
from tests.observe.test_advice import FELL, OF_MEMORY, SAYS, advice_of, said


def test_every_piece_of_advice_is_there_in_its_own_words() -> None:
    page = (ROOT / "docs" / "tuning.md").read_text()
    documented = re.findall(r'^\| "([^"]+)"', page, re.MULTILINE)
    otherwise = re.findall(r'"([^"]+)"', page.partition("nothing else is to be said")[2])
    assert len(otherwise) == 1
    others = (advice.advise(eo.OffloadStats(), eo.OffloadConfig(enabled=enabled)) for enabled in (True, False))
    memory = (advice_of(*run[:3])[:1] for run in OF_MEMORY)
    pieces = {piece for found in (*(said(*run[:2]) for run in SAYS), *others, *memory, (FELL,)) for piece in found}
    known = {words: {piece for piece in pieces if words in piece} for words in documented + otherwise}
    assert all(known.values())
    assert pieces == set().union(*known.values())


def test_every_hazard_is_named_once_with_what_proves_it() -> None:
    numbers = hazards_page.ids()
    assert len(set(numbers)) == len(numbers)
    assert set(numbers) == hazards_page.proofs().keys()
    assert hazards_page.PAGE.read_text() == hazards_page.written(), "python -m tests.hazards_page writes it anew"


@pytest.mark.parametrize(
    ("file", "limit", "quoted"),
    [
        ("hooks", "offloaded, host, 64KiB: us", "that is {:.0f} microseconds for a tensor"),
        ("hooks", "followed, host, 64KiB: us", "{:.0f} in one that follows a plan"),
        ("hooks", "kept, parameter: us above the pair", "{:.1f} to 1.9 for one that stays"),
        ("hooks", "kept, small: us above the pair", "1.2 to {:.1f} for one that stays"),
        ("hooks", "offloaded, 50000 alive, of what it is with 1000", "each costs {:.1f} to 1.2 of what it costs"),
        ("hooks", "followed, 50000 alive, of what it is with 1000", "each costs 1.1 to {:.1f} of what it costs"),
        ("cpu_train", "offload, huge pages: time to default malloc", "both took {:.2f} of one without"),
        ("cpu_train", "offload, huge pages: memory", "at {:.2f} of the activation memory"),
    ],
)
def test_a_number_of_when_it_pays_is_that_of_the_result_file(file: str, limit: str, quoted: str) -> None:
    limits = json.loads((ROOT / "benchmarks" / "results" / f"{file}.json").read_text())["limits"]
    (measured,) = (one["measured"] for one in limits if one["what"] == limit)
    assert quoted.format(measured) in " ".join((ROOT / "docs" / "when_it_pays.md").read_text().split())
