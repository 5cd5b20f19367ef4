"""What leaves, what comes back next, and the windows: numbers, against models that are too simple to be wrong."""

from __future__ import annotations

from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from eager_offload.schedule import (
    AT_THE_EXIT,
    Prefetch,
    PrefetchOrder,
    ResidentQueue,
    StepUses,
    Use,
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
    rests: bool = False

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

    @rule(nbytes=SIZE)
    def push_what_rests(self, nbytes: int) -> None:
        self.keys += 5
        self.queue.push(self.keys, nbytes, self.sequence, rests=True)
        self.model.append(Waiting(self.keys, nbytes, self.sequence, False, 0, None, rests=True))

    @precondition(lambda self: self.model)
    @rule(data=st.data(), number=st.integers(0, 4))
    def saved_again(self, data: st.DataObject, number: int) -> None:
        at = data.draw(st.integers(0, len(self.model) - 1))
        self.queue.saved_again(self.model[at].key, number)
        last_save = self.model[at].last_save
        if last_save is not None and number >= last_save:
            self.model[at] = self.model[at]._replace(last_save=None)

    @rule()
    def nothing_rests_any_more(self) -> None:
        self.queue.stay_no_longer()
        resting = [entry._replace(rests=False, weight=entry.nbytes) for entry in self.model if entry.rests]
        self.model = [entry for entry in self.model if not entry.rests] + resting

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
        final = [entry for entry in final if not entry.rests]
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


class Stored:
    """A storage, as the look-ahead knows it."""

    def __init__(self, name: int, nbytes: int) -> None:
        self.name, self.nbytes, self.is_gone = name, nbytes, False

    def __repr__(self) -> str:
        return f"storage {self.name}"


class Save(NamedTuple):
    """A save, as the model knows it."""

    sequence: int
    number: int
    use: Use


class PrefetchMachine(RuleBasedStateMachine):
    """Saves, unpacks and storages that go, in any order; ``resident`` does what the plans say."""

    @initialize(limit=st.integers(0, 20))
    def begin(self, limit: int) -> None:
        self.order, self.limit = PrefetchOrder(limit), limit
        self.steps = [StepUses() for _ in range(3)]
        self.numbers = [0] * 3
        self.saves: list[Save] = []
        self.resident: set[Stored] = set()
        self.made = 0
        self.walks: int | None = None

    @rule(nbytes=SIZE, sequence=st.integers(0, 2), kept=st.integers(0, 2))
    def save_a_new_storage(self, nbytes: int, sequence: int, kept: int) -> None:
        self.made += 1
        self.numbers[sequence] += kept  # saves that have no handle
        self._save(Stored(self.made, nbytes), sequence)

    @precondition(lambda self: self.saves)
    @rule(data=st.data(), sequence=st.integers(0, 2))
    def save_a_storage_again(self, data: st.DataObject, sequence: int) -> None:
        self._save(self.saves[data.draw(st.integers(0, len(self.saves) - 1))].use.storage, sequence)

    def _save(self, storage: Stored, sequence: int) -> None:
        number = self.numbers[sequence]
        self.numbers[sequence] += 1
        self.saves.append(Save(sequence, number, self.steps[sequence].add(number, storage, storage.nbytes)))

    @precondition(lambda self: self.saves)
    @rule(data=st.data(), newest=st.booleans(), goes=st.booleans(), backward=st.integers(0, 1))
    def ask(self, data: st.DataObject, newest: bool, goes: bool, backward: int) -> None:
        last = len(self.saves) - 1
        sequence, _, use = self.saves[last if newest else data.draw(st.integers(0, last))]
        if use not in self.order._due or self.order._lost:
            self.walks = sequence
        self._carry_out(self.order.ask(self.steps[sequence], use, backward))
        if goes:
            self._let_go(use.storage)

    @precondition(lambda self: self.saves)
    @rule(data=st.data())
    def a_graph_is_kept(self, data: st.DataObject) -> None:
        use = self.saves[data.draw(st.integers(0, len(self.saves) - 1))].use
        if use.asked_in is not None:
            self.order.hold(use)
            if use in self.order._due:
                self.resident.add(use.storage)

    @precondition(lambda self: self.saves)
    @rule(data=st.data())
    def a_storage_goes(self, data: st.DataObject) -> None:
        self._let_go(self.saves[data.draw(st.integers(0, len(self.saves) - 1))].use.storage)

    @rule(data=st.data(), sequence=st.integers(0, 2))
    def another_order_is_expected(self, data: st.DataObject, sequence: int) -> None:
        numbers = range(self.numbers[sequence])
        known = data.draw(st.permutations(numbers))[: data.draw(st.integers(0, len(numbers)))]
        self.order.arrange(self.steps[sequence], [*known, 10_000])

    def _let_go(self, storage: Stored) -> None:
        storage.is_gone = True
        self.order.forget(storage)
        self.resident.discard(storage)
        self.saves = [save for save in self.saves if save.use.storage is not storage]

    def _carry_out(self, plan: Prefetch) -> None:
        self.resident.difference_update(plan.drop)
        brought = {use.storage for sequence, _, use in self.saves if sequence == self.walks}
        assert set(plan.bring) <= brought, "the walk stays within the forward that was asked for last"
        assert len(set(plan.bring)) == len(plan.bring)
        self.resident.update(plan.bring)

    @invariant()
    def what_is_promised_is_held_within_the_limit(self) -> None:
        if not hasattr(self, "order"):
            return
        order = self.order
        promised = {use.storage for use in order._due}
        assert promised == order.promised.keys()
        assert not any(storage.is_gone for storage in promised)
        assert promised == self.resident, "the plans bring and drop exactly what is promised"
        assert order.promised_bytes == sum(storage.nbytes for storage in promised)
        assert order.promised_bytes <= self.limit or (self.limit and len(promised) == 1), "a larger one alone"

    def teardown(self) -> None:
        for save in sorted(getattr(self, "saves", ()), key=lambda save: hash((save.number, 7))):
            if not save.use.storage.is_gone:
                self._let_go(save.use.storage)
        if hasattr(self, "order"):
            assert not self.resident
            assert self.order.promised_bytes == 0
            assert is_empty(self.order)


TestPrefetchOrder = PrefetchMachine.TestCase
TestPrefetchOrder.settings = STEPS


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


def test_a_jump_brings_what_comes_before_the_place_it_leads_to() -> None:
    step = Step(PrefetchOrder(2), [(name, 1) for name in range(9)])
    assert step.ask(3) == ([2, 1], [])
    assert step.ask(8) == ([], [])
    assert step.ask(2) == ([7], [2])
    assert step.ask(1) == ([6], [1])
    assert step.ask(7) == ([5], [7])


def test_the_walk_passes_over_what_this_backward_has_asked_for_and_comes_to_it_in_the_next_one() -> None:
    step = Step(PrefetchOrder(2), [(name, 1) for name in range(6)])
    assert step.ask(3) == ([2, 1], [])
    assert step.ask(2) == ([0], [2])
    assert step.ask(1) == ([], [1])
    assert step.ask(0) == ([], [0])
    assert step.ask(5) == ([4], []), "the others were asked for in this backward"
    assert step.ask(4) == ([], [4])
    assert step.ask(5, backward=1) == ([4, 3], []), "the graph was kept, and backward runs again"


@pytest.mark.parametrize("goes", [False, True], ids=["alive", "gone"])
def test_one_ask_passes_over_a_bounded_number_of_asked_saves_and_over_any_number_that_are_gone(goes: bool) -> None:
    passed = 2 * PrefetchOrder.PATIENCE  # in the first ask and in the second
    step = Step(PrefetchOrder(1), [(name, 1) for name in range(passed + 4)])
    for number in range(passed + 1, 1, -1):
        step.ask(number)
        if goes:
            step.let_go(number)
    step.let_go(1)  # it was promised
    assert step.ask(passed + 3) == ([passed + 2], [])
    assert step.ask(passed + 2) == ([0] if goes else [], [passed + 2])


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


def test_what_is_arranged_is_brought_in_that_order_and_nothing_else() -> None:
    order = PrefetchOrder(2)
    step = Step(order, [(10 * number, 1) for number in range(7)])
    order.arrange(step.uses, [3, 1, 99, 5, 2])
    assert step.ask(3) == ([10, 50], [])
    assert step.ask(1) == ([20], [10])
    assert step.ask(6) == ([], []), "it is not in the order: nothing is known of what comes next"
    order.arrange(step.uses, [6, 5, 4, 2])
    assert step.ask(5) == ([40], [50]), "the walk goes on along the new order"


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
