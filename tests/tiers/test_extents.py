"""The range allocator, against a model that remembers every byte."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eager_offload.tiers.base import Fence
from eager_offload.tiers.extents import Extent, Extents
from tests.tiers.rig import Verdicts


def test_a_request_takes_the_smallest_hole_that_holds_it() -> None:
    extents = Extents(100)
    taken = [extents.allocate(nbytes) for nbytes in (10, 1, 6, 1, 20, 62)]
    assert [extent.start for extent in taken if extent] == [0, 10, 11, 17, 18, 38]
    extents.release(Extent(0, 10))
    extents.release(Extent(11, 6))
    extents.release(Extent(18, 20))
    assert extents.allocate(5) == Extent(11, 5, ())
    assert extents.allocate(7) == Extent(0, 7, ())
    assert extents.free_bytes == 1 + 3 + 20
    assert extents.allocate(21) is None
    assert extents.allocate(20) == Extent(18, 20)


def three_released() -> tuple[Verdicts, Extents]:
    verdicts, extents = Verdicts(), Extents(30)
    for _ in range(3):
        extents.allocate(10)
    for at, name in enumerate(("one", "two", "three")):
        extents.release(Extent(10 * at, 10, (verdicts.fence(name),)))
    return verdicts, extents


def test_a_request_gets_the_fences_of_its_own_bytes_and_no_others() -> None:
    verdicts, extents = three_released()
    assert extents.allocate(10) == Extent(20, 10, (verdicts.fence("three"),)), "the same size, the newest first"
    assert extents.allocate(4) == Extent(10, 4, (verdicts.fence("two"),)), "a part of a larger one"
    assert extents.allocate(6) == Extent(14, 6, (verdicts.fence("two"),)), "and the rest of that"
    verdicts.over.add("one")
    assert extents.allocate(7) == Extent(0, 7)


def test_what_is_not_in_use_any_more_serves_before_what_is() -> None:
    verdicts, extents = three_released()
    verdicts.over.update({"one", "two"})
    assert extents.allocate(12) == Extent(0, 12)
    assert extents.allocate(8) == Extent(12, 8)
    assert extents.allocate(8) == Extent(20, 8, (verdicts.fence("three"),))


def test_giving_back_twice_is_noticed() -> None:
    extents = Extents(10)
    extents.allocate(10)
    extents.release(Extent(0, 10))
    extents.release(Extent(0, 10))
    with pytest.raises(AssertionError, match="twice"):
        extents.allocate(20)  # noticed when what was released is put in its place


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
    events = 0
    for _ in range(data.draw(st.integers(1, 60), "steps")):
        what = data.draw(st.sampled_from(["allocate", "allocate", "release", "grow", "pass", "anew"]), "what")
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
            mine = range(extent.start, extent.start + nbytes)
            assert all(model.free[at] for at in mine), "handed out twice"
            expected = {fence for at in mine for fence in model.fences[at] if not fence.passed()}
            assert set(extent.fences) >= expected, "a use of these bytes goes on"
            assert len(set(extent.fences)) == len(extent.fences)
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
            extents.release(Extent(extent.start, extent.nbytes, tuple(fences)))
            for at in range(extent.start, extent.start + extent.nbytes):
                model.free[at] = True
                model.fences[at] = set(fences)
        elif what == "pass" and events:
            verdicts.over.add(data.draw(st.integers(0, events - 1), "event"))
        elif what == "anew":
            extents = extents.free_but_for(live, [Extent(0, extents.length)])
        assert extents.free_bytes == sum(model.free)
        assert extents.length == len(model.free)
    for extent in live:
        extents.release(extent)
    assert extents.free_bytes == extents.length
    assert not model.free or extents.allocate(extents.length) is not None, "not coalesced"
