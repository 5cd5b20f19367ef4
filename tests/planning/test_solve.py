"""What is decided against every decision that there is, and against what no decision goes below."""

from __future__ import annotations

import pytest
from hypothesis import given, settings

from eager_offload.planning.predict import Problem
from eager_offload.planning.program import Op, Program, Storage
from eager_offload.planning.solve import Solver
from tests.planning.programs import assert_near_the_best, chain, every_decision, least_moved, problems


@settings(max_examples=25, derandomize=True, deadline=None, database=None)
@given(problems(6))
def test_a_decision_is_within_two_percent_of_the_best_of_all_that_fit_and_never_over_the_budget(
    problem: Problem,
) -> None:
    assert_near_the_best(Solver(problem), every_decision(problem))


@pytest.mark.long
@settings(max_examples=100, derandomize=True, deadline=None, database=None)
@given(problems(8))
def test_a_decision_among_more_is_within_two_percent_of_the_best_too(problem: Problem) -> None:
    assert_near_the_best(Solver(problem), every_decision(problem))


@settings(max_examples=30, derandomize=True, deadline=None, database=None)
@given(problems())
def test_what_is_free_makes_no_step_longer_and_is_as_much_as_can_be(problem: Problem) -> None:
    every = every_decision(problem)
    found = Solver(problem).free().prediction
    assert found.step_seconds == pytest.approx(problem.compute_seconds, rel=1e-9)
    hidden = [one.moved_bytes for one in every if one.step_seconds <= problem.compute_seconds * (1 + 1e-9)]
    assert found.moved_bytes >= 0.9 * max(hidden)


def blocks(count: int, each: int, ratio: float) -> Problem:
    """Storages of varying sizes, in operators of varying length; with ``ratio`` times what the link carries."""
    size = count * each
    nbytes = [50 + 37 * number % 101 for number in range(size)]
    seconds = [0.5 + (29 * number % 101) / 100 for number in range(size)]
    storages = tuple(
        Storage(nbytes[made], nbytes[made], 0, made, made + 1, made, 2 * size - 1 - made, 2 * size - made)
        for made in range(size)
    )
    program = Program(("",), (Op("mul", 0, 0, 1, True),) * (2 * size), size, (), (), storages, (0,) * (2 * size))
    link = 100 / ratio
    times = [*seconds, *(2 * one for one in reversed(seconds))]
    return Problem(program, times, link, link, 1000, 1000)


@pytest.mark.parametrize(
    ("ratio", "part"),
    [(2.5, 3), *(pytest.param(*one, marks=pytest.mark.long) for one in ((1.0, 4), (2.5, 10), (4.0, 2), (4.0, 10)))],
)
def test_among_1500_storages_a_decision_is_within_three_percent_of_what_none_goes_below(
    ratio: float, part: int
) -> None:
    problem = blocks(100, 15, ratio)
    solver = Solver(problem)
    nothing = problem.predict((False,) * 1500).peak_bytes
    budget = nothing // part
    found = solver.within(budget).prediction
    moved = least_moved(problem, budget)
    assert found.peak_bytes <= budget
    assert problem.floor_seconds(moved) <= found.step_seconds <= 1.03 * problem.floor_seconds(moved)
    assert found.moved_bytes <= 1.03 * moved


def test_where_everything_fits_nothing_moves_and_a_byte_less_moves_what_it_takes() -> None:
    problem = chain([10] * 6, ahead=10)
    solver = Solver(problem)
    assert solver.within(60).prediction == (18.0, 60, 0)
    found = solver.within(59)
    assert found.prediction.moved_bytes == 20, "one of them comes back when backward begins"
    assert found.prediction.peak_bytes == 50
    assert not found.moves[-1], "backward asks for the newest at once"


def test_a_link_that_never_keeps_up_has_compute_wait_and_one_that_does_is_free() -> None:
    slow, fast = chain([10] * 4, link=1.0, window=10, ahead=10), chain([10] * 4, link=100.0)
    everything = (True,) * 4
    assert slow.predict(everything).step_seconds > 3 * slow.compute_seconds
    assert fast.predict((True, True, True, False)).step_seconds == fast.compute_seconds == 12.0
    assert Solver(slow).free().prediction.moved_bytes < Solver(fast).free().prediction.moved_bytes == 30


def test_the_same_problem_is_solved_alike() -> None:
    problem = blocks(4, 5, 2.0)
    budget = problem.predict((False,) * 20).peak_bytes // 2
    assert Solver(problem).within(budget) == Solver(problem).within(budget)
