"""Every ordering edge that the library relies on: the whole schedule is clean, one that lacks it is reported."""

from __future__ import annotations

import pytest

from eager_offload.runtime.checker import Checker, Kind, OrderingError
from eager_offload.runtime.recording import Recording
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
    assert (race.earlier.stream, race.earlier.what, race.later.stream, race.later.what) == (
        MAIN,
        "relu",
        OUT,
        "offload",
    )


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
