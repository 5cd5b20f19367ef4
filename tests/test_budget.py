"""The controller of ``device_budget``, ``policy`` and ``max_slowdown``: numbers, against models of a device."""

from __future__ import annotations

from statistics import mode

from hypothesis import given, settings
from hypothesis import strategies as st

from eager_offload.budget import Controller, Kind, Timeline, hidden, share

GIB = 1 << 30
PART = st.floats(0.0, 1.0)


SECONDS = st.floats(0, 8, width=16)


@st.composite
def timelines(draw: st.DrawFn) -> Timeline:
    """A step of which backward begins after 8 seconds, and asks in any order."""
    nbytes = draw(st.lists(st.integers(1, 100), min_size=1, max_size=12))
    final, asked = ([draw(SECONDS) for _ in nbytes] for _ in range(2))
    asks = sorted(range(len(nbytes)), key=asked.__getitem__)
    rates = [draw(st.sampled_from([0.5, 8.0, 100.0])) for _ in range(2)]
    windows = [draw(st.integers(1, 300)) for _ in range(2)]
    return Timeline(nbytes, final, [8 + one for one in asked], asks, 8.0, 16.0, *rates, *windows)


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
    assert not any(share(step, 0.0))
    assert all(share(step, 1.0))


@given(timelines())
def test_the_share_that_a_link_hides_is_what_it_hides(step: Timeline) -> None:
    moves = hidden(step)
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


class Device:
    """Peaks and waits of a step by the fraction that moves.

    Args:
        rest: bytes beside those that stay.
        hides: up to this fraction compute waits for nothing.
        slope: of what is waited beyond that.
    """

    def __init__(self, rest: int, movable: int, hides: float = 1.0, slope: float = 0.0) -> None:
        self.rest, self.movable, self.hides, self.slope = rest, movable, hides, slope

    def kept(self, fraction: float) -> int:
        return int((1 - fraction) * self.movable)

    def peak(self, fraction: float) -> int:
        return self.rest + self.kept(fraction)

    def waited(self, fraction: float) -> float:
        return max(fraction - self.hides, 0.0) * self.slope

    def step(self, controller: Controller, kind: Kind, growth: int = 0) -> float:
        """Trains one step; returns its fraction."""
        fraction = controller.fraction(kind)
        kept = self.kept(fraction)
        controller.observe_memory(kind, self.rest + kept, kept, self.movable, growth, is_exact=True)
        controller.observe_time(kind, fraction, self.waited(fraction), 1.0)
        return fraction


@given(rest=PART, movable=PART, hides=PART, slope=st.floats(0, 10), limit=st.none() | st.floats(0, 1))
def test_a_budget_holds_from_the_second_step_on_and_is_used(
    rest: float, movable: float, hides: float, slope: float, limit: float | None
) -> None:
    device = Device(int(rest * GIB * 0.9), int((0.01 + 4 * movable) * GIB), hides, slope)
    controller = Controller(GIB, limit)
    kind = controller.new_kind()
    assert device.step(controller, kind) == 1.0, "nothing is known yet"
    fractions = [device.step(controller, kind) for _ in range(60)]
    assert all(device.peak(fraction) <= GIB for fraction in fractions)
    if limit is None:
        assert len(set(fractions)) == 1
        needed = device.peak(fractions[-1]) + min(0.03 * GIB, device.movable / 8) >= GIB
        assert fractions[-1] <= 1 / 16 or needed, "no more moves than has to"


@given(growth=st.integers(0, GIB // 4), late=st.booleans())
def test_memory_that_grows_makes_more_move(growth: int, late: bool) -> None:
    device, controller = Device(GIB // 4, GIB), Controller(GIB, None)
    kind = controller.new_kind()
    for _ in range(4):
        device.step(controller, kind)
    device.step(controller, kind, 0 if late else growth)
    device.rest += growth
    if late:
        device.step(controller, kind)  # which shows it
    assert device.peak(device.step(controller, kind)) <= GIB


@settings(max_examples=300)
@given(hides=PART, slope=st.floats(0.05, 20), limit=st.floats(0, 0.5))
def test_the_most_that_moves_within_a_limit_is_found(hides: float, slope: float, limit: float) -> None:
    device, controller = Device(0, GIB, hides, slope), Controller(None, limit)
    kind, limit = controller.new_kind(), max(limit, 0.005)
    best = min(hides + limit / slope, 1.0)
    fractions = [device.step(controller, kind) for _ in range(60)]
    found = mode(fractions[-30:])  # more is tried now and then
    assert device.waited(found) <= limit or found - best <= 1 / 40, fractions
    assert best - found <= 1 / 20, fractions
    assert sum(fraction > best + 1 / 20 for fraction in fractions) <= 20, fractions


def test_a_wait_that_grows_is_noticed_and_more_is_tried_when_it_falls() -> None:
    device, controller = Device(0, GIB, hides=0.8, slope=1.0), Controller(None, 0.02)
    kind = controller.new_kind()
    for hides in (0.8, 0.4, 0.8):
        device.hides = hides
        found = mode([device.step(controller, kind) for _ in range(400)][-50:])
        assert hides - 0.05 <= found <= hides + 0.02 + 1 / 40
    assert controller.slowdown <= 0.02


def test_kinds_have_fractions_of_their_own_and_a_new_one_begins_where_the_last_one_is() -> None:
    short, long = Device(GIB // 4, GIB // 2, hides=0.5, slope=1.0), Device(GIB // 4, 2 * GIB, hides=0.3, slope=1.0)
    controller = Controller(GIB, 0.02)
    kinds = {short: controller.new_kind(), long: controller.new_kind()}
    for _ in range(40):
        found = {device: device.step(controller, kind) for device, kind in kinds.items()}
    assert found[long] > 0.6, "its budget asks for that, whatever is waited"
    assert 0.45 <= found[short] <= 0.55
    assert controller.fraction(controller.new_kind()) == 1.0, "the budget comes first"
    assert 0.45 <= controller.without_time().fraction(Kind()) <= 0.55


def test_a_peak_that_is_known_from_above_frees_nothing_and_fills_what_is_left() -> None:
    device, controller = Device(GIB // 2, GIB), Controller(GIB, None)
    kind = controller.new_kind()
    controller.observe_memory(kind, GIB * 3 // 4, 0, device.movable, 0, is_exact=False)
    fraction = controller.fraction(kind)
    assert 0.7 <= fraction <= 0.8
    controller.observe_memory(kind, GIB, device.kept(fraction), device.movable, 0, is_exact=False)
    assert controller.fraction(kind) == fraction
    controller.observe_memory(kind, GIB, device.kept(fraction), device.movable, GIB // 8, is_exact=False)
    assert controller.fraction(kind) == fraction + 1 / 8
