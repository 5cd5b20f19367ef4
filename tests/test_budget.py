"""The controller of ``device_budget`` and ``policy``, and the rule by pace: numbers, against models of a device."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from eager_offload.core.budget import Controller, StepClass, Timeline, hidden, share

PART = st.floats(0.0, 1.0)


SECONDS = st.floats(0, 8, width=16)


@st.composite
def timelines(draw: st.DrawFn) -> Timeline:
    """A step of which backward begins after 8 seconds, and asks in any order."""
    nbytes = draw(st.lists(st.integers(1, 100), min_size=1, max_size=12))
    final, asked = ([draw(SECONDS) for _ in nbytes] for _ in range(2))
    unpacks = sorted(range(len(nbytes)), key=asked.__getitem__)
    rates = [draw(st.sampled_from([0.5, 8.0, 100.0])) for _ in range(2)]
    windows = [draw(st.integers(1, 300)) for _ in range(2)]
    first = draw(st.sets(st.sampled_from(unpacks)))
    return Timeline(nbytes, final, [8 + one for one in asked], unpacks, 8.0, 16.0, *rates, *windows, first)


def moved(step: Timeline, moves: list[bool]) -> int:
    return sum(nbytes for nbytes, one in zip(step.nbytes, moves, strict=True) if one)


@given(timelines(), PART, PART)
def test_a_share_is_the_least_that_is_not_less_and_less_is_a_part_of_more(
    step: Timeline, one: float, other: float
) -> None:
    fractions = sorted([one, other])
    some, more = (share(step, fraction) for fraction in fractions)
    assert all(a <= b for a, b in zip(some, more, strict=True))
    for fraction, moves in zip(fractions, (some, more), strict=True):
        due, found = fraction * sum(step.nbytes), moved(step, moves)
        assert due - 0.5 <= found < due + max(step.nbytes) + 0.5
        others = [one for number, one in enumerate(moves) if number not in step.first]
        assert all(moves[number] for number in step.first) or not any(others)
    assert not any(share(step, 0.0))
    assert all(share(step, 1.0))


@given(timelines())
def test_the_share_that_a_link_hides_is_what_it_hides(step: Timeline) -> None:
    step, moves = replace(step, first=()), hidden(step)
    assert share(step, moved(step, moves) / sum(step.nbytes)) == moves


def test_of_like_storages_a_share_is_spread_and_those_that_are_late_stay() -> None:
    """Backward asks in reverse, at the pace of forward."""
    count = 100
    times = [float(number) for number in range(count)]
    step = Timeline(
        [10] * count, times, [200 - one for one in times], range(count)[::-1], 100.0, 200.0, 10.0, 10.0, 40, 40
    )
    moves = share(step, 0.5)
    assert moved(step, moves) == 500
    assert 20 <= sum(moves[:50]) <= 30, "forward has work for the link all along"
    assert not any(share(step, 0.9)[-2:]), "what backward begins with stays"
    assert moved(step, hidden(step)) >= 900, "a link as fast as compute hides nearly all"


def test_two_steps_in_a_row_that_stall_reduce_what_is_free_by_a_quarter_and_one_does_not() -> None:
    controller, kind, other = Controller(None, 1.0, is_free=True), StepClass(), StepClass()
    controller.observe_waits(kind, 1.0, 0.5)
    assert controller.fraction(kind) == 1.0, "it is not decided yet"
    controller.decide(kind, 0.8)
    for part in (0.03, 0.01, 0.03):
        controller.observe_waits(kind, 0.8, part)
    controller.observe_waits(kind, 1.0, 0.03)  # which was begun before it was decided
    assert controller.fraction(kind) == 0.8
    controller.observe_waits(kind, 0.8, 0.03)
    assert (
        controller.fraction(kind)
        == controller.fraction(other)
        == controller.fixed().fraction(StepClass())
        == 0.8 * 0.75
    )
    assert controller.slowdown == 0.03
