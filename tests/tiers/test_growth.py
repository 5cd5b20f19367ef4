"""H41: while the system gives memory, or a disk a longer file, only those wait that need it."""

from __future__ import annotations

import errno
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import pytest

from eager_offload.tiers.pool import Pool
from tests.simulation.log import region_of
from tests.threads import on_a_thread
from tests.tiers.files import failure
from tests.tiers.rig import MIB, Made, equal, noise, stored

WAITS = 60  # seconds, for what comes at once where all is well


def test_h41_other_threads_have_room_and_are_told_what_is_held(made: Made) -> None:
    tier = made.tier
    slots, leases = [stored(tier, noise(8192))], []
    held = tier.held_bytes

    def others() -> None:
        assert not made.owner._lock.is_held(), "or they would wait for ever"
        slots.append(on_a_thread(lambda: tier.at_hand(8192)))
        assert on_a_thread(lambda: (tier.used_bytes, tier.held_bytes)) == (2 * 8192, held)
        if isinstance(made.owner, Pool):
            leases.append(on_a_thread(lambda: made.owner.lease(8192)))

    made.in_the_next_growth(others)
    slots.append(stored(tier, noise(held + 5, 2)))
    slots[1].write(noise(8192, 1))
    assert len(slots) == len({region_of(slot) for slot in slots}) == 3
    assert tier.used_bytes == held + 5 + 2 * 8192
    assert tier.held_bytes == made.taken_bytes > held
    assert equal(slots, (0, 1, 2))


def at_once(made: Made, take: Callable[[], object]) -> tuple[object, object]:
    """What two threads take of which one waits for the growth of the other one."""
    waits, others = made.waits_for_growth(), []
    with ThreadPoolExecutor(1) as pool:

        def second() -> None:
            others.append(pool.submit(take))
            assert waits.wait(WAITS)

        made.in_the_next_growth(second)
        return take(), others[0].result(WAITS)


def test_h26_h41_threads_that_grow_at_once_stay_within_the_budget(made: Made) -> None:
    budget = 256 * MIB
    first, second = at_once(made, lambda: made.tier.reserve(budget // 2 + MIB))
    assert first is not None
    assert second is None
    assert made.tier.used_bytes == budget // 2 + MIB <= made.tier.held_bytes == made.taken_bytes <= budget
    assert made.tier.shortage.reason.startswith(f"all of {made.tier.name}_budget is in use")


@pytest.mark.parametrize("what", ["host", "disk", "leases"])
def test_h41_two_threads_that_need_growth_at_once_take_one_where_one_does(what: str, directory: Path) -> None:
    made = Made("disk" if what == "disk" else "host", directory)
    both = at_once(made, partial(made.owner.lease if what == "leases" else made.tier.reserve, 8192))
    assert None not in both
    assert made.taken_bytes == (64 * MIB if what == "disk" else MIB)


@pytest.mark.parametrize("what", ["an interrupt", "a refusal", "another growth", "a close"])
def test_h10_what_ends_a_growth_leaves_nothing_behind(what: str, made: Made) -> None:
    tier, reached = made.tier, []

    def meanwhile() -> None:
        reached.append(what)
        if what == "an interrupt":
            raise KeyboardInterrupt
        if what == "a refusal":
            made.refuses(failure(errno.ENOSPC))
        if what == "a close":
            on_a_thread(tier.close)
            return
        with pytest.raises(RuntimeError, match="while another call of eager_offload runs"):
            tier.reserve(8192)

    made.in_the_next_growth(meanwhile)
    with pytest.raises(KeyboardInterrupt) if what == "an interrupt" else nullcontext():
        slot = tier.reserve(MIB)
        assert (slot is None) == (what == "a refusal" or (what == "a close" and bool(made.files)))
        if what == "a refusal" and not made.files:
            assert tier.shortage.reason == "the system refused it (No space left on device)"
        del slot
    made.refuses(None)
    assert reached == [what]
    assert tier.used_bytes == 0
    if what == "a close":
        tier.close()
        return
    assert tier.held_bytes == made.taken_bytes or what == "an interrupt", "a file keeps what an interrupt gave it"
    assert equal([on_a_thread(lambda: stored(tier, noise(10 * MIB)))], [0])
    assert tier.held_bytes == made.taken_bytes <= 64 * MIB
