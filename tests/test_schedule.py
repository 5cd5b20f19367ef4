"""What leaves and how much at once: the delay line and the window, against models that are too simple to be wrong."""

from __future__ import annotations

from typing import NamedTuple

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from eager_offload.schedule import AT_THE_EXIT, DelayLine, Window

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


def test_what_leaves_at_the_exit_does_so_however_often_it_is_saved_again() -> None:
    line = DelayLine(0)
    line.push(1, 4, packed_at=AT_THE_EXIT)
    line.push(2, 4, packed_at=7)
    line.postpone(1, 7)
    assert line.due(9) == 2
    line.discard(2)
    assert line.due(9) is None
    assert line.due(None) == 1


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


TestDelayLine = DelayLineMachine.TestCase
TestDelayLine.settings = STEPS
TestWindow = WindowMachine.TestCase
TestWindow.settings = STEPS
