"""The page of hazards names each of them once, and files whose tests carry its number; that on tuning each advice."""

from __future__ import annotations

import contextlib
import gc
import io
import re
from pathlib import Path

import pytest

import eager_offload as eo
from eager_offload.observe import advice
from eager_offload.runtime.host import host_runtime
from tests import hazards_page
from tests.docs.pages import ROOT
from tests.hazards.backends import transfer_threads
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


def test_what_the_page_shows_is_what_its_code_prints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Up to what timing decides, such as which bytes were still resident."""
    monkeypatch.chdir(tmp_path)
    # How long compute waits, and what comes too soon, is another thing each time on a busy machine.
    monkeypatch.setattr(advice, "_STALL", float("inf"))
    monkeypatch.setattr(advice, "_VAIN", float("inf"))
    page = (ROOT / "docs" / "tuning.md").read_text()
    names: dict[str, object] = {"__name__": "page"}
    compared = 0
    for language, body in re.findall(r"^```(\w+)\n(.*?)^```", page, re.MULTILINE | re.DOTALL):
        if language == "python":
            printed = io.StringIO()
            with contextlib.redirect_stdout(printed):
                exec(compile(body, "tuning.md", "exec"), names)
        elif language == "text":
            assert _lasting(printed.getvalue()) == _lasting(body)
            compared += 1
    assert compared == 5
    names.clear()
    gc.collect()  # its functions and its names refer to each other
    host_runtime().close()  # a user's program leaves it to the threads to end when they have had nothing to do for long
    assert transfer_threads() == []


def _lasting(printed: str) -> list[str]:
    """Of most lines, what they are about; of the first and of advice, all but what timing decides."""
    whole = ("peak saved", "nothing moved", " ", "saved", "advice")
    rows = re.compile(r" +(saves|\d[\d,-]*)  ")  # of a step plan: timing decides which are alike
    lines = [line for line in re.sub(r"\n {11}(?=\S)", " ", printed).splitlines() if not rows.match(line)]
    lines = [line if line.startswith(whole) else line.split()[0] for line in lines]
    timed = r"[\d.]+ \w+(?= of saved| \()|[+-]?\d+ %(?=\))|(?<=waited |talled )[\d.]+ %|[\d.]+ %(?= of a core)"
    return [re.sub(timed, "_", line) for line in lines]


def test_every_hazard_is_named_once_with_what_proves_it() -> None:
    numbers = hazards_page.ids()
    assert len(set(numbers)) == len(numbers)
    assert set(numbers) == hazards_page.proofs().keys()
    assert hazards_page.PAGE.read_text() == hazards_page.written(), "python -m tests.hazards_page writes it anew"
