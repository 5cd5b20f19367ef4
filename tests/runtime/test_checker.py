"""The happens-before checker: every ordering edge that the library relies on, by schedules written by hand."""

from __future__ import annotations

import weakref
from collections import defaultdict

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from eager_offload.runtime import checker as checker_module
from eager_offload.runtime.checker import Checker, Kind, OrderingError
from eager_offload.runtime.recording import Allocated, Freed, Operation, Recorded, Recording, Synchronized, Waited
from eager_offload.tiers.base import Region

MAIN, SIDE, OUT, IN = "main", "side", "out", "in"
BLOCK = Region("device", 0, 4096)
SLOT = Region("slab", 0, 4096)
GRADIENT = Region("device", 8192, 12288)


class Schedule:
    """A recording some of whose entries have names."""

    def __init__(self) -> None:
        self.log = Recording()
        self.edges: dict[str, int] = {}

    def edge(self, name: str) -> Recording:
        """The next entry goes by this name."""
        self.edges[name] = len(self.log.entries)
        return self.log

    def checked(self, without: str | None = None) -> Checker:
        checker = Checker()
        self.log.replay(checker, None if without is None else self.edges[without])
        return checker

    def needs(self, name: str) -> Checker:
        """Asserts that all is well, but not without the entry called ``name``; returns what was found then."""
        self.checked().assert_clean()
        lacking = self.checked(without=name)
        with pytest.raises(OrderingError):
            lacking.assert_clean()
        return lacking


def produce(log: Recording, stream: str = MAIN, what: str = "relu") -> None:
    log.allocate(stream, BLOCK, what)
    log.access(stream, [], [BLOCK], what)


def offload(schedule: Schedule, stream: str = MAIN) -> None:
    """A tensor is made on ``stream`` and copied out."""
    log = schedule.log
    produce(log, stream)
    log.record(stream, "produced")
    schedule.edge("after its operator").wait(OUT, "produced")
    log.access(OUT, [BLOCK], [SLOT], "offload")
    log.record(OUT, "offloaded")


def reload(schedule: Schedule) -> None:
    """The bytes come back into a block that was allocated on the compute stream."""
    log = schedule.log
    log.allocate(MAIN, BLOCK, "reload target")
    log.record(MAIN, "target allocated")
    schedule.edge("after the block's last owner").wait(IN, "target allocated")
    schedule.edge("after the offload").wait(IN, "offloaded")
    log.access(IN, [SLOT], [BLOCK], "reload")
    log.record(IN, "reloaded")


# -- each edge of the ordering law ------------------------------------------------------------------------------------


def test_an_offload_waits_for_an_event_recorded_after_the_producing_operator() -> None:
    schedule = Schedule()
    offload(schedule)
    found = schedule.needs("after its operator")
    (race,) = found.violations
    assert race.earlier is not None
    assert (race.earlier.stream, race.earlier.what, race.later.stream, race.later.what) == (MAIN, "relu", OUT, "offload")


def test_h33_an_event_recorded_before_the_operator_has_filled_its_tensor_is_too_early() -> None:
    log = Recording(checker := Checker())
    produce(log, what="empty_like")
    log.record(MAIN, "packed")
    log.access(MAIN, [], [BLOCK], "rrelu_with_noise")
    log.wait(OUT, "packed")
    log.access(OUT, [BLOCK], [SLOT], "offload")
    (race,) = checker.violations
    assert race.earlier is not None
    assert race.earlier.what == "rrelu_with_noise"


def test_h16_a_source_is_released_after_the_host_has_seen_its_copy_complete() -> None:
    schedule = Schedule()
    offload(schedule)
    schedule.edge("query").synchronize("offloaded")
    schedule.log.free(MAIN, BLOCK, "source")
    produce(schedule.log, what="the next owner")
    found = schedule.needs("query")
    assert found.violations[0].later.kind is Kind.FREE


def test_h16_a_source_is_released_after_its_allocating_stream_has_waited() -> None:
    schedule = Schedule()
    offload(schedule)
    schedule.edge("wait").wait(MAIN, "offloaded")
    schedule.log.free(MAIN, BLOCK, "source")
    produce(schedule.log, what="the next owner")
    found = schedule.needs("wait")
    assert [race.later.kind for race in found.violations] == [Kind.FREE, Kind.ALLOCATE, Kind.WRITE]


