"""What leaves, what comes back next, and the windows: numbers, against models that are too simple to be wrong."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from eager_offload.core.schedule import (
    PrefetchOrder,
    ResidentQueue,
    StepUses,
    auto_window,
    largest_of,
)

SIZE = st.integers(1, 8)


# -- what comes back next ---------------------------------------------------------------------------------------------


class Stored:
    """A storage, as the look-ahead knows it."""

    def __init__(self, name: int, nbytes: int) -> None:
        self.name, self.nbytes, self.is_gone = name, nbytes, False

    def __repr__(self) -> str:
        return f"storage {self.name}"


class Step:
    """One forward whose saves are of storages, each named by a number."""

    def __init__(self, order: PrefetchOrder, saves: list[tuple[int, int]]) -> None:
        self.order, self.uses = order, StepUses()
        self.storages = {name: Stored(name, nbytes) for name, nbytes in saves}
        self.saves = [self.uses.add(number, self.storages[name], nbytes) for number, (name, nbytes) in enumerate(saves)]

    def ask(self, number: int, backward: int = 0) -> tuple[list[int], list[int]]:
        """Asks for a save; the names of the storages that are brought, and of those that are dropped."""
        plan = self.order.ask(self.uses, self.saves[number], backward)
        return [one.name for one in plan.bring], [one.name for one in plan.drop]

    def let_go(self, name: int) -> None:
        self.storages[name].is_gone = True
        self.order.forget(self.storages[name])


@settings(max_examples=200)
@given(
    weights=st.lists(SIZE, min_size=1, max_size=8),
    limit=st.integers(0, 30),
    picks=st.lists(st.integers(0, 7), min_size=1, max_size=40),
)
def test_backward_in_reverse_finds_everything_that_fits_promised_and_nothing_further_ahead(
    weights: list[int], limit: int, picks: list[int]
) -> None:
    names = [pick % len(weights) for pick in picks]
    order = PrefetchOrder(limit)
    step = Step(order, [(name, weights[name]) for name in names])
    for number in reversed(range(len(names))):
        step.ask(number)
        if names[number] not in names[:number]:
            step.let_go(names[number])
        ahead: set[int] = set()
        for name in reversed(names[:number]):
            alone = limit > 0 and not ahead - {name}
            if sum(weights[one] for one in ahead | {name}) > limit and not alone:
                break
            ahead.add(name)
        assert {storage.name for storage in order.promised} == ahead
    assert order.promised_bytes == 0


def test_h19_promises_that_are_not_taken_up_are_given_up_once_they_are_overdue_and_room_is_needed() -> None:
    order, patience = PrefetchOrder(2), PrefetchOrder.PATIENCE
    earlier, later = Step(order, [(1, 1), (2, 1), (3, 1)]), Step(order, [(100 + name, 1) for name in range(40)])
    assert earlier.ask(2) == ([2, 1], [])
    for late in range(patience + 1):
        assert later.ask(39 - late) == ([], []), "they may come yet"
    assert {storage.name for storage in order.promised} == {1, 2}
    number = 39 - patience - 1
    assert later.ask(number) == ([100 + number - 1, 100 + number - 2], [2, 1])
    assert order.promised_bytes == 2


# -- windows ----------------------------------------------------------------------------------------------------------

MIB, GIB = 1 << 20, 1 << 30
SIZES = st.integers(0, 1 << 45)


@given(movable=SIZES, largest=SIZES, more=SIZES, device_bytes=st.none() | SIZES)
def test_a_window_grows_with_a_step_and_keeps_to_its_bounds(
    movable: int, largest: int, more: int, device_bytes: int | None
) -> None:
    window = auto_window(movable, largest, device_bytes)
    most = movable // 4 if device_bytes is None else min(movable // 4, device_bytes // 16)
    assert 1 <= window <= max(most, 1)
    assert window == max(most, 1) or window >= max(4 * largest, movable // 64, min(movable // 8, 256 * MIB))
    assert window <= auto_window(movable + more, largest, device_bytes)
    assert window <= auto_window(movable, largest + more, device_bytes)
    assert window <= auto_window(movable, largest)


@given(sizes=st.lists(SIZES))
def test_four_tensors_make_a_size_the_largest_and_fewer_do_not(sizes: list[int]) -> None:
    queue, size = ResidentQueue(0), largest_of(sizes)
    for number, one in enumerate(sizes):
        queue.push(number, one, number)
    assert (queue.movable, queue.largest) == (sum(sizes), size)
    assert sum(one > size for one in sizes) < 4
    assert size == 0 or sum(one >= size for one in sizes) >= 4
