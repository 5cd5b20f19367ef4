"""What comes back next: the prefetch order against a model that is too simple to be wrong."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from eager_offload.schedule import Prefetch, PrefetchOrder
from tests.test_schedule import is_empty

SIZE = st.integers(1, 8)
STEPS = settings(max_examples=120, stateful_step_count=40)


class Use(NamedTuple):
    """A save, as the model knows it."""

    storage: int
    sequence: int


class PrefetchMachine(RuleBasedStateMachine):
    """Saves, unpacks and handles that go, in any order; ``resident`` does what the plans say."""

    @initialize(limit=st.integers(0, 20))
    def begin(self, limit: int) -> None:
        self.order, self.limit = PrefetchOrder(limit), limit
        self.weights: dict[int, int] = {}
        self.uses: dict[int, Use] = {}
        self.resident: set[int] = set()
        self.position = 0
        self.walks: int | None = None

    @rule(nbytes=SIZE, sequence=st.integers(1, 3))
    def save_a_new_storage(self, nbytes: int, sequence: int) -> None:
        storage = 1000 + len(self.weights)
        self.weights[storage] = nbytes
        self._save(storage, sequence)

    @precondition(lambda self: self.uses)
    @rule(data=st.data(), sequence=st.integers(1, 3))
    def save_a_storage_again(self, data: st.DataObject, sequence: int) -> None:
        self._save(data.draw(st.sampled_from(sorted({use.storage for use in self.uses.values()}))), sequence)

    def _save(self, storage: int, sequence: int) -> None:
        self.position += 1
        self.uses[self.position] = Use(storage, sequence)
        self.order.add(self.position, storage, self.weights[storage], sequence)

    @precondition(lambda self: self.uses)
    @rule(data=st.data(), newest=st.booleans(), goes=st.booleans())
    def ask(self, data: st.DataObject, newest: bool, goes: bool) -> None:
        position = max(self.uses) if newest else data.draw(st.sampled_from(sorted(self.uses)))
        if position not in self.order._promised or self.order._lost:
            self.walks = self.uses[position].sequence
        self._carry_out(self.order.unpacked(position))
        if goes:
            self._remove(position)

    @precondition(lambda self: self.uses)
    @rule(data=st.data())
    def a_handle_goes(self, data: st.DataObject) -> None:
        self._remove(data.draw(st.sampled_from(sorted(self.uses))))

    @precondition(lambda self: self.uses)
    @rule(data=st.data(), sequence=st.integers(1, 3))
    def another_order_is_expected(self, data: st.DataObject, sequence: int) -> None:
        mine = [position for position, use in self.uses.items() if use.sequence == sequence]
        known = data.draw(st.permutations(mine))[: data.draw(st.integers(0, len(mine)))]
        self.order.arrange(sequence, [0, *known, 10_000])

    def _remove(self, position: int) -> None:
        dropped = self.order.remove(position)
        if dropped is not None:
            assert dropped == self.uses[position].storage
            self.resident.remove(dropped)
        del self.uses[position]

    def _carry_out(self, plan: Prefetch) -> None:
        for storage in plan.drop:
            self.resident.discard(storage)
        brought = {use.storage for use in self.uses.values() if use.sequence == self.walks}
        assert set(plan.bring) <= brought, "the walk stays within the forward that was asked for last"
        assert len(set(plan.bring)) == len(plan.bring)
        self.resident.update(plan.bring)

    @invariant()
    def what_is_promised_is_held_within_the_limit(self) -> None:
        if not hasattr(self, "order"):
            return
        order = self.order
        assert order._uses.keys() == self.uses.keys()
        promised = {self.uses[position].storage for position in order._promised}
        assert {storage for storage in self.weights if order.holds(storage)} == promised
        assert promised == self.resident, "the plans bring and drop exactly what is promised"
        assert order.promised_bytes == sum(self.weights[storage] for storage in promised)
        assert order.promised_bytes <= self.limit or (self.limit and len(promised) == 1), "a larger one alone"

    def teardown(self) -> None:
        for position in sorted(getattr(self, "uses", ()), key=lambda position: hash((position, 7))):
            self._remove(position)
        if hasattr(self, "order"):
            assert not self.resident
            assert self.order.promised_bytes == 0
            assert is_empty(self.order)
            assert self.order._next is None


TestPrefetchOrder = PrefetchMachine.TestCase
TestPrefetchOrder.settings = STEPS


def packed(order: PrefetchOrder, saves: list[tuple[int, int]], sequence: int = 1, first: int = 1) -> None:
    """Takes in one forward: (storage, bytes) by position."""
    for position, (storage, nbytes) in enumerate(saves, first):
        order.add(position, storage, nbytes, sequence)


@pytest.mark.parametrize(("followed", "brought"), [(0, [3, 2]), (1, [3]), (2, [3]), (3, []), (9, [])])
def test_what_forwards_that_follow_a_plan_have_promised_takes_the_same_room(followed: int, brought: list[int]) -> None:
    order = PrefetchOrder(4)
    packed(order, [(storage, 2) for storage in range(5)])
    order.followed_bytes = followed
    assert order.unpacked(5).bring == brought
    order.followed_bytes = 0
    assert [*brought, *order.unpacked(5).bring] == [3, 2], "once there is room"
    larger = PrefetchOrder(1)
    packed(larger, [(0, 9), (1, 9)])
    larger.followed_bytes = followed
    assert larger.unpacked(2).bring == ([] if followed else [0]), "it is promised alone of all"


@settings(max_examples=200)
@given(
    weights=st.lists(SIZE, min_size=1, max_size=8),
    limit=st.integers(0, 30),
    picks=st.lists(st.integers(0, 7), min_size=1, max_size=40),
)
def test_backward_in_reverse_finds_everything_that_fits_promised_and_nothing_further_ahead(
    weights: list[int], limit: int, picks: list[int]
) -> None:
    storages = [pick % len(weights) for pick in picks]
    order = PrefetchOrder(limit)
    packed(order, [(storage, weights[storage]) for storage in storages])
    for position in range(len(storages), 0, -1):
        order.unpacked(position)
        order.remove(position)
        ahead: set[int] = set()
        for storage in reversed(storages[: position - 1]):
            alone = limit > 0 and not ahead - {storage}
            if sum(weights[s] for s in ahead | {storage}) > limit and not alone:
                break
            ahead.add(storage)
        assert {s for s in range(len(weights)) if order.holds(s)} == ahead
    assert len(order._uses) == order.promised_bytes == 0


def test_a_jump_brings_what_comes_before_the_place_it_leads_to() -> None:
    order = PrefetchOrder(2)
    packed(order, [(storage, 1) for storage in range(1, 10)])
    assert order.unpacked(4) == Prefetch(bring=[3, 2])
    assert order.unpacked(9) == Prefetch()
    assert order.unpacked(3) == Prefetch(drop=[3], bring=[8])
    assert order.unpacked(2) == Prefetch(drop=[2], bring=[7])
    assert order.unpacked(8) == Prefetch(drop=[8], bring=[6])


def test_h19_promises_that_are_not_taken_up_are_given_up_once_they_are_overdue_and_room_is_needed() -> None:
    order, patience = PrefetchOrder(2), PrefetchOrder.PATIENCE
    packed(order, [(1, 1), (2, 1), (3, 1)], sequence=1)
    packed(order, [(storage, 1) for storage in range(100, 140)], sequence=2, first=10)
    assert order.unpacked(3) == Prefetch(bring=[2, 1])
    newest = 10 + 39
    for late in range(patience + 1):
        assert order.unpacked(newest - late) == Prefetch(), "they may come yet"
    assert order.holds(1)
    assert order.holds(2)
    following = newest - patience - 1
    assert order.unpacked(following) == Prefetch(drop=[2, 1], bring=[following + 89, following + 88])
    assert order.promised_bytes == 2


@pytest.mark.parametrize("limit", [1, 6, 30, 60, 100])
@pytest.mark.parametrize("seed", range(4))
def test_h50_an_unknown_order_brings_hardly_anything_twice(limit: int, seed: int) -> None:
    order, saves, resident, brought = PrefetchOrder(limit), 120, set[int](), 0
    packed(order, [(storage, 1) for storage in range(1, saves + 1)])
    for position in shuffled(saves, seed):
        brought += position not in resident
        plan = order.unpacked(position)
        order.remove(position)
        resident = (resident - {position, *plan.drop}) | set(plan.bring)
        brought += len(plan.bring)
    assert brought <= 1.1 * saves
    assert is_empty(order)


def test_h50_an_order_is_followed_again_once_it_is_one() -> None:
    order, patience = PrefetchOrder(2), PrefetchOrder.PATIENCE
    packed(order, [(storage, 1) for storage in range(1, 100)])
    for position in (10, 30, 50, 70, 90):
        order.unpacked(position)
        order.remove(position)
    for position in range(89, 89 - PrefetchOrder.MISSES, -1):
        assert order.unpacked(position) == Prefetch(), "what was promised last may come yet"
        order.remove(position)
    following = 89 - PrefetchOrder.MISSES
    for position in range(following, following - patience, -1):
        plan = order.unpacked(position)
        order.remove(position)
        if plan.drop:
            break
    assert plan.bring == [position - 1, position - 2]


def shuffled(count: int, seed: int) -> Iterator[int]:
    """The positions from 1 to ``count`` in an order of its own for each seed."""
    remaining = list(range(1, count + 1))
    while remaining:
        seed = (seed * 6364136223846793005 + 1442695040888963407) % 2**64
        yield remaining.pop((seed >> 33) % len(remaining))


@given(st.integers(1, 40), st.integers(0, 20), st.integers(1, 8))
def test_what_is_retained_is_found_promised_again_by_a_second_backward(saves: int, limit: int, weight: int) -> None:
    assume(weight <= limit)
    order = PrefetchOrder(limit)
    packed(order, [(storage, weight) for storage in range(1, saves + 1)])
    for _ in range(3):
        for position in range(saves, 0, -1):
            if position < saves:
                assert order.holds(position)
            order.unpacked(position)
        assert order.promised_bytes == 0


def test_what_is_arranged_is_brought_in_that_order_and_nothing_else() -> None:
    order = PrefetchOrder(2)
    packed(order, [(10 * position, 1) for position in range(1, 7)])
    order.arrange(1, [3, 1, 99, 5, 2])
    assert order.unpacked(3) == Prefetch(bring=[10, 50])
    assert order.unpacked(1) == Prefetch(drop=[10], bring=[20])
    assert order.unpacked(6) == Prefetch(), "it is in no chain: nothing is known of what comes next"
    order.arrange(1, [6, 5, 4, 2])
    assert order.unpacked(5) == Prefetch(drop=[50], bring=[40]), "the walk goes on along the new chain"


def test_a_save_after_an_arrangement_is_expected_before_all_others() -> None:
    order = PrefetchOrder(3)
    packed(order, [(10, 1), (20, 1), (30, 1)])
    order.arrange(1, [1, 3])
    order.add(4, 40, 1, 1)
    assert order.unpacked(4) == Prefetch(bring=[10, 30])
    for position in (1, 2, 3, 4):
        order.remove(position)
    assert is_empty(order)


def test_what_follows_a_plan_has_the_room_of_promises_that_are_overdue() -> None:
    order = PrefetchOrder(4)
    packed(order, [(0, 2), (1, 2), (2, 2)])
    assert order.unpacked(3).bring == [1, 0]
    order.followed_due = 2
    order.unpacks += PrefetchOrder.PATIENCE + 1  # those of a forward that follows a plan
    assert order.make_room(2) == []
    assert not order.is_late
    order.unpacks += 1
    assert order.is_late, "the promise of that one"
    assert order.make_room(2) == [1]
    assert order.make_room(2) == [], "for which there is room"
    assert order.promised_bytes == 2
