"""What one step teaches the next, over numbers alone."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eager_offload.learning import Decision, Forward, ForwardRecord, LearnedForwards, Link

LINK = Link(out=10.0, back=5.0)  # ten bytes are away and back after three seconds


class Learner:
    """Runs forwards one after the other; each teaches the next when its graph is gone."""

    def __init__(self, link: Link | None = LINK) -> None:
        self.learned, self.link = LearnedForwards(), link
        self.records: list[ForwardRecord] = []
        self.left: list[ForwardRecord] = []
        self._sequence = 0

    def forward(self) -> Forward:
        while self.left:
            self.learned.learn(self.left.pop(0).log, self.link)
        self._sequence += 1
        forward = Forward(self._sequence, self.learned)
        record = ForwardRecord(forward, self.left.append)
        record.log = forward.log
        self.records.append(record)
        return forward

    def step(
        self, sizes: Sequence[int], asked: Sequence[int], *, alive: Sequence[int] = (), at: float = 100.0
    ) -> list[Decision]:
        """Saves at the seconds 0, 1, 2, ..., asks from second ``at`` on; what was decided for each save."""
        forward = self.forward()
        decisions = [forward.save(size, None, float(second), 0) for second, size in enumerate(sizes)]
        for number, decision in enumerate(decisions):
            if decision is not Decision.ALIVE:
                forward.positions[number] = 1000 + number
        for second, number in enumerate(number for number in asked if decisions[number] is not Decision.ALIVE):
            if number in alive:
                forward.was_alive(number)
            forward.asked(number, at + second)
        return decisions


def begun_like(learner: Learner, sizes: Sequence[int]) -> Forward:
    """A forward whose saves have been packed, under the positions 1001, 1002, ..."""
    forward = learner.forward()
    for number, size in enumerate(sizes):
        forward.save(size, None, float(number), 0)
        forward.positions[number] = 1001 + number
    return forward


# -- what stays and what leaves ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("asked", "at", "decisions"),
    [
        ([0, 1], 2.9, [Decision.STAY, Decision.STAY]),
        ([0, 1], 3.0, [Decision.LEAVE, Decision.STAY]),
        ([1, 0], 50.0, [Decision.LEAVE, Decision.LEAVE]),
        ([0], 0.0, [Decision.STAY, Decision.LEAVE]),  # what is never asked for
    ],
)
def test_what_is_asked_for_within_a_round_trip_stays_and_the_rest_leaves(
    asked: list[int], at: float, decisions: list[Decision]
) -> None:
    learner = Learner()
    learner.step([10, 20], asked, at=at)
    assert learner.step([10, 20], asked, at=at) == decisions


def test_a_storage_that_several_saves_share_is_asked_for_with_the_first_of_them() -> None:
    learner = Learner()
    for expected in (Decision.UNKNOWN, Decision.STAY):
        forward = learner.forward()
        assert forward.save(10, None, 0.0, 0) is expected
        assert forward.save(10, 0, 1.0, 0) is Decision.UNKNOWN, "it takes nothing"
        forward.asked(1, 2.0)
        forward.asked(0, 90.0)
        del forward


def test_what_someone_else_keeps_alive_is_not_taken_again_but_now_and_then_to_see() -> None:
    learner = Learner()
    decisions = [learner.step([10, 20], [1, 0], alive=[1])[1] for _ in range(40)]
    taken = [step for step, kind in enumerate(decisions) if kind is not Decision.ALIVE]
    assert taken[:2] == [0, 16]
    assert len(taken) == 3
    for _ in range(20):
        last = learner.step([10, 20], [1, 0])  # the program keeps it no more
    assert last[1] is Decision.LEAVE


def test_h21_what_was_alive_once_is_looked_at_again_though_every_step_ends_otherwise() -> None:
    learner = Learner()
    decisions = [learner.step([10, 20 + number], [1, 0], alive=[0] if number == 0 else [])[0] for number in range(40)]
    assert decisions[1:16] == [Decision.ALIVE] * 15
    assert Decision.ALIVE not in decisions[16:]


def test_two_models_that_begin_with_the_same_batch_are_told_apart() -> None:
    learner = Learner()
    for _ in range(2):
        learner.step([10, 20, 30], [2, 1, 0])
        learner.step([10, 20, 40, 50], [0, 1, 2, 3])
    assert learner.step([10, 20, 30], [2, 1, 0]) == [Decision.LEAVE] * 3
    forward = begun_like(learner, [10, 20, 40, 50])
    assert forward.asked(0, 100.0) == [1001, 1002, 1003, 1004]


# -- when it differs --------------------------------------------------------------------------------------------------


def test_h21_from_the_first_save_that_differs_nothing_is_known() -> None:
    learner = Learner()
    learner.step([10, 20, 30, 40], [3, 2, 1, 0])
    assert learner.step([10, 20, 31, 40], [3, 2, 1, 0]) == [Decision.LEAVE] * 2 + [Decision.UNKNOWN] * 2
    assert learner.step([11, 20, 31, 40], [3, 2, 1, 0]) == [Decision.UNKNOWN] * 4
    assert learner.step([10, 20, 31, 40], [3, 2, 1, 0]) == [Decision.LEAVE] * 4, "the others do not disturb it"


def test_h22_a_graph_that_was_dropped_or_saved_nothing_teaches_nothing() -> None:
    learner = Learner()
    learner.step([10, 20], [1, 0])
    learner.step([10, 99], [])
    learner.forward()
    assert learner.step([10, 20], [1, 0]) == [Decision.LEAVE] * 2


def test_h21_only_so_many_are_remembered_the_latest() -> None:
    learner = Learner()
    for size in range(1, 101):
        learner.step([size], [0])
    learner.forward()
    assert [one.sizes for one in learner.learned.all()] == [[size] for size in range(100, 92, -1)]


# -- the order of need ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sizes", "asked", "expected"),
    [
        # A second backward changes nothing.
        ([10, 20, 30], [0, 2, 1, 0], [[1001, 1003, 1002], None, None, None]),
        # The first one that is out of order brings the reverse of packing back.
        ([10, 20, 30], [0, 1, 2], [[1001, 1003, 1002], [1003, 1002, 1001], None]),
        # A step of another length or size is not expected in that order.
        ([10, 20], [0, 1], [None, None]),
        ([10, 20, 30, 40], [0, 1], [None, None]),
        ([10, 20, 31], [0, 1], [None, None]),
    ],
)
def test_a_step_like_the_last_is_expected_in_its_order(
    sizes: list[int], asked: list[int], expected: list[list[int] | None]
) -> None:
    learner = Learner()
    learner.step([10, 20, 30], [0, 2, 1])
    forward = begun_like(learner, sizes)
    assert [forward.asked(number, 100.0) for number in asked] == expected


def test_h20_what_half_a_backward_did_not_visit_is_not_expected() -> None:
    learner = Learner()
    learner.step([10, 20, 30], [2, 0])
    assert begun_like(learner, [10, 20, 30]).asked(2, 100.0) == [1003, 1001]


def test_an_order_leaves_out_what_is_alive_and_is_followed_whether_that_is_asked_for_or_not() -> None:
    learner = Learner()
    learner.step([10, 20, 30], [0, 2, 1], alive=[2])
    assert learner.step([10, 20, 30], [0, 1])[2] is Decision.ALIVE
    forward = begun_like(learner, [10, 20, 30])
    assert forward.asked(2, 99.0) is None, "of a look"
    assert forward.asked(0, 100.0) == [1001, 1002]
    assert forward.asked(1, 101.0) is None


@settings(max_examples=200)
@given(data=st.data(), steps=st.integers(1, 6))
def test_whatever_has_been_learnt_an_order_names_each_save_at_most_once_and_nothing_else(
    data: st.DataObject, steps: int
) -> None:
    learner = Learner()
    for _ in range(steps):
        sizes = data.draw(st.lists(st.integers(1, 2), min_size=1, max_size=4))
        forward, kept = learner.forward(), set()
        for number, size in enumerate(sizes):
            owner = data.draw(st.sampled_from([None, -1, *range(number)]))
            if forward.save(size, owner, float(number), 0) is Decision.ALIVE:
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


# -- logs and rates ---------------------------------------------------------------------------------------------------
