"""A step by hand: when copies start and end, when compute waits, which bytes live."""

from __future__ import annotations

from eager_offload.machine import Machine
from eager_offload.planning.predict import Problem
from eager_offload.planning.program import Op, Program, Storage
from tests.planning.programs import chain


def test_what_stays_lives_from_its_operator_until_backward_drops_it() -> None:
    assert chain([1, 2, 4]).predict((False,) * 3) == (9.0, 7, 0)


def test_a_copy_takes_its_time_on_the_link_and_its_bytes_live_until_it_is_over() -> None:
    # Two bytes a second: the copy of 6 bytes takes 3 s, out during operators 0 to 2, back from the start of backward.
    problem = chain([6, 1, 1, 1], link=2.0)
    found = problem.predict((True, False, False, False))
    assert found.step_seconds == problem.compute_seconds == 12.0
    assert found.moved_bytes == 6
    assert found.peak_bytes == 9, "6, 1 and 1 until it has left; when backward begins it comes back beside the other 3"


def test_compute_waits_for_room_in_the_window() -> None:
    problem = chain([4, 4, 1], link=1.0, window=4)
    free = chain([4, 4, 1], link=1.0, window=8)
    moves = (True, True, False)
    # The second copy may start at 4 s in place of 1 s; it is over at 8 s, backward at 6 s finds it still here.
    assert problem.predict(moves).step_seconds > free.predict(moves).step_seconds


def test_compute_waits_for_what_comes_back_too_late() -> None:
    # 4 bytes at one a second: away from 0 s to 4 s; backward begins at 8 s, and asks for it after 2 s.
    storage = Storage(4, 4, 0, 0, 1, 0, 9, 10)
    program = Program(("",), (Op("mul", 0, 0, 1, True),) * 10, 8, (), (), (storage,), (0,) * 10)
    problem = Problem(program, [1.0] * 8 + [2.0] * 2, 1.0, 1.0, 100, 100)
    assert problem.predict((True,)).step_seconds == 12.0 + 2.0


def test_what_is_asked_for_before_its_copy_is_over_stays() -> None:
    problem = chain([100], link=1.0)
    assert problem.predict((True,)) == (3.0, 100, 0)
    assert problem.course((True,)) == (3.0, (100, 100), (), None, None)


def test_the_floor_is_the_longer_of_compute_and_transfers_in_each_half() -> None:
    problem = chain([10] * 4, link=8.0)
    assert problem.floor_seconds(0) == problem.compute_seconds == 12.0
    assert problem.floor_seconds(40) == 5.0 + 8.0


def test_an_operator_takes_as_long_as_its_operations_or_its_bytes_or_its_launch() -> None:
    machine = Machine("m", flops=100.0, single_flops=10.0, memory=5.0, launch_seconds=0.25)
    assert machine.seconds(1000, 5) == 10.0
    assert machine.seconds(1000, 5, single=True) == 100.0
    assert machine.seconds(0, 50) == 10.0
    assert machine.seconds(0, 1) == 0.25
    assert machine.seconds(0, 0) == 0.0
