"""What one step teaches the next, over numbers alone."""

from __future__ import annotations

import gc
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eager_offload.learning import Advice, Forward, ForwardRecord, Lessons, Link
from eager_offload.schedule import Rate

LINK = Link(out=10.0, back=5.0)  # ten bytes are away and back after three seconds


class School:
    """Runs forwards one after the other; each teaches the next when its graph is gone."""

    def __init__(self, link: Link | None = LINK) -> None:
        self.lessons, self.link = Lessons(), link
        self.records: list[ForwardRecord] = []
        self.left: list[ForwardRecord] = []
        self._sequence = 0

    def forward(self) -> Forward:
        while self.left:
            self.lessons.learn(self.left.pop(0).notes, self.link)
        self._sequence += 1
        forward = Forward(self._sequence, self.lessons)
        record = ForwardRecord(forward, self.left.append)
        record.notes = forward.notes
        self.records.append(record)
        return forward

    def step(
        self, sizes: Sequence[int], asked: Sequence[int], *, alive: Sequence[int] = (), at: float = 100.0
    ) -> list[Advice]:
        """Saves at the seconds 0, 1, 2, ..., asks from second ``at`` on; what was advised for each save."""
        forward = self.forward()
        advice = [forward.save(size, None, float(second), 0) for second, size in enumerate(sizes)]
        for number, given_advice in enumerate(advice):
            if given_advice is not Advice.ALIVE:
                forward.positions[number] = 1000 + number
        for second, number in enumerate(number for number in asked if advice[number] is not Advice.ALIVE):
            if number in alive:
                forward.was_alive(number)
            forward.asked(number, at + second)
        return advice


def begun_like(school: School, sizes: Sequence[int]) -> Forward:
    """A forward whose saves have been packed, under the positions 1001, 1002, ..."""
    forward = school.forward()
    for number, size in enumerate(sizes):
        forward.save(size, None, float(number), 0)
        forward.positions[number] = 1001 + number
    return forward


# -- what stays and what leaves ---------------------------------------------------------------------------------------


def test_nothing_is_known_of_the_first_step() -> None:
    assert School().step([10, 20], [1, 0]) == [Advice.UNKNOWN] * 2


@pytest.mark.parametrize(("asked_at", "advice"), [(2.9, Advice.STAY), (3.0, Advice.LEAVE), (50.0, Advice.LEAVE)])
def test_what_is_asked_for_within_a_round_trip_stays_and_the_rest_leaves(asked_at: float, advice: Advice) -> None:
    school = School()
    school.step([10], [0], at=asked_at)
    assert school.step([10], [0], at=asked_at) == [advice]


def test_bytes_that_leave_before_it_make_the_round_trip_longer() -> None:
    school = School()
    for expected in (Advice.UNKNOWN, Advice.STAY):
        forward = school.forward()
        assert forward.save(10, None, 0.0, 40) is expected
        forward.asked(0, 6.9)  # 4 seconds in the queue, 1 out, 2 back
        del forward


def test_a_storage_that_several_saves_share_is_asked_for_with_the_first_of_them() -> None:
    school = School()
    for expected in (Advice.UNKNOWN, Advice.STAY):
        forward = school.forward()
        assert forward.save(10, None, 0.0, 0) is expected
        assert forward.save(10, 0, 1.0, 0) is Advice.UNKNOWN, "it takes nothing"
        forward.asked(1, 2.0)
        forward.asked(0, 90.0)
        del forward


def test_what_is_never_asked_for_leaves() -> None:
    school = School()
    school.step([10, 20], [0], at=0.0)
    assert school.step([10, 20], [0]) == [Advice.STAY, Advice.LEAVE]


def test_nothing_is_said_of_times_where_no_link_is_known() -> None:
    school = School(link=None)
    school.step([10, 20], [1, 0], alive=[1])
    assert school.step([10, 20], [1, 0]) == [Advice.UNKNOWN, Advice.ALIVE]


def test_what_someone_else_keeps_alive_is_not_taken_again_but_now_and_then_to_see() -> None:
    school = School()
    advice = [school.step([10, 20], [1, 0], alive=[1])[1] for _ in range(40)]
    taken = [step for step, kind in enumerate(advice) if kind is not Advice.ALIVE]
    assert taken[:2] == [0, 16]
    assert len(taken) == 3
    for _ in range(20):
        last = school.step([10, 20], [1, 0])  # the program keeps it no more
    assert last[1] is Advice.LEAVE


