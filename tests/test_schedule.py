"""The three machines that decide when bytes leave and come back, against models that are too simple to be wrong."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from eager_offload.schedule import DelayLine, Plan, PrefetchOrder, Window

SIZE = st.integers(1, 8)
STEPS = settings(max_examples=120, stateful_step_count=40, deadline=None)


# -- the delay line -------------------------------------------------------------------------------------------------


class Waiting(NamedTuple):
    """What the model knows of a storage in line."""

    key: int
    nbytes: int
    packed_at: int | None
    urgent: bool

    def is_final(self, sequence: int | None) -> bool:
        return self.packed_at is None or sequence is None or sequence > self.packed_at


class DelayLineMachine(RuleBasedStateMachine):
    """A line of storages, oldest first; the model is a list."""

    @initialize(limit=st.integers(0, 20))
    def begin(self, limit: int) -> None:
        self.line, self.limit = DelayLine(limit), limit
        self.model: list[Waiting] = []
        self.sequence = self.keys = 0

    @rule(nbytes=SIZE, final=st.booleans(), urgent=st.booleans())
    def push(self, nbytes: int, final: bool, urgent: bool) -> None:
        self.keys += 5  # apart, so that a set of them has an order of its own
        entry = Waiting(self.keys, nbytes, None if final else self.sequence, urgent)
        self.line.push(entry.key, nbytes, entry.packed_at, urgent=urgent)
        self.model.append(entry)

    @rule()
    def an_operator_has_run(self) -> None:
        self.sequence += 1

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def postpone(self, data: st.DataObject) -> None:
        at = data.draw(st.integers(0, len(self.model) - 1))
        self.line.postpone(self.model[at].key, self.sequence)
        self.model[at] = self.model[at]._replace(packed_at=self.sequence)

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def discard(self, data: st.DataObject) -> None:
        entry = self.model.pop(data.draw(st.integers(0, len(self.model) - 1)))
        self.line.discard(entry.key)
        self.line.discard(entry.key)

    @rule(leaving=st.booleans())
    def what_is_due_leaves(self, leaving: bool) -> None:
        sequence = None if leaving else self.sequence
        while (key := self.line.due(sequence)) is not None:
            assert self.line.due(sequence) == key, "it stays in line until it is taken out"
            assert key == self._expected(sequence)
            self.line.discard(key)
            self.model = [entry for entry in self.model if entry.key != key]
        assert self._expected(sequence) is None
        if leaving:
            assert self.line.nbytes <= self.limit, "once every operator has run, only the newest bytes are left"

    def _expected(self, sequence: int | None) -> int | None:
        final = [entry for entry in self.model if entry.is_final(sequence)]
        urgent = [entry for entry in final if entry.urgent]
        over = sum(entry.nbytes for entry in self.model) > self.limit
        due = urgent or (final if over else [])
        return due[0].key if due else None

    @invariant()
    def bytes_and_members_are_those_of_the_model(self) -> None:
        if hasattr(self, "line"):
            assert self.line.nbytes == sum(entry.nbytes for entry in self.model)
            assert all((key in self.line) == any(key == e.key for e in self.model) for key in range(self.keys + 6))

    def teardown(self) -> None:
        for entry in getattr(self, "model", []):
            self.line.discard(entry.key)
        if hasattr(self, "line"):
            assert self.line.nbytes == 0
            assert is_empty(self.line)


def is_empty(machine: object) -> bool:
    """Whether none of a machine's collections has anything left in it."""
    return not any(value for value in vars(machine).values() if isinstance(value, dict | set | list))


def test_the_newest_bytes_stay_and_the_limit_itself_is_still_within_it() -> None:
    line = DelayLine(10)
    line.push(1, 4, None)
    line.push(2, 6, None)
    assert line.due(0) is None
    line.push(3, 1, None)
    assert line.due(0) == 1
    line.discard(1)
    assert line.due(0) is None
    assert line.nbytes == 7


def test_h33_what_an_operator_may_still_fill_leaves_only_after_a_later_operator_or_at_the_exit() -> None:
    line = DelayLine(0)
    line.push(1, 4, packed_at=7)
    line.push(2, 4, packed_at=7, urgent=True)
    assert line.due(7) is None
    assert line.due(None) == 2
    assert line.due(8) == 2, "urgent ones first"
    line.discard(2)
    assert line.due(8) == 1
    line.postpone(1, 8)
    assert line.due(8) is None
    assert line.due(9) == 1


# -- the window -----------------------------------------------------------------------------------------------------