@pytest.mark.parametrize("release", ["packing stream waits", "query"])
def test_h14_with_two_compute_streams_only_the_query_releases_a_source(release: str) -> None:
    schedule = Schedule()
    log = schedule.log
    produce(log, MAIN)
    log.record(MAIN, "handed over")
    log.wait(SIDE, "handed over")
    log.access(SIDE, [BLOCK], [], "mul")
    log.record(SIDE, "packed")
    log.wait(OUT, "packed")
    log.access(OUT, [BLOCK], [SLOT], "offload")
    log.record(OUT, "offloaded")
    if release == "query":
        schedule.edge("release").synchronize("offloaded")
    else:
        schedule.edge("release").wait(SIDE, "offloaded")
    log.free(MAIN, BLOCK, "source")
    if release == "query":
        schedule.needs("release")
    else:
        streams = {race.earlier.stream for race in schedule.checked().violations if race.earlier is not None}
        assert streams == {SIDE, OUT}


def test_a_reload_waits_for_an_event_recorded_after_its_target_was_allocated() -> None:
    schedule = Schedule()
    offload(schedule)
    log = schedule.log
    log.wait(MAIN, "offloaded")
    log.free(MAIN, BLOCK, "source")
    log.allocate(MAIN, BLOCK, "scratch")
    log.access(MAIN, [], [BLOCK], "softmax, still queued")
    log.free(MAIN, BLOCK, "scratch")
    reload(schedule)
    log.wait(MAIN, "reloaded")
    log.access(MAIN, [BLOCK], [GRADIENT], "relu backward")
    found = schedule.needs("after the block's last owner")
    assert {race.later.what for race in found.violations} == {"reload"}


def test_an_event_recorded_before_the_target_was_allocated_does_not_do() -> None:
    log = Recording(checker := Checker())
    log.access(MAIN, [], [SLOT], "setup")
    log.record(MAIN, "early")
    log.access(MAIN, [], [BLOCK], "softmax of the last owner")
    log.free(MAIN, BLOCK, "scratch")
    log.allocate(MAIN, BLOCK, "reload target")
    log.wait(IN, "early")
    log.access(IN, [SLOT], [BLOCK], "reload")
    assert [race.later.what for race in checker.violations] == ["reload"]


def test_h17_a_reload_starts_after_the_offload_of_the_same_bytes() -> None:
    schedule = Schedule()
    offload(schedule)
    other = Region("device", 4096, 8192)
    log = schedule.log
    log.allocate(MAIN, other, "reload target")
    log.record(MAIN, "target allocated")
    log.wait(IN, "target allocated")
    schedule.edge("after the offload").wait(IN, "offloaded")
    log.access(IN, [SLOT], [other], "reload")
    found = schedule.needs("after the offload")
    assert [race.later.region for race in found.violations] == [SLOT]


@pytest.mark.parametrize("by", ["wait", "query"])
def test_h18_a_slots_next_write_comes_after_its_last_read(by: str) -> None:
    schedule = Schedule()
    offload(schedule)
    reload_elsewhere(schedule)
    log = schedule.log
    if by == "wait":
        schedule.edge("slot fence").wait(OUT, "reloaded")
    else:
        schedule.edge("slot fence").synchronize("reloaded")
    part = Region(SLOT.space, 1024, 2048)
    log.access(OUT, [], [part], "offload of the slot's next owner")
    found = schedule.needs("slot fence")
    (race,) = found.violations
    assert race.earlier is not None
    assert race.earlier.region == SLOT
    assert race.later.region == part


def reload_elsewhere(schedule: Schedule) -> None:
    other = Region("device", 4096, 8192)
    log = schedule.log
    log.allocate(MAIN, other, "reload target")
    log.record(MAIN, "target allocated")
    log.wait(IN, "target allocated")
    log.wait(IN, "offloaded")
    log.access(IN, [SLOT], [other], "reload")
    log.record(IN, "reloaded")


def test_compute_waits_for_the_reload_before_it_reads() -> None:
    schedule = Schedule()
    offload(schedule)
    schedule.log.synchronize("offloaded")
    schedule.log.free(MAIN, BLOCK, "source")
    reload(schedule)
    schedule.edge("before reading").wait(MAIN, "reloaded")
    schedule.log.access(MAIN, [BLOCK], [GRADIENT], "relu backward")
    found = schedule.needs("before reading")
    assert [race.later.what for race in found.violations] == ["relu backward"]


def test_h14_each_stream_that_reads_a_reload_waits_for_it() -> None:
    schedule = Schedule()
    offload(schedule)
    schedule.log.synchronize("offloaded")
    schedule.log.free(MAIN, BLOCK, "source")
    reload(schedule)
    schedule.log.wait(MAIN, "reloaded")
    schedule.edge("the second stream").wait(SIDE, "reloaded")
    schedule.log.access(SIDE, [BLOCK], [GRADIENT], "relu backward")
    schedule.needs("the second stream")


