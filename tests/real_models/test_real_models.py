"""Real architectures train to the same bits with offload and without, and nearly all that they save moves.

``table.md`` has the figures; ``python -m tests.real_models`` makes it anew.
"""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("transformers", reason="transformers is not installed")
pytest.importorskip("peft", reason="peft is not installed")

from tests.real_models import table
from tests.real_models.training import CASES, Case, measured

#: Of what a decoder saves, what may stay for no good reason.
MOST = 0.05


def is_quick(case: Case) -> bool:
    """Whether `make test` runs it."""
    return case.architecture.name in ("Llama", "GPT-2") and case.variant.name == "plain"


IN_EVERY_WAY = [
    pytest.param(case, id=str(case), marks=[] if is_quick(case) else [pytest.mark.long, pytest.mark.sampled(2)])
    for case in CASES
]

# With more, sums over threads differ from run to run: see ``table.md``.
pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("case", IN_EVERY_WAY)
def test_a_real_model_trains_to_the_same_bits_and_its_line_in_the_table_holds(case: Case, tmp_path: Path) -> None:
    pytest.importorskip(case.architecture.package)
    stats = measured(case, tmp_path)
    if case.architecture.decodes and not case.variant.holds:
        assert table.share(stats) < MOST, f"too much stays\n{stats}"
    above, lines = table.committed()
    if above == table.made_with():
        here, there = table.numbers(stats), lines[table.key(case)]
        most = there[0] // 100 + 1  # kernels differ among processors
        told = f"make the table anew (python -m tests.real_models): {here} in place of {there}"
        assert all(abs(one - other) <= most for one, other in zip(here, there, strict=True)), told


def test_the_table_has_a_line_for_each_case_and_the_page_one_for_each_model() -> None:
    assert [*table.committed()[1]] == [table.key(case) for case in CASES]
    assert table.PAGE.read_text() == table.page(), "python -m tests.real_models writes it anew"