class WindowMachine(RuleBasedStateMachine):
    """What is on its way; callers let something arrive until there is room."""

    @initialize(limit=st.integers(1, 12))
    def begin(self, limit: int) -> None:
        self.window, self.limit = Window(limit), limit
        self.model: dict[int, int] = {}
        self.keys = 0

    @rule(nbytes=st.integers(1, 16))
    def send(self, nbytes: int) -> None:
        while not self.window.has_room(nbytes):
            assert self.model
            assert sum(self.model.values()) + nbytes > self.limit
            oldest = self.window.oldest
            assert oldest == min(self.model)
            self.window.leave(oldest)
            del self.model[oldest]
        self.keys += 1
        self.window.enter(self.keys, nbytes)
        self.model[self.keys] = nbytes

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def arrive(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(sorted(self.model)))
        self.window.leave(key)
        del self.model[key]

    @invariant()
    def the_bound_holds_but_for_one_that_travels_alone(self) -> None:
        if hasattr(self, "window"):
            assert self.window.nbytes == sum(self.model.values())
            assert self.window.oldest == min(self.model, default=None)
            assert self.window.nbytes <= self.limit or len(self.model) == 1


# -- the prefetch order ---------------------------------------------------------------------------------------------


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
    @rule(data=st.data(), goes=st.booleans())
    def ask(self, data: st.DataObject, goes: bool) -> None:
        position = data.draw(st.sampled_from(sorted(self.uses)))
        if position not in self.order._promised:
            self.walks = self.uses[position].sequence
        self._carry_out(self.order.unpacked(position))
        if goes:
            self._remove(position)

    @precondition(lambda self: self.uses)
    @rule(goes=st.booleans())
    def ask_for_the_newest(self, goes: bool) -> None:
        position = max(self.uses)
        if position not in self.order._promised:
            self.walks = self.uses[position].sequence
        self._carry_out(self.order.unpacked(position))
        if goes:
            self._remove(position)

    @precondition(lambda self: self.uses)
    @rule(data=st.data())
    def a_handle_goes(self, data: st.DataObject) -> None:
        self._remove(data.draw(st.sampled_from(sorted(self.uses))))

    def _remove(self, position: int) -> None:
        dropped = self.order.remove(position)
        if dropped is not None:
            assert dropped == self.uses[position].storage
            self.resident.remove(dropped)
        del self.uses[position]

    def _carry_out(self, plan: Plan) -> None:
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
        assert len(order) == len(self.uses)
        promised = {self.uses[position].storage for position in order._promised}
        assert {storage for storage in self.weights if order.holds(storage)} == promised
        assert promised == self.resident, "the plans bring and drop exactly what is promised"
        assert order.promised_bytes == sum(self.weights[storage] for storage in promised) <= self.limit

    def teardown(self) -> None:
        for position in sorted(getattr(self, "uses", ()), key=lambda position: hash((position, 7))):
            self._remove(position)
        if hasattr(self, "order"):
            assert not self.resident
            assert len(self.order) == self.order.promised_bytes == 0
            assert is_empty(self.order)
            assert self.order._next is None


TestDelayLine = DelayLineMachine.TestCase
TestDelayLine.settings = STEPS
TestWindow = WindowMachine.TestCase
TestWindow.settings = STEPS
TestPrefetchOrder = PrefetchMachine.TestCase
TestPrefetchOrder.settings = STEPS


def packed(order: PrefetchOrder, saves: list[tuple[int, int]], sequence: int = 1, first: int = 1) -> None:
    """Takes in one forward: (storage, bytes) by position."""
    for position, (storage, nbytes) in enumerate(saves, first):
        order.add(position, storage, nbytes, sequence)


@settings(deadline=None, max_examples=200)
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
            if sum(weights[s] for s in ahead | {storage}) > limit:
                break
            ahead.add(storage)
        assert {s for s in range(len(weights)) if order.holds(s)} == ahead
    assert len(order) == order.promised_bytes == 0


