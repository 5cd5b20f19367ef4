"""The happens-before checker: what orders what, which bytes conflict, what it reports and what it forgets."""

from __future__ import annotations

import weakref

import pytest

from eager_offload.runtime.checker import Checker, OrderingError
from eager_offload.runtime.recording import (
    Allocated,
    Entry,
    Freed,
    Operation,
    Recorded,
    Recording,
    Synchronized,
    Waited,
)
from eager_offload.tiers.base import Region

MAIN, OUT, IN = "main", "out", "in"
BLOCK = Region("device", 0, 4096)
SLOT = Region("slab", 0, 4096)


class Event:
    """Equal to itself only, like a device's."""


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


def test_what_came_before_an_ordered_write_is_not_reported_beside_it() -> None:
    checker = Checker()
    checker.access("a", [], [BLOCK], "write")
    checker.access("a", [BLOCK], [], "read")
    checker.record("a", 1)
    checker.wait("b", 1)
    checker.access("b", [], [BLOCK], "ordered write")
    checker.access("c", [], [BLOCK], "late write")
    assert [race.earlier.what for race in checker.violations if race.earlier is not None] == ["ordered write"]


def test_the_report_says_who_where_and_what_to_do() -> None:
    checker = Checker()
    checker.access(OUT, [BLOCK], [SLOT], "offload")
    checker.free(MAIN, BLOCK, "source")
    with pytest.raises(OrderingError) as raised:
        checker.assert_clean()
    text = str(raised.value)
    for part in (
        "#0 'offload' on stream out reads device[0:4096]",
        "#1 'source' on stream main gives back",
        "recorded on stream out after #0",
    ):
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


# -- a recording ------------------------------------------------------------------------------------------------------

ENTRIES: list[Entry] = [
    Allocated(MAIN, BLOCK, "relu"),
    Operation(MAIN, (), (BLOCK,), "relu"),
    Recorded(MAIN, 1),
    Waited(OUT, 1),
    Operation(OUT, (BLOCK,), (SLOT,), "offload"),
    Recorded(OUT, 2),
    Synchronized(2),
    Freed(MAIN, BLOCK, "source"),
]


def test_a_recording_replays_what_it_was_told_and_passes_it_on() -> None:
    checker = Checker()
    recording = Recording(checker)
    for entry in ENTRIES:
        entry.feed(recording)
    recording.replay(again := Recording())
    assert recording.entries == again.entries == ENTRIES
    assert checker.entries == len(ENTRIES)
    assert recording.edges == [3, 6]


def test_a_recording_leaves_out_one_entry_and_numbers_are_its_indices() -> None:
    recording = Recording()
    for entry in ENTRIES:
        entry.feed(recording)
    recording.replay(checker := Checker(), without=6)
    (race,) = checker.violations
    assert race.earlier is not None
    assert (race.earlier.number, race.later.number) == (4, 6)
