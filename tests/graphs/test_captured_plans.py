"""What a capture makes of the plans of its warm-ups: numbers."""

from __future__ import annotations

import pytest

from eager_offload.eager.warm_ups import WarmUp, check_alike, slot_bytes
from eager_offload.errors import CaptureStateError, ScheduleMismatchError
from eager_offload.stats import KeepReason
from eager_offload.step_plan import Ask, Fate, StepPlan


def warm_up(releases: list[int], order: list[int], *, nbytes: int = 100) -> WarmUp:
    """One forward whose saves leave one after the other, each a storage, and that asks for them in ``order``.

    Args:
        releases: before which save each source was seen to have gone, their number for the end of forward; -1: later.
    """
    step = WarmUp()
    recording = step.begin()
    for number in range(len(releases)):
        for earlier, release in enumerate(releases):
            if release == number:
                recording.released(earlier)
        recording.take(number, number, nbytes, True, nbytes, nbytes)
        recording.started(number)
    for number, release in enumerate(releases):
        if release == len(releases):
            recording.released(number)
    for number in order:
        recording.asked(number, number, (), (), False, None)
    return step


def fates(plan: StepPlan) -> list[Fate]:
    return [save.fate for save in plan.saves]


def test_what_backward_comes_to_before_its_source_would_go_stays() -> None:
    """A source goes before each unpack: the first ones do in time, the last ones are asked for too soon."""
    (plan,) = warm_up([-1] * 4, [3, 2, 1, 0]).plans()
    plan.check()
    assert fates(plan) == [Fate.OFFLOAD, Fate.OFFLOAD, Fate.KEEP, Fate.KEEP]
    assert plan.saves[2].reason is KeepReason.NEWEST
    assert [save.slot for save in plan.saves] == [0, 1, -1, -1]
    assert slot_bytes([plan]) == 256  # aligned
    (plan,) = warm_up([-1] * 4, [0, 1, 2, 3]).plans()
    assert fates(plan) == [Fate.KEEP, *[Fate.OFFLOAD] * 3]


def test_what_has_gone_in_forward_leaves() -> None:
    (plan,) = warm_up([1, 2, 3, -1], [3, 2, 1, 0]).plans()
    assert fates(plan) == [*[Fate.OFFLOAD] * 3, Fate.KEEP]


def test_forwards_of_one_step_share_the_slab() -> None:
    plans = [*warm_up([1, -1], [1, 0]).plans(), *warm_up([1, 2, -1], [2, 1, 0]).plans()]
    assert slot_bytes(plans) == 256
    assert slot_bytes([]) == 0


def test_a_step_of_which_nothing_is_asked_for_is_a_plan_in_which_nothing_moves() -> None:
    (plan,) = warm_up([-1, -1], []).plans()
    assert fates(plan) == [Fate.DECIDE] * 2
    assert not plan.slots
    assert WarmUp().plans() == ()


def test_what_no_plan_can_say_is_an_error() -> None:
    step = warm_up([-1], [0, 0])
    with pytest.raises(CaptureStateError, match="ran backward of a graph twice"):
        step.plans()


def test_warm_ups_that_are_not_alike_name_the_first_difference() -> None:
    before, after = (warm_up([-1] * count, [0]).plans() for count in (2, 3))
    check_alike(before, before)
    with pytest.raises(ScheduleMismatchError, match="save 2: the warm-up before the last had none, the last one has a"):
        check_alike(before, after)
    with pytest.raises(ScheduleMismatchError, match=r"save 0: .* 100 bytes, .* 50 bytes"):
        check_alike(before, warm_up([-1] * 2, [0], nbytes=50).plans())


def test_the_plan_of_a_step_says_what_is_asked_for_as_it_was() -> None:
    (plan,) = warm_up([1, -1], [1, 0]).plans()
    assert plan.asks == (Ask(1), Ask(0))


def test_what_has_gone_at_the_end_of_forward_leaves() -> None:
    """As a context inside of the step ends, which starts all that is left."""
    (plan,) = warm_up([1, 2, 4, 4], [3, 2, 1, 0]).plans()
    assert fates(plan) == [Fate.OFFLOAD] * 4
