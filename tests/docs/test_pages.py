"""Pages say what the code, the tests and the files of results say."""

from __future__ import annotations

import json

import pytest

from tests import hazards_page
from tests.docs.pages import ROOT


def test_every_hazard_is_named_once_with_what_proves_it() -> None:
    numbers = hazards_page.ids()
    assert len(set(numbers)) == len(numbers)
    assert set(numbers) == hazards_page.proofs().keys()
    assert hazards_page.PAGE.read_text() == hazards_page.written(), "python -m tests.hazards_page writes it anew"
    assert all((hazards_page.TESTS / file).is_file() for files in hazards_page.proofs().values() for file in files)


@pytest.mark.parametrize(
    ("file", "limit", "quoted"),
    [
        ("hooks", "offloaded, host, 64KiB: us", "that is {:.0f} microseconds for a tensor"),
        ("hooks", "followed, host, 64KiB: us", "{:.0f} in one that repeats"),
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
