"""What leaves, what comes back next, and the windows: numbers, against models that are too simple to be wrong."""

from __future__ import annotations

from typing import NamedTuple

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from eager_offload.schedule import (
    AT_THE_EXIT,
    Prefetch,
    PrefetchOrder,
    ResidentQueue,
    auto_window,
    largest_of,
)

SIZE = st.integers(1, 8)
STEPS = settings(max_examples=120, stateful_step_count=40)


def is_empty(machine: object) -> bool:
    """Whether none of a machine's collections has anything left in it."""
    return not any(value for value in vars(machine).values() if isinstance(value, dict | set | list))


# -- what leaves ------------------------------------------------------------------------------------------------------


class Waiting(NamedTuple):
    """What the model knows of a storage in the queue."""

    key: int
    nbytes: int
    packed_at: int
    urgent: bool
    weight: int
    last_save: int | None

    def is_final(self, sequence: int | None) -> bool:
        return sequence is None or (sequence > self.packed_at and self.last_save is None)


class ResidentQueueMachine(RuleBasedStateMachine):
    """Storages, oldest first; the model is a list."""

    @initialize(limit=st.integers(0, 20))
    def begin(self, limit: int) -> None:
        self.queue, self.limit = ResidentQueue(limit), limit
        self.model: list[Waiting] = []
        self.sequence = self.keys = 0

    @rule(
        nbytes=SIZE,
        at_the_exit=st.sampled_from([False, False, True]),
        urgent=st.booleans(),
        weight=st.none() | SIZE,
        last_save=st.none() | st.integers(0, 4),
    )
    def push(self, nbytes: int, at_the_exit: bool, urgent: bool, weight: int | None, last_save: int | None) -> None:
        self.keys += 5  # apart, so that a set of them has an order of its own
        packed_at = AT_THE_EXIT if at_the_exit else self.sequence
        entry = Waiting(self.keys, nbytes, packed_at, urgent, nbytes if weight is None else weight, last_save)
        self.queue.push(entry.key, nbytes, entry.packed_at, urgent=urgent, weight=weight, last_save=last_save)
        self.model.append(entry)

    @precondition(lambda self: self.model)
    @rule(data=st.data(), number=st.integers(0, 4))
    def saved_again(self, data: st.DataObject, number: int) -> None:
        at = data.draw(st.integers(0, len(self.model) - 1))
        self.queue.saved_again(self.model[at].key, number)
        last_save = self.model[at].last_save
        if last_save is not None and number >= last_save:
            self.model[at] = self.model[at]._replace(last_save=None)

    @rule()
    def nothing_is_known_any_more(self) -> None:
        self.queue.await_nothing()
        self.model = [entry._replace(last_save=None) for entry in self.model]

    @rule()
    def an_operator_has_run(self) -> None:
        self.sequence += 1

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def postpone(self, data: st.DataObject) -> None:
        at = data.draw(st.integers(0, len(self.model) - 1))
        self.queue.postpone(self.model[at].key, self.sequence)
        # What leaves at the exit does so however often it is saved again.
        self.model[at] = self.model[at]._replace(packed_at=max(self.model[at].packed_at, self.sequence))

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def discard(self, data: st.DataObject) -> None:
        entry = self.model.pop(data.draw(st.integers(0, len(self.model) - 1)))
        assert self.queue.discard(entry.key) == entry.nbytes
        assert self.queue.discard(entry.key) == 0

    @rule(leaving=st.booleans())
    def what_is_due_leaves(self, leaving: bool) -> None:
        sequence = None if leaving else self.sequence
        while (key := self.queue.due(sequence)) is not None:
            assert self.queue.due(sequence) == key, "it stays until it is taken out"
            assert key == self._expected(sequence)
            self.queue.discard(key)
            self.model = [entry for entry in self.model if entry.key != key]
        assert self._expected(sequence) is None
        if leaving:
            assert self.queue.nbytes <= self.limit, "once every operator has run, only the newest bytes are left"

    def _expected(self, sequence: int | None) -> int | None:
        final = [entry for entry in self.model if entry.is_final(sequence)]
        urgent = [entry for entry in final if entry.urgent]
        over = sum(entry.weight for entry in self.model) > self.limit
        due = urgent or (final if over else [])
        return due[0].key if due else None

    @invariant()
    def bytes_and_members_are_those_of_the_model(self) -> None:
        if hasattr(self, "queue"):
            assert self.queue.nbytes == sum(entry.weight for entry in self.model)
            assert self.queue.awaiting_bytes == sum(e.nbytes for e in self.model if e.last_save is not None)
            assert all((key in self.queue) == any(key == e.key for e in self.model) for key in range(self.keys + 6))

    def teardown(self) -> None:
        for entry in getattr(self, "model", []):
            self.queue.discard(entry.key)
        if hasattr(self, "queue"):
            self.queue.begin_step()
            assert self.queue.nbytes == 0
            assert is_empty(self.queue)


TestResidentQueue = ResidentQueueMachine.TestCase
TestResidentQueue.settings = STEPS


# -- what comes back next ---------------------------------------------------------------------------------------------


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


def test_what_is_arranged_is_brought_in_that_order_and_nothing_else() -> None:
    order = PrefetchOrder(2)
    packed(order, [(10 * position, 1) for position in range(1, 7)])
    order.arrange(1, [3, 1, 99, 5, 2])
    assert order.unpacked(3) == Prefetch(bring=[10, 50])
    assert order.unpacked(1) == Prefetch(drop=[10], bring=[20])
    assert order.unpacked(6) == Prefetch(), "it is in no chain: nothing is known of what comes next"
    order.arrange(1, [6, 5, 4, 2])
    assert order.unpacked(5) == Prefetch(drop=[50], bring=[40]), "the walk goes on along the new chain"


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
