"""The happens-before checker: its verdict on random schedules, what it reports and what it forgets."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import strategies as st

from tests.sampling import search
from tests.simulation import checker as checker_module
from tests.simulation.checker import Checker, OrderingError
from tests.simulation.log import Allocated, ByteRegion, Entry, Freed, Operation, Recorded, Synchronized, Waited

MAIN, OUT = "main", "out"
BLOCK = ByteRegion("device", 0, 4096)
SLOT = ByteRegion("slab", 0, 4096)


class Event:
    """Equal to itself only, like a device's."""


# -- the verdict, against reachability in the graph of all entries ----------------------------------------------------

STREAMS = ["a", "b", "c"]
EVENTS = [Event() for _ in range(4)]

regions = st.builds(
    lambda space, start, length: ByteRegion(space, start, start + length),
    st.sampled_from(["x", "y"]),
    st.integers(0, 6),
    st.integers(0, 4),
)
streams = st.sampled_from(STREAMS)
events = st.sampled_from(EVENTS)
region_lists = st.lists(regions, max_size=2).map(tuple)
entries = st.one_of(
    st.builds(Operation, streams, region_lists, region_lists, st.just("op")),
    st.builds(Operation, streams, region_lists, st.just(()), st.just("read")),
    st.builds(Allocated, streams, regions, st.just("allocate")),
    st.builds(Freed, streams, regions, st.just("free")),
    st.builds(Recorded, streams, events),
    st.builds(Recorded, streams, events),
    st.builds(Waited, streams, events),
    st.builds(Waited, streams, events),
    st.builds(Synchronized, events),
)


@dataclass
class Graph:
    """The entries of a log, each with all that comes before it."""

    log: list[Entry]
    before: list[set[int]] = field(default_factory=list)
    #: Waits for an event that had not been recorded.
    for_nothing: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        last_of: dict[object, int] = {}
        recorded: dict[object, int] = {}
        for index, entry in enumerate(self.log):
            agent = "host" if isinstance(entry, Synchronized) else entry.stream
            # The host enqueued the entry knowing what it had waited for.
            parents = {last_of[known] for known in (agent, "host") if known in last_of}
            last_of[agent] = index
            if isinstance(entry, Recorded):
                recorded[entry.event] = index
            elif isinstance(entry, Waited | Synchronized):
                if entry.event in recorded:
                    parents.add(recorded[entry.event])
                else:
                    self.for_nothing.add(index)
            self.before.append(parents.union(*(self.before[parent] for parent in parents)))

    def races(self) -> set[tuple[int, int]]:
        """Every pair of conflicting entries, by index, of which neither comes before the other."""
        return {
            (earlier, later)
            for later in range(len(self.log))
            for earlier in set(range(later)) - self.before[later]
            if conflict(self.log[earlier], self.log[later])
        }


def touched(entry: Entry) -> tuple[tuple[ByteRegion, ...], tuple[ByteRegion, ...]]:
    """What an entry reads, and what it writes."""
    if isinstance(entry, Operation):
        return entry.reads, entry.writes
    return (), (entry.region,) if isinstance(entry, Allocated | Freed) else ()


def conflict(one: Entry, other: Entry) -> bool:
    (reads, writes), (others_reads, others_writes) = touched(one), touched(other)
    return overlap(writes, others_reads + others_writes) or overlap(reads, others_writes)


def overlap(left: tuple[ByteRegion, ...], right: tuple[ByteRegion, ...]) -> bool:
    return any(a.space == b.space and max(a.start, b.start) < min(a.stop, b.stop) for a in left for b in right)


@pytest.mark.parametrize("compact_at", [1, 4096])
def test_the_verdict_equals_that_of_reachability(compact_at: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checker_module, "_COMPACT_AT", compact_at)

    def check(log: list[Entry]) -> None:
        checker = Checker()
        for entry in log:
            checker.write(entry)
        graph = Graph(log)
        races = graph.races()
        found = {(v.earlier.number, v.later.number) for v in checker.violations if v.earlier is not None}
        assert found <= races
        # An access that a later one stands for is not reported again, but every access that is out of order is.
        assert {later for _, later in found} == {later for _, later in races}
        assert {v.later.number for v in checker.violations if v.earlier is None} == graph.for_nothing

    search(check, st.lists(entries, max_size=40), fixed=300)


# -- what is reported, and what is forgotten -------------------------------------------------------------------------


def test_the_report_says_who_where_and_what_to_do() -> None:
    checker = Checker()
    checker.write(Operation(OUT, (BLOCK,), (SLOT,), "offload"))
    checker.write(Freed(MAIN, BLOCK, "source"))
    with pytest.raises(OrderingError) as raised:
        checker.assert_clean()
    text = str(raised.value)
    for part in (
        "#0 'offload' on stream out reads device[0:4096]",
        "#1 'source' on stream main gives back",
        "recorded on stream out after #0",
    ):
        assert part in text
    for entry in (Waited(OUT, Event()), Synchronized(Event())):
        checker = Checker()
        checker.write(entry)
        with pytest.raises(OrderingError, match="never recorded"):
            checker.assert_clean()