@pytest.mark.parametrize("by", ["wait", "query"])
def test_h19_an_unused_reload_target_is_released_after_its_copy(by: str) -> None:
    schedule = Schedule()
    offload(schedule)
    schedule.log.synchronize("offloaded")
    schedule.log.free(MAIN, BLOCK, "source")
    reload(schedule)
    if by == "wait":
        schedule.edge("after the copy").wait(MAIN, "reloaded")
    else:
        schedule.edge("after the copy").synchronize("reloaded")
    schedule.log.free(MAIN, BLOCK, "unused reload target")
    found = schedule.needs("after the copy")
    assert [race.later.kind for race in found.violations] == [Kind.FREE]


def test_waiting_for_an_event_that_was_never_recorded_is_reported() -> None:
    schedule = Schedule()
    schedule.edge("record").record(MAIN, "produced")
    schedule.log.wait(OUT, "produced")
    found = schedule.needs("record")
    assert [violation.earlier for violation in found.violations] == [None]
    assert "never recorded" in str(found.violations[0])


def test_querying_an_event_that_was_never_recorded_is_reported() -> None:
    checker = Checker()
    checker.synchronize("nothing")
    with pytest.raises(OrderingError, match="never recorded"):
        checker.assert_clean()


# -- order ------------------------------------------------------------------------------------------------------------


def test_order_is_handed_on_from_stream_to_stream() -> None:
    checker = Checker()
    checker.access("a", [], [BLOCK], "write")
    checker.record("a", 1)
    checker.wait("b", 1)
    checker.record("b", 2)
    checker.wait("c", 2)
    checker.access("c", [BLOCK], [], "read")
    checker.assert_clean()


def test_an_event_says_nothing_of_what_came_after_it() -> None:
    checker = Checker()
    checker.record("a", 1)
    checker.access("a", [], [BLOCK], "write")
    checker.wait("b", 1)
    checker.access("b", [BLOCK], [], "read")
    assert len(checker.violations) == 1


def test_what_was_enqueued_before_the_host_knew_is_not_ordered_by_it() -> None:
    checker = Checker()
    checker.access("a", [], [BLOCK], "write")
    checker.record("a", 1)
    checker.access("b", [BLOCK], [], "read, enqueued too early")
    checker.synchronize(1)
    checker.access("b", [BLOCK], [], "read")
    assert [race.later.what for race in checker.violations] == ["read, enqueued too early"]


def test_an_event_recorded_again_stands_for_the_later_point() -> None:
    checker = Checker()
    checker.record("a", 1)
    checker.access("a", [], [BLOCK], "write")
    checker.record("a", 1)
    checker.wait("b", 1)
    checker.access("b", [BLOCK], [], "read")
    checker.assert_clean()


def test_two_reads_never_conflict() -> None:
    checker = Checker()
    checker.access("a", [BLOCK], [], "read")
    checker.access("b", [BLOCK], [], "read")
    checker.assert_clean()


# -- memory -----------------------------------------------------------------------------------------------------------


def test_ranges_with_other_boundaries_conflict_where_they_overlap() -> None:
    checker = Checker()
    checker.access(OUT, [], [Region("slab", 0, 100)], "first")
    checker.access(IN, [], [Region("slab", 100, 150)], "beside it")
    checker.assert_clean()
    checker.access(MAIN, [Region("slab", 50, 120)], [], "across both")
    assert [race.earlier.what for race in checker.violations if race.earlier is not None] == ["first", "beside it"]


def test_the_same_range_of_two_spaces_does_not_conflict() -> None:
    checker = Checker()
    checker.access(OUT, [], [Region("slab 1", 0, 100)], "first")
    checker.access(IN, [], [Region("slab 2", 0, 100)], "second")
    checker.assert_clean()


def test_an_empty_range_conflicts_with_nothing() -> None:
    checker = Checker()
    checker.access(OUT, [], [Region("slab", 0, 100)], "first")
    checker.access(IN, [], [Region("slab", 50, 50)], "empty")
    checker.assert_clean()
    assert checker.cells == 1


def test_one_pair_is_reported_once_however_often_it_was_cut() -> None:
    checker = Checker()
    checker.access(OUT, [], [Region("slab", 0, 100)], "write")
    for start in range(0, 100, 10):
        checker.access(OUT, [Region("slab", start, start + 5)], [], "read")
    checker.access(IN, [], [Region("slab", 0, 100)], "late")
    assert sum(race.earlier is not None and race.earlier.what == "write" for race in checker.violations) == 1


def test_the_report_says_who_where_and_what_to_do() -> None:
    checker = Checker()
    checker.access(OUT, [BLOCK], [SLOT], "offload")
    checker.free(MAIN, BLOCK, "source")
    with pytest.raises(OrderingError) as raised:
        checker.assert_clean()
    text = str(raised.value)
    for part in ("#0 'offload' on stream out reads device[0:4096]", "#1 'source' on stream main gives back", "recorded on stream out after #0"):
        assert part in text


