"""A module that takes far longer than it did is named, however slow the machine is."""

from __future__ import annotations

import pytest

from tests.budgets import overruns

TABLE = {"tests/test_slow.py": 20, "tests/test_long.py": 100, "tests/test_quick.py": 5}


@pytest.mark.parametrize(("slower", "budget"), [(0.5, 120), (1, 120), (4, 300)])
def test_a_module_past_its_budget_is_named_with_what_to_do(slower: float, budget: int) -> None:
    spent = {name: slower * seconds for name, seconds in TABLE.items()}
    spent |= {"tests/test_slow.py": budget, "tests/test_new.py": 75}
    assert overruns(spent, TABLE) == []
    new, slow = sorted(overruns({**spent, "tests/test_slow.py": budget + 1, "tests/test_new.py": 400}, TABLE))
    assert new.startswith("tests/test_new.py took 400 s, past its budget of ")
    assert slow.startswith(f"tests/test_slow.py took {budget + 1} s, past its budget of {budget} s: 3 times")
    assert "Make it cheaper" in slow