def test_what_was_alive_once_is_looked_at_again_though_nothing_else_is_ever_asked_for() -> None:
    school = School()
    first = school.step([10, 10], [1, 0], alive=[0, 1])
    later = [school.step([10, 10], [1, 0]) for _ in range(40)]
    assert first == [Advice.UNKNOWN] * 2
    assert later[:15] == [[Advice.ALIVE] * 2] * 15
    assert later[15] == [Advice.UNKNOWN] * 2, "a look"
    assert later[16:] == [[Advice.LEAVE] * 2] * 24


def test_h21_what_was_alive_once_is_looked_at_again_though_every_step_ends_otherwise() -> None:
    school = School()
    advice = [school.step([10, 20 + number], [1, 0], alive=[0] if number == 0 else [])[0] for number in range(40)]
    assert advice[1:16] == [Advice.ALIVE] * 15
    assert Advice.ALIVE not in advice[16:]


def test_a_storage_that_was_taken_against_the_advice_is_looked_at() -> None:
    school = School()
    school.step([10, 20], [1, 0], alive=[0])
    forward = school.forward()
    assert forward.save(10, None, 0.0, 0) is Advice.ALIVE
    forward.taken(0)
    forward.save(20, None, 1.0, 0)
    forward.asked(1, 100.0)
    forward.asked(0, 101.0)
    del forward
    assert school.step([10, 20], [1, 0])[0] is Advice.LEAVE


def test_two_models_that_begin_with_the_same_batch_are_told_apart() -> None:
    school = School()
    for _ in range(2):
        school.step([10, 20, 30], [2, 1, 0])
        school.step([10, 20, 40, 50], [0, 1, 2, 3])
    assert school.step([10, 20, 30], [2, 1, 0]) == [Advice.LEAVE] * 3
    forward = begun_like(school, [10, 20, 40, 50])
    assert forward.asked(0, 100.0) == [1001, 1002, 1003, 1004]


# -- when it differs --------------------------------------------------------------------------------------------------


def test_h21_from_the_first_save_that_differs_nothing_is_known() -> None:
    school = School()
    school.step([10, 20, 30, 40], [3, 2, 1, 0])
    assert school.step([10, 20, 31, 40], [3, 2, 1, 0]) == [Advice.LEAVE] * 2 + [Advice.UNKNOWN] * 2
    assert school.step([11, 20, 31, 40], [3, 2, 1, 0]) == [Advice.UNKNOWN] * 4
    assert school.step([10, 20, 31, 40], [3, 2, 1, 0]) == [Advice.LEAVE] * 4, "the others do not disturb it"


def test_a_longer_step_follows_as_far_as_it_goes_and_a_storage_shared_otherwise_differs() -> None:
    school = School()
    school.step([10, 20], [1, 0])
    assert school.step([10, 20, 30], [2, 1, 0]) == [Advice.LEAVE, Advice.LEAVE, Advice.UNKNOWN]
    forward = school.forward()
    assert forward.save(10, None, 0.0, 0) is Advice.LEAVE
    forward.save(20, 0, 1.0, 0)
    assert forward.save(30, None, 2.0, 0) is Advice.UNKNOWN


def test_h22_a_graph_that_was_dropped_or_saved_nothing_teaches_nothing() -> None:
    school = School()
    school.step([10, 20], [1, 0])
    school.step([10, 99], [])
    school.forward()
    assert school.step([10, 20], [1, 0]) == [Advice.LEAVE] * 2


def test_h21_only_so_many_lessons_are_remembered_the_latest() -> None:
    school = School()
    for size in range(1, 101):
        school.step([size], [0])
    school.forward()
    assert len(school.lessons) == 8
    assert [lesson.sizes for lesson in school.lessons.all()] == [[size] for size in range(100, 92, -1)]


# -- the order of need ------------------------------------------------------------------------------------------------


def test_a_step_like_the_last_is_expected_in_its_order() -> None:
    school = School()
    school.step([10, 20, 30], [0, 2, 1])
    forward = begun_like(school, [10, 20, 30])
    assert forward.asked(0, 100.0) == [1001, 1003, 1002]
    assert forward.asked(2, 101.0) is None
    assert forward.asked(1, 102.0) is None
    assert forward.asked(0, 103.0) is None, "a second backward changes nothing"


