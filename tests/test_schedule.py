"""What leaves, and when: the resident queue against a model that is too simple to be wrong."""

from __future__ import annotations

from typing import NamedTuple

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from eager_offload.schedule import AT_THE_EXIT, ResidentQueue

SIZE = st.integers(1, 8)
STEPS = settings(max_examples=120, stateful_step_count=40)


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

    @rule(nbytes=SIZE, urgent=st.booleans(), weight=st.none() | SIZE, last_save=st.none() | st.integers(0, 4))
    def push(self, nbytes: int, urgent: bool, weight: int | None, last_save: int | None) -> None:
        self.keys += 5  # apart, so that a set of them has an order of its own
        entry = Waiting(self.keys, nbytes, self.sequence, urgent, nbytes if weight is None else weight, last_save)
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
        self.model[at] = self.model[at]._replace(packed_at=self.sequence)

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
            assert self.queue.nbytes == 0
            assert is_empty(self.queue)


def is_empty(machine: object) -> bool:
    """Whether none of a machine's collections has anything left in it."""
    return not any(value for value in vars(machine).values() if isinstance(value, dict | set | list))


def test_h33_what_an_operator_may_still_fill_leaves_only_after_a_later_operator_or_at_the_exit() -> None:
    queue = ResidentQueue(0)
    queue.push(1, 4, packed_at=7)
    queue.push(2, 4, packed_at=7, urgent=True)
    queue.push(3, 4, packed_at=AT_THE_EXIT)
    assert queue.due(7) is None
    assert queue.due(None) == 2
    assert queue.due(8) == 2, "urgent ones first"
    queue.discard(2)
    assert queue.due(8) == 1
    queue.postpone(1, 8)
    assert queue.due(8) is None
    assert queue.due(9) == 1
    queue.discard(1)
    queue.postpone(3, 9)
    assert queue.due(10) is None, "it leaves at the exit, however often it is saved again"
    assert queue.due(None) == 3


TestResidentQueue = ResidentQueueMachine.TestCase
TestResidentQueue.settings = STEPS
