"""How many pieces of a transfer are in flight: the search, against disks that are formulas."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from eager_offload.tiers.depth import DepthSearch

MIB, GIB = 1 << 20, 1 << 30


def run(search: DepthSearch, rate_of: Callable[[int], float], nbytes: int = 16 * MIB, times: int = 100) -> None:
    for _ in range(times):
        search.note(nbytes, nbytes / rate_of(search.depth))


@pytest.mark.parametrize(
    ("rate_of", "settles_at"),
    [
        (lambda depth: 1e9, 1),
        (lambda depth: 1e9 / depth, 1),
        (lambda depth: 1e9 * min(depth, 2), 2),
        (lambda depth: 1e9 * min(depth, 4), 4),
        (lambda depth: 1e9 * min(depth, 3), 4),
        (lambda depth: 1e9 * depth, 8),
    ],
)
def test_the_depth_doubles_while_throughput_grows(rate_of: Callable[[int], float], settles_at: int) -> None:
    search = DepthSearch(1, 8)
    run(search, rate_of)
    assert search.settled
    assert search.depth == settles_at


def test_a_depth_is_judged_by_more_than_one_transfer_and_by_enough_bytes() -> None:
    search = DepthSearch(1, 8)
    run(search, lambda _: 1e9, nbytes=GIB, times=3)
    assert search.depth == 1, "one slow transfer says nothing"
    run(search, lambda _: 1e9, nbytes=GIB, times=1)
    assert search.depth == 2
    run(search, lambda _: 1e9, nbytes=4 * MIB, times=15)
    assert search.depth == 2, "nor do a few small ones"
    run(search, lambda _: 1e9, nbytes=4 * MIB, times=1)
    assert search.depth == 1
    assert search.settled


def test_several_disks_are_never_fewer_pieces_than_disks() -> None:
    search = DepthSearch(3, 8)
    run(search, lambda depth: 1e9 / depth)
    assert search.depth == 3
    assert search.settled


def test_what_was_found_is_looked_at_again_since_disks_change() -> None:
    search = DepthSearch(1, 8)
    run(search, lambda depth: 1e9 * depth)
    assert search.depth == 8
    run(search, lambda depth: 1e9 / depth, nbytes=GIB, times=75)
    assert search.depth == 1


class Met(DepthSearch):
    """Another thread's transfers end right before ``attribute`` is set at the end of a trial."""

    def __init__(self, attribute: str, depth: int) -> None:
        self._attribute = ""
        super().__init__(1, 8)
        self.depth, self._rate, self._attribute = depth, 1e9, attribute

    def __setattr__(self, name: str, value: object) -> None:
        if name == self.__dict__.get("_attribute") and getattr(value, "transfers", 4) == 4:
            self._attribute = ""
            run(self, lambda _: 1e9 if name == "_trial" else 1e11, times=4)
        super().__setattr__(name, value)


@pytest.mark.parametrize(("attribute", "rate", "depths"), [("_trial", 1e9, (2, 1)), ("_rate", 1e10, (4, 8))])
def test_two_threads_at_the_end_of_a_trial_leave_the_depth_within_its_bounds(
    attribute: str, rate: float, depths: tuple[int, int]
) -> None:
    before, after = depths
    search = Met(attribute, before)
    run(search, lambda _: rate, times=4)
    assert search.depth == after