@settings(deadline=None, max_examples=200)
@given(st.data())
def test_uses_that_go_in_any_order_leave_nothing(data: st.DataObject) -> None:
    count = data.draw(st.integers(1, 30))
    order = PrefetchOrder(data.draw(st.integers(0, 40)))
    packed(order, [(position // 2, 1 + position // 2 % 5) for position in range(count)])
    for position in data.draw(st.permutations(range(1, count + 1))):
        if data.draw(st.booleans()):
            order.unpacked(position)
        order.remove(position)
    assert is_empty(order)
    assert order.promised_bytes == 0
    assert order._next is None


def test_a_storage_that_weighs_more_than_the_limit_stops_the_walk_and_is_asked_for_itself() -> None:
    order = PrefetchOrder(10)
    packed(order, [(1, 4), (2, 11), (3, 4), (4, 4)])
    assert order.unpacked(4) == Plan(bring=[3])
    assert order.unpacked(3) == Plan(drop=[3])
    assert order.unpacked(2) == Plan(bring=[1])
    assert order.unpacked(1) == Plan(drop=[1])


def test_without_a_limit_in_bytes_nothing_is_promised() -> None:
    order = PrefetchOrder(0)
    packed(order, [(1, 1), (2, 1), (3, 1)])
    assert [order.unpacked(position) for position in (3, 2, 1)] == [Plan(), Plan(), Plan()]


def test_forwards_do_not_mix_although_they_were_packed_in_turns() -> None:
    order = PrefetchOrder(100)
    for position in range(1, 9):
        order.add(position, 10 + position, 1, sequence=position % 2)
    assert order.unpacked(8) == Plan(bring=[16, 14, 12])
    assert order.unpacked(7) == Plan(bring=[15, 13, 11])
    assert order.unpacked(6) == Plan(drop=[16])


def test_a_jump_brings_what_comes_before_the_place_it_leads_to() -> None:
    order = PrefetchOrder(2)
    packed(order, [(storage, 1) for storage in range(1, 10)])
    assert order.unpacked(4) == Plan(bring=[3, 2])
    assert order.unpacked(9) == Plan()
    assert order.unpacked(3) == Plan(drop=[3], bring=[8])
    assert order.unpacked(2) == Plan(drop=[2], bring=[7])
    assert order.unpacked(8) == Plan(drop=[8], bring=[6])


def test_h19_promises_that_nobody_takes_up_are_given_up_once_they_are_overdue_and_room_is_needed() -> None:
    order, patience = PrefetchOrder(2), PrefetchOrder.PATIENCE
    packed(order, [(1, 1), (2, 1), (3, 1)], sequence=1)
    packed(order, [(storage, 1) for storage in range(100, 140)], sequence=2, first=10)
    assert order.unpacked(3) == Plan(bring=[2, 1])
    newest = 10 + 39
    for late in range(patience + 1):
        assert order.unpacked(newest - late) == Plan(), "they may come yet"
    assert order.holds(1)
    assert order.holds(2)
    following = newest - patience - 1
    assert order.unpacked(following) == Plan(drop=[2, 1], bring=[following + 89, following + 88])
    assert order.promised_bytes == 2


def test_promises_along_the_order_are_not_overdue_as_long_as_it_is_followed() -> None:
    order = PrefetchOrder(64)
    packed(order, [(storage, 1) for storage in range(1, 1000)])
    order.unpacked(999)
    for position in range(998, 64, -1):
        plan = order.unpacked(position)
        order.remove(position)
        assert plan == Plan(drop=[position], bring=[position - 64])


class Counting(dict[Any, Any]):
    """Counts how often somebody looks something up."""

    steps = 0

    def __getitem__(self, key: Any) -> Any:
        self.steps += 1
        return super().__getitem__(key)

    def items(self) -> Any:
        self.steps += len(self)
        return super().items()


def counted(limit: float, saves: int) -> tuple[PrefetchOrder, Counting]:
    order = PrefetchOrder(limit)  # type: ignore[arg-type]
    order._uses = uses = Counting()
    packed(order, [(storage, 1) for storage in range(saves)])
    uses.steps = 0
    return order, uses


@pytest.mark.parametrize("limit", [0, 1, 50, 1000, math.inf])
def test_the_walk_costs_the_same_for_each_unpack_however_far_it_looks_ahead(limit: float) -> None:
    saves = 4000
    order, uses = counted(limit, saves)
    for position in range(saves, 0, -1):
        order.unpacked(position)
        order.remove(position)
    assert uses.steps <= 10 * saves


@settings(deadline=None, max_examples=30)
@given(st.integers(0, 2**32), st.sampled_from([0, 1, 7, 40]))
def test_an_order_that_jumps_costs_each_unpack_no_more_than_the_look_ahead(seed: int, limit: int) -> None:
    saves = 300
    order, uses = counted(limit, saves)
    for position in shuffled(saves, seed):
        before = uses.steps
        order.unpacked(position)
        order.remove(position)
        assert uses.steps - before <= 10 + 4 * limit


def shuffled(count: int, seed: int) -> Iterator[int]:
    """The positions from 1 to ``count`` in an order of its own for each seed."""
    remaining = list(range(1, count + 1))
    while remaining:
        seed = (seed * 6364136223846793005 + 1442695040888963407) % 2**64
        yield remaining.pop((seed >> 33) % len(remaining))


@settings(deadline=None)
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
