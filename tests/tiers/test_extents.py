"""The range allocator, against a model that remembers every byte."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eager_offload.tiers.base import Fence
from eager_offload.tiers.extents import Extent, Extents
from tests.tiers.verdicts import Verdicts


def test_a_request_takes_the_smallest_hole_that_holds_it() -> None:
    extents = Extents(100)
    taken = [extents.allocate(nbytes) for nbytes in (10, 1, 6, 1, 20, 62)]
    assert [extent.start for extent in taken if extent] == [0, 10, 11, 17, 18, 38]
    extents.release(0, 10)
    extents.release(11, 6)
    extents.release(18, 20)
    assert extents.allocate(5) == Extent(11, 5, ())
    assert extents.allocate(7) == Extent(0, 7, ())
    assert extents.largest_free == 20
    assert extents.free_bytes == 1 + 3 + 20


def test_neighbours_melt_together_in_any_order() -> None:
    for order in ((0, 1, 2), (0, 2, 1), (1, 0, 2), (1, 2, 0), (2, 0, 1), (2, 1, 0)):
        extents = Extents(30)
        assert [extents.allocate(10) for _ in range(3)] == [Extent(start, 10, ()) for start in (0, 10, 20)]
        for at in order:
            extents.release(10 * at, 10)
        assert extents.largest_free == extents.free_bytes == extents.length == 30


def test_growth_joins_the_free_end_unless_there_is_a_gap() -> None:
    extents = Extents(8)
    assert extents.grow(8) == 8
    assert extents.largest_free == extents.free_at_end == 16
    assert extents.grow(8, gap=4) == 20
    assert extents.largest_free == 16
    assert extents.free_at_end == 8
    assert extents.length == 28
    extents.withdraw(20, 8)
    assert extents.free_bytes == 16
    assert extents.allocate(17) is None


def test_a_request_gets_the_fences_of_its_own_bytes_and_no_others() -> None:
    verdicts, extents = Verdicts(), Extents(30)
    one, two, three = (verdicts.fence(name) for name in ("one", "two", "three"))
    for _ in range(3):
        extents.allocate(10)
    extents.release(0, 10, [one])
    extents.release(10, 10, [two])
    extents.release(20, 10, [three, one])
    assert extents.allocate(5) == Extent(0, 5, (one,))
    assert extents.allocate(10) == Extent(5, 10, (one, two))
    verdicts.over.add("three")
    assert extents.allocate(15) == Extent(15, 15, (two, one))


def test_fences_that_have_passed_are_not_hoarded() -> None:
    verdicts, extents = Verdicts(), Extents(1 << 20)
    for event in range(1000):
        extents.release(extents.allocate(64).start, 64, [verdicts.fence(event)])  # type: ignore[union-attr]
        verdicts.over.add(event)
    # The last ones may wait for the next look.
    assert extents.largest_free == 1 << 20
    [free] = extents._by_start.values()
    assert len(free.uses) <= 16


def test_giving_back_twice_is_noticed() -> None:
    extents = Extents(10)
    extents.allocate(10)
    extents.release(0, 10)
    extents.release(0, 10)
    with pytest.raises(AssertionError, match="twice"):
        _ = extents.largest_free  # noticed when what was released lately is put in its place


class _Model:
    """What each byte of the space is: free with fences, or handed out."""

    def __init__(self) -> None:
        self.free: list[bool] = []
        self.fences: list[set[Fence]] = []

    def grow(self, nbytes: int) -> None:
        self.free += [True] * nbytes
        self.fences += [set() for _ in range(nbytes)]

    def holes(self) -> list[tuple[int, int]]:
        found, start = [], None
        for at, free in enumerate([*self.free, False]):
            if free and start is None:
                start = at
            elif not free and start is not None:
                found.append((at - start, start))
                start = None
        return found


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_any_sequence_never_overlaps_melts_fully_and_loses_no_fence(data: st.DataObject) -> None:
    verdicts, extents, model = Verdicts(), Extents(), _Model()
    live: list[Extent] = []
    events, looked = 0, True
    for _ in range(data.draw(st.integers(1, 60), "steps")):
        what = data.draw(st.sampled_from(["allocate", "allocate", "release", "grow", "pass", "look"]), "what")
        if what == "grow":
            nbytes = data.draw(st.integers(1, 20), "more")
            assert extents.grow(nbytes) == len(model.free)
            model.grow(nbytes)
        elif what == "allocate":
            nbytes = data.draw(st.integers(1, 12), "nbytes")
            extent = extents.allocate(nbytes)
            fitting = [hole for hole in model.holes() if hole[0] >= nbytes]
            assert (extent is None) == (not fitting)
            if extent is None:
                continue
            assert extent.nbytes == nbytes
            if looked:
                assert extent.start == min(fitting)[1], "not the best fit"
            mine = range(extent.start, extent.start + nbytes)
            assert all(model.free[at] for at in mine), "handed out twice"
            expected = {fence for at in mine for fence in model.fences[at] if not fence.passed()}
            assert set(extent.fences) == expected
            assert len(extent.fences) == len(expected)
            for at in mine:
                model.free[at] = False
            live.append(extent)
        elif what == "release" and live:
            extent = live.pop(data.draw(st.integers(0, len(live) - 1), "which"))
            # A slot that dies hands on what it was given and what it was used for.
            fences = list(extent.fences)
            for _ in range(data.draw(st.integers(0, 2), "uses")):
                fences.append(verdicts.fence(events))
                events += 1
            extents.release(extent.start, extent.nbytes, fences)
            for at in range(extent.start, extent.start + extent.nbytes):
                model.free[at] = True
                model.fences[at] = set(fences)
            looked = False
        elif what == "pass" and events:
            verdicts.over.add(data.draw(st.integers(0, events - 1), "event"))
        elif what == "look":
            # Whoever asks about the free ranges gets them whole.
            assert extents.largest_free == max((nbytes for nbytes, _ in model.holes()), default=0)
            looked = True
        assert extents.free_bytes == sum(model.free)
        assert extents.length == len(model.free)
    for extent in live:
        extents.release(*extent)
    assert extents.largest_free == extents.free_bytes == extents.length
