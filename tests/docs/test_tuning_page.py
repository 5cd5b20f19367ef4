"""The page on tuning knows every piece of advice that there is, in its words and its order."""

from __future__ import annotations

import inspect
import re

from eager_offload.observe.advice import RULES
from tests.docs.pages import ROOT


def test_every_rule_is_in_the_table_in_its_own_words() -> None:
    page = (ROOT / "docs" / "tuning.md").read_text()
    told = re.findall(r'^\| "([^"]+)"', page, re.MULTILINE)
    assert len(told) == len(RULES)
    for words, rule in zip(told, RULES, strict=True):
        source = re.sub(r"[\"']\s*\n\s*f?[\"']", "", inspect.getsource(rule))
        assert words in source, (words, rule.__name__)