def test_the_first_unpack_out_of_order_brings_the_reverse_of_packing_back() -> None:
    school = School()
    school.step([10, 20, 30], [0, 2, 1])
    forward = begun_like(school, [10, 20, 30])
    forward.asked(0, 100.0)
    assert forward.asked(1, 101.0) == [1003, 1002, 1001]
    assert forward.asked(2, 102.0) is None


@pytest.mark.parametrize("sizes", [[10, 20], [10, 20, 30, 40], [10, 20, 31]])
def test_a_step_of_another_length_or_size_is_not_expected_in_that_order(sizes: list[int]) -> None:
    school = School()
    school.step([10, 20, 30], [0, 2, 1])
    forward = begun_like(school, sizes)
    for number in (0, 1):
        assert forward.asked(number, 100.0) is None


def test_h20_what_half_a_backward_did_not_visit_is_not_expected() -> None:
    school = School()
    school.step([10, 20, 30], [2, 0])
    assert begun_like(school, [10, 20, 30]).asked(2, 100.0) == [1003, 1001]


def test_an_order_leaves_out_what_is_alive_and_is_followed_whether_that_is_asked_for_or_not() -> None:
    school = School()
    school.step([10, 20, 30], [0, 2, 1], alive=[2])
    assert school.step([10, 20, 30], [0, 1])[2] is Advice.ALIVE
    forward = begun_like(school, [10, 20, 30])
    assert forward.asked(2, 99.0) is None, "of a look"
    assert forward.asked(0, 100.0) == [1001, 1002]
    assert forward.asked(1, 101.0) is None


def test_saves_that_come_after_backward_has_begun_leave_the_order_as_it_is() -> None:
    school = School()
    school.step([10, 20, 30], [0, 2, 1])
    forward = begun_like(school, [10, 20, 30])
    assert forward.asked(0, 100.0) == [1001, 1003, 1002]
    forward.save(99, None, 101.0, 0)  # in a backward that makes a graph of its own
    forward.positions[3] = 1004
    assert forward.asked(3, 102.0) is None
    assert forward.asked(2, 103.0) is None
    assert forward.asked(1, 104.0) is None


def test_a_forward_is_over_when_all_that_has_a_handle_was_asked_for() -> None:
    school = School()
    forward = begun_like(school, [10, 20])
    forward.save(30, None, 2.0, 0)  # which stays
    assert not forward.is_over
    forward.asked(0, 100.0)
    assert not forward.is_over
    forward.asked(1, 101.0)
    assert forward.is_over


@settings(deadline=None, max_examples=200)
@given(data=st.data(), steps=st.integers(1, 6))
def test_whatever_has_been_learnt_an_order_names_each_save_at_most_once_and_nothing_else(
    data: st.DataObject, steps: int
) -> None:
    school = School()
    for _ in range(steps):
        sizes = data.draw(st.lists(st.integers(1, 2), min_size=1, max_size=4))
        forward, kept = school.forward(), set()
        for number, size in enumerate(sizes):
            owner = data.draw(st.sampled_from([None, -1, *range(number)]))
            if forward.save(size, owner, float(number), 0) is Advice.ALIVE:
                kept.add(number)
            else:
                forward.positions[number] = 1001 + number
        alive = [number for number in range(len(sizes)) if number not in kept]
        for number in data.draw(st.lists(st.sampled_from(alive), max_size=6)) if alive else []:
            if data.draw(st.booleans()):
                forward.was_alive(number)
            order = forward.asked(number, 50.0)
            if order is not None:
                named = [position for position in order if position]
                assert len(named) == len(set(named))
                assert set(named) <= {1001 + other for other in alive}
        del forward


# -- notes and rates --------------------------------------------------------------------------------------------------


def test_a_forward_leaves_its_notes_once_its_last_holder_lets_go() -> None:
    school = School()
    gc.disable()
    try:
        forward = begun_like(school, [10])
        handle = forward
        del forward
        assert not school.left
        del handle
        assert [left.notes.sizes for left in school.left] == [[10]]
    finally:
        gc.enable()


def test_a_rate_is_of_what_could_be_timed() -> None:
    rate = Rate()
    assert rate.value is None
    rate.add(50, None)
    assert rate.value is None
    rate.add(30, 2.0)
    rate.add(10, 2.0)
    assert rate.value == 10.0
    assert rate.nbytes == 90
