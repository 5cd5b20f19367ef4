"""What a run leaves out, others take."""

from __future__ import annotations

import pytest

from tests.budgets import overruns
from tests.sampling import leave_out, one_in, search, spread

pytest_plugins = ["pytester"]
pytestmark = pytest.mark.filterwarnings("ignore:Unknown pytest.mark.sampled")  # where pytester collects
SAMPLED = """
import pytest

@pytest.mark.sampled(3)
@pytest.mark.parametrize("case", range(8))
def test_many(case):
    assert True

@pytest.mark.sampled(3, shift=1)
@pytest.mark.parametrize("case", range(8))
def test_others(case):
    assert True

@pytest.mark.sampled(3, quick=True)
@pytest.mark.parametrize("case", range(8))
def test_quickly(case):
    assert True

@pytest.mark.sampled(2, of="both")
def test_these():
    assert True

@pytest.mark.sampled(2, of="both")
def test_those():
    assert True

def test_one():
    assert True
"""


@pytest.fixture
def taken(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> object:
    """The names of the tests that a run of a seed takes."""
    items = pytester.getitems(SAMPLED)
    monkeypatch.delenv("TESTS_WHOLE", raising=False)

    def taken(seed: int, *named: str, marks: str = "not long and not gpu") -> set[str]:
        monkeypatch.setenv("TESTS_SEED", str(seed))
        left = list(items)
        out = leave_out(left, named, marks)
        assert {*left, *out} == {*items}
        return {item.name for item in left}

    return taken


def test_every_case_is_run_by_one_of_as_many_seeds_as_the_stride(taken: object) -> None:
    assert callable(taken)
    runs = [taken(seed) for seed in (5, 6, 7)]
    assert all("test_one" in run for run in runs)
    assert {"test_these", "test_those"} <= runs[0] | runs[1]
    assert all(len(run & {"test_these", "test_those"}) == 1 for run in runs), "of tests that are counted as one"
    sampled = [run - {"test_one", "test_these", "test_those"} for run in runs]
    assert sum(map(len, sampled)) == len(set.union(*sampled)) == 24
    for run in sampled:
        many, others = ({name[-2] for name in run if name.startswith(f"test_{kind}")} for kind in ("many", "others"))
        assert not many & others, "a shift takes other cases"


def test_whoever_names_a_test_or_asks_for_all_gets_all_cases(taken: object, monkeypatch: pytest.MonkeyPatch) -> None:
    assert callable(taken)
    assert len(taken(0, "tests/test_many.py::test_many")) == 27
    monkeypatch.setenv("TESTS_WHOLE", "1")
    assert len(taken(0)) == 27
    assert list(one_in(4, range(10))) == list(spread(2, range(10))) == list(range(10))


def test_what_is_sampled_in_the_quick_suite_is_whole_in_the_long_one(
    taken: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert callable(taken)
    run = taken(0, marks="not gpu and not short")
    counts = [sum(name.startswith(f"test_{kind}") for name in run) for kind in ("many", "others", "quickly")]
    assert counts == [3, 3, 8]
    assert sum(name.startswith("test_quickly") for name in taken(0)) == 3
    monkeypatch.setenv("TESTS_QUICK", "0")
    assert sum(name.startswith("test_quickly") for name in taken(0)) == 8


def test_values_are_spread_and_each_has_its_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TESTS_WHOLE", raising=False)
    seen = set()
    for seed in range(4):
        monkeypatch.setenv("TESTS_SEED", str(seed))
        chosen = spread(3, range(10))
        assert 2 <= len(chosen) <= 3
        seen |= {*chosen}
    assert seen == {*range(10)}
    assert list(spread(3, range(3))) == [0, 1, 2]


def test_a_search_is_the_same_in_every_run_up_to_the_fresh_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    from hypothesis import strategies as st

    def searched(seed: int, seconds: float) -> list[int]:
        monkeypatch.setenv("TESTS_SEED", str(seed))
        seen: list[int] = []

        def check(number: int) -> None:
            seen.append(number)

        search(check, st.integers(), fixed=20, seconds=seconds)
        return seen

    first, fresh, others = searched(1, 0), searched(1, 0.01), searched(2, 0.01)
    assert fresh[: len(first)] == others[: len(first)] == first
    assert len(fresh) > len(first) < len(others)
    assert fresh[len(first) :][:10] != others[len(first) :][:10]


def test_a_module_past_its_budget_is_named() -> None:
    spent = {"tests/test_slow.py": 90.1, "tests/test_long.py": 329.0, "tests/test_quick.py": 29.0}
    (sentence,) = overruns(spent, {"tests/test_slow.py": 20, "tests/test_long.py": 100})
    assert sentence.startswith("tests/test_slow.py took 90 s, and its budget is 90 s")
