"""The page of hazards names each of them once, and for each the files whose tests carry its number."""

from __future__ import annotations

import re

from tests.docs.pages import ROOT


def test_every_hazard_is_named_with_the_tests_that_prove_it() -> None:
    page = (ROOT / "docs" / "hazards.md").read_text()
    rows = re.findall(r"^\| H(\d\d) \|.*\| ([^|]+) \|$", page, re.MULTILINE)
    numbers = [number for number, _ in rows]
    assert len(set(numbers)) == len(numbers), "each once"
    assert set(numbers) >= {f"{number:02}" for number in range(1, 34)}
    for number, proof in rows:
        files = re.findall(r"`([^`]+)`", proof)
        assert files, f"H{number}"
        for file in files:
            tests = (ROOT / "tests" / file).read_text()
            assert re.search(rf"def test_\w*h{number}_", tests), f"no test of H{number} in {file}"