def test_the_report_of_many_is_short() -> None:
    checker = Checker()
    checker.access(OUT, [], [BLOCK], "offload")
    for index in range(50):
        checker.access(f"stream {index}", [BLOCK], [], "read")
    with pytest.raises(OrderingError, match="50 accesses are out of order") as raised:
        checker.assert_clean()
    assert len(str(raised.value).splitlines()) < 60


def test_h25_memory_stays_bounded_over_many_steps() -> None:
    checker = Checker()
    sizes = set()
    for step in range(20_000):
        event = Event()
        region = Region("device", 64 * (step % 97), 64 * (step % 97) + 64 + step % 13)
        checker.access(MAIN, [], [region], "produce")
        checker.record(MAIN, event)
        checker.synchronize(event)
        if step % 1000 == 999:
            sizes.add(checker.cells)
    checker.assert_clean()
    assert max(sizes) < 1000


def test_h25_an_event_that_nobody_holds_is_forgotten() -> None:
    checker = Checker()
    event = Event()
    checker.record(MAIN, event)
    gone = weakref.ref(event)
    del event
    assert gone() is None


def test_h25_spaces_that_went_are_forgotten() -> None:
    checker = Checker()
    for _ in range(10_000):
        event = Event()
        checker.access(MAIN, [], [Region(event, 0, 64)], "produce")
        checker.record(MAIN, event)
        checker.synchronize(event)
    assert checker.cells < 6_000


class Event:
    """Equal to itself only, like a device's."""


# -- a recording ------------------------------------------------------------------------------------------------------


def test_a_recording_replays_what_it_was_told_and_numbers_entries_as_the_checker_does() -> None:
    schedule = Schedule()
    offload(schedule)
    reload(schedule)
    again = Recording()
    schedule.log.replay(again)
    assert again.entries == schedule.log.entries
    assert schedule.checked().entries == len(schedule.log.entries)
    assert [type(schedule.log.entries[index]) for index in schedule.log.edges] == [Waited] * 3


# -- against brute force ----------------------------------------------------------------------------------------------

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


def reads_and_writes(entry: object) -> tuple[tuple[Region, ...], tuple[Region, ...]]:
    if isinstance(entry, Operation):
        return entry.reads, entry.writes
    if isinstance(entry, Allocated | Freed):
        return (), (entry.region,)
    return (), ()


def overlap(left: tuple[Region, ...], right: tuple[Region, ...]) -> bool:
    return any(a.space == b.space and max(a.start, b.start) < min(a.stop, b.stop) for a in left for b in right)


def brute_force(log: list[object]) -> tuple[set[tuple[int, int]], set[int]]:
    """All unordered conflicting pairs by reachability in the graph of entries, and all waits for nothing."""
    before: list[set[int]] = []
    last_on: dict[object, int] = {}
    recorded: dict[object, int] = {}
    last_synchronize: int | None = None
    for_nothing = set()
    for index, entry in enumerate(log):
        parents = set()
        if isinstance(entry, Synchronized):
            parents |= {last_synchronize} - {None}
            last_synchronize = index
        else:
            parents |= {last_synchronize, last_on.get(entry.stream)} - {None}
            last_on[entry.stream] = index
        if isinstance(entry, Recorded):
            recorded[entry.event] = index
        if isinstance(entry, Waited | Synchronized):
            if entry.event in recorded:
                parents.add(recorded[entry.event])
            else:
                for_nothing.add(index)
        before.append(parents.union(*(before[parent] for parent in parents)))
    pairs = set()
    for later in range(len(log)):
        reads, writes = reads_and_writes(log[later])
        for earlier in set(range(later)) - before[later]:
            earlier_reads, earlier_writes = reads_and_writes(log[earlier])
            if (
                overlap(writes, earlier_reads + earlier_writes) or overlap(reads, earlier_writes)
            ) and not isinstance(log[earlier], Recorded | Waited | Synchronized):
                pairs.add((earlier, later))
    return pairs, for_nothing


@pytest.mark.parametrize("compact_at", [1, 4096])
@settings(max_examples=300, deadline=None)
@given(log=st.lists(entries, max_size=40))
@example(log=[])
def test_the_verdict_equals_that_of_reachability(compact_at: int, log: list[object]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checker_module, "_COMPACT_AT", compact_at)
        checker = Checker()
        for entry in log:
            entry.feed(checker)
    pairs, for_nothing = brute_force(log)
    found = {(v.earlier.number, v.later.number) for v in checker.violations if v.earlier is not None}
    assert found <= pairs
    # An access that a later one stands for is not reported again, but every access that is out of order is.
    assert {later for _, later in found} == {later for _, later in pairs}
    assert {v.later.number for v in checker.violations if v.earlier is None} == for_nothing
    unordered_streams = defaultdict(set)
    for earlier, later in pairs:
        unordered_streams[later].add(log[earlier].stream)
    for earlier, later in found:
        assert log[earlier].stream in unordered_streams[later]
