"""The happens-before checker's verdict on random schedules, against reachability in the graph of all entries."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eager_offload.runtime import checker as checker_module
from eager_offload.runtime.checker import Checker
from eager_offload.runtime.recording import Allocated, Entry, Freed, Operation, Recorded, Synchronized, Waited
from eager_offload.tiers.base import Region

STREAMS = ["a", "b", "c"]
EVENTS = [1, 2, 3, 4]

regions = st.builds(
    lambda space, start, length: Region(space, start, start + length),
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
    #: Waits for an event that nobody had recorded.
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

    def races(self) -> set[Pair]:
        """Every pair of conflicting entries of which neither comes before the other."""
        return {
            Pair(earlier, later)
            for later in range(len(self.log))
            for earlier in set(range(later)) - self.before[later]
            if conflict(touched(self.log[earlier]), touched(self.log[later]))
        }


class Pair(NamedTuple):
    """Two entries by index."""

    earlier: int
    later: int


class Touched(NamedTuple):
    """What an entry does to memory."""

    reads: tuple[Region, ...] = ()
    writes: tuple[Region, ...] = ()


def touched(entry: Entry) -> Touched:
    if isinstance(entry, Operation):
        return Touched(entry.reads, entry.writes)
    if isinstance(entry, Allocated | Freed):
        return Touched(writes=(entry.region,))
    return Touched()


def conflict(one: Touched, other: Touched) -> bool:
    return overlap(one.writes, other.reads + other.writes) or overlap(one.reads, other.writes)


def overlap(left: tuple[Region, ...], right: tuple[Region, ...]) -> bool:
    return any(a.space == b.space and max(a.start, b.start) < min(a.stop, b.stop) for a in left for b in right)


@pytest.mark.parametrize("compact_at", [1, 4096])
@settings(max_examples=300, deadline=None)
@given(log=st.lists(entries, max_size=40))
def test_the_verdict_equals_that_of_reachability(compact_at: int, log: list[Entry]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checker_module, "_COMPACT_AT", compact_at)
        checker = Checker()
        for entry in log:
            entry.feed(checker)
    graph = Graph(log)
    races = graph.races()
    found = {Pair(v.earlier.number, v.later.number) for v in checker.violations if v.earlier is not None}
    assert found <= races
    # An access that a later one stands for is not reported again, but every access that is out of order is.
    assert {race.later for race in found} == {race.later for race in races}
    assert {v.later.number for v in checker.violations if v.earlier is None} == graph.for_nothing
