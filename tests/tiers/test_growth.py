"""H41: while the system gives a slab, or a disk a longer file, only those wait that need it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from torch import Tensor

from eager_offload.tiers.arena import Arena
from eager_offload.tiers.base import MustGrow
from eager_offload.tiers.forking import ForkSafeLock, ReentrantLock
from eager_offload.tiers.host import HostTier
from eager_offload.tiers.space import Space
from eager_offload.tiers.spill import SpillFile
from tests.threads import on_a_thread
from tests.tiers.rig import MIB, System, content, noise, open_tier, reserve, stored

WAITS = 60  # seconds, for what comes at once where all is well


class Slow(System):
    """Gives a slab once ``meanwhile`` has returned, the first time that it has to."""

    meanwhile: Callable[[], object] | None = None

    def __call__(self, nbytes: int) -> Tensor:
        meanwhile, self.meanwhile = self.meanwhile, None
        if meanwhile is not None:
            meanwhile()
        return super().__call__(nbytes)


class Watched:
    """A lock that says who is about to wait for it."""

    def __init__(self, lock: ReentrantLock) -> None:
        self._lock = lock
        self.waits = threading.Event()

    def __enter__(self) -> None:
        if not self._lock.acquire(blocking=False):
            self.waits.set()
            self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    def _is_owned(self) -> bool:
        return self._lock._is_owned()


def watched(lock: ForkSafeLock) -> threading.Event:
    lock.lock = found = Watched(lock.lock)
    return found.waits


@pytest.fixture
def system() -> Slow:
    return Slow()


def test_h41_other_threads_have_slots_and_leases_and_are_told_what_is_held(arena: Arena, system: Slow) -> None:
    tier = HostTier(arena, 64 * MIB)
    first = reserve(tier, 4096)

    def others() -> None:
        assert not arena._lock.is_held(), "or they would wait for ever"
        slots.append(on_a_thread(lambda: reserve(tier, 8192)))
        leases.append(on_a_thread(lambda: arena.lease(8192)))
        assert on_a_thread(lambda: (arena.used_bytes, tier.held_bytes)) == (4096 + 2 * 8192, MIB)

    slots, leases = [first], []
    system.meanwhile = others
    slots.append(reserve(tier, 3 * MIB))
    assert system.sizes == [MIB, 3 * MIB]
    assert len({slot.region for slot in slots}) == 3
    assert arena.used_bytes == 4096 + 2 * 8192 + 3 * MIB
    del first
    slots.clear()
    leases.clear()
    assert arena.used_bytes == 0


@pytest.mark.parametrize("kind", ["slots", "leases"])
def test_h41_two_threads_that_need_a_slab_at_once_take_one_where_one_does(
    kind: str, arena: Arena, system: Slow
) -> None:
    take = arena.allocate if kind == "slots" else arena.lease
    waits = watched(arena._growth)
    with ThreadPoolExecutor(1) as pool:

        def second() -> None:
            others.append(pool.submit(take, 8192))
            assert waits.wait(WAITS)

        others = []
        system.meanwhile = second
        mine = take(8192)
        other = others[0].result(WAITS)
    assert system.sizes == [MIB]
    assert mine is not None
    assert other is not None
    assert arena.used_bytes == 2 * 8192


def test_h26_h41_threads_that_grow_at_once_stay_within_the_budget_of_all(arena: Arena, system: Slow) -> None:
    tier, held = HostTier(arena, 5 * MIB), []
    waits = watched(arena._growth)
    with ThreadPoolExecutor(1) as pool:

        def second() -> None:
            others.append(pool.submit(tier.reserve, 3 * MIB))
            assert waits.wait(WAITS)
            held.append(tier.held_bytes)

        others = []
        system.meanwhile = second
        mine = tier.reserve(3 * MIB)
        assert mine is not None
        assert others[0].result(WAITS) is None
    assert system.sizes == [3 * MIB]
    assert held == [0]
    assert tier.held_bytes == 3 * MIB
    assert tier.shortage.reason.startswith("all of host_budget is in use")


def test_what_another_thread_has_taken_of_a_budget_meanwhile_is_not_taken_twice(arena: Arena, system: Slow) -> None:
    tier, other = HostTier(arena, 4 * MIB), HostTier(arena, 64 * MIB)
    idle = reserve(tier, 2 * MIB)
    del idle
    taken = []
    system.meanwhile = lambda: taken.append(on_a_thread(lambda: reserve(tier, 2 * MIB)))
    assert tier.reserve(3 * MIB) is None
    assert tier.used_bytes == tier.held_bytes == tier.peak_bytes == 2 * MIB
    assert len(system.alive) == 1, "the slab is back"
    assert other.used_bytes == 0


@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError])
def test_h10_what_ends_a_growth_leaves_nothing_behind(error: type[BaseException], arena: Arena, system: Slow) -> None:
    tier = HostTier(arena, 64 * MIB)

    def fail() -> None:
        if error is MemoryError:
            system.refuse = True
        raise error

    system.meanwhile = fail
    if error is KeyboardInterrupt:
        with pytest.raises(KeyboardInterrupt):
            tier.reserve(MIB)
    else:
        assert tier.reserve(MIB) is None
        assert tier.shortage.reason == "the system refused it (none left)"
    system.refuse = False
    assert tier.used_bytes == tier.held_bytes == len(system.alive) == 0
    slot = on_a_thread(lambda: reserve(tier, MIB))
    slot.write(noise(MIB))
    assert torch.equal(slot.tensor, noise(MIB))


def test_what_is_at_hand_takes_nothing_from_the_system(arena: Arena, system: Slow) -> None:
    tier = HostTier(arena, 2 * MIB)
    with pytest.raises(MustGrow):
        tier.at_hand(8192)
    assert system.sizes == []
    assert tier.held_bytes == tier.peak_bytes == 0
    slot = reserve(tier, 8192)
    other = tier.at_hand(8192)
    assert other is not None
    assert other.region != slot.region
    assert tier.peak_bytes == 2 * 8192
    assert tier.at_hand(2 * MIB) is None, "the budget has no room, and the system need not be asked"


# -- of a spill file --------------------------------------------------------------------------------------------------


def in_the_midst(monkeypatch: pytest.MonkeyPatch, meanwhile: Callable[[], object]) -> None:
    """Calls ``meanwhile`` where a file was made longer, the first time that one is."""
    extend, calls = SpillFile.extend, [meanwhile]

    def extending(file: SpillFile, length: int, nbytes: int) -> bool:
        found = extend(file, length, nbytes)
        if calls:
            calls.pop()()
        return found

    monkeypatch.setattr(SpillFile, "extend", extending)


def test_h41_other_threads_have_room_of_a_disk_while_its_file_grows(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier, _ = open_tier(directory)
    slots = [stored(tier, noise(8192))]
    length = tier.held_bytes

    def others() -> None:
        assert not tier._lock.is_held(), "or they would wait for ever"
        slots.append(on_a_thread(lambda: tier.at_hand(8192)))
        assert on_a_thread(lambda: (tier.used_bytes, tier.held_bytes)) == (2 * 8192, length)

    in_the_midst(monkeypatch, others)
    large = stored(tier, noise(length, 1))
    slots[1].write(noise(8192, 2))
    assert tier.held_bytes > length
    assert tier.used_bytes == length + 2 * 8192
    assert torch.equal(content(large), noise(length, 1))
    assert [torch.equal(content(slot), noise(8192, seed)) for slot, seed in zip(slots, (0, 2), strict=True)] == [
        True
    ] * 2


def test_h26_h41_threads_that_grow_a_file_at_once_stay_within_its_budget(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier, _ = open_tier(directory, budget=5 * MIB)
    waits, others = watched(tier._growth), list[Future[object]]()
    with ThreadPoolExecutor(1) as pool:

        def second() -> None:
            others.append(pool.submit(tier.reserve, 3 * MIB))
            assert waits.wait(WAITS)

        in_the_midst(monkeypatch, second)
        mine = tier.reserve(3 * MIB)
        assert mine is not None
        assert others[0].result(WAITS) is None
    assert tier.held_bytes <= 5 * MIB
    assert tier.used_bytes == 3 * MIB


@pytest.mark.parametrize("what", ["an interrupt", "a close", "another growth"])
def test_what_comes_in_the_midst_of_a_growth_of_a_file_leaves_nothing_behind(
    what: str, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier, _ = open_tier(directory)

    def meanwhile() -> None:
        if what == "an interrupt":
            raise KeyboardInterrupt
        if what == "a close":
            on_a_thread(tier.close)
            return
        with pytest.raises(RuntimeError, match="in the midst of a call"):
            tier.reserve(8192)

    in_the_midst(monkeypatch, meanwhile)
    with pytest.raises(KeyboardInterrupt) if what == "an interrupt" else nullcontext():
        assert (tier.reserve(8192) is None) == (what == "a close")
    assert tier.used_bytes == 0
    if what != "a close":
        assert torch.equal(content(stored(tier, noise(MIB))), noise(MIB))


def test_what_a_disk_has_at_hand_lengthens_no_file(directory: Path) -> None:
    tier, _ = open_tier(directory, budget=2 * MIB)
    with pytest.raises(MustGrow):
        tier.at_hand(8192)
    assert tier.held_bytes == tier.peak_bytes == 0
    slot = reserve(tier, 8192)
    other = tier.at_hand(8192)
    assert other is not None
    assert other.region != slot.region
    assert tier.at_hand(2 * MIB) is None, "the budget has no room, and the disk need not be asked"


@pytest.mark.parametrize("midst", ["register", "_take_back"])
def test_what_is_counted_may_be_asked_in_the_midst_of_a_change(
    midst: str, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a signal handler, say, of the thread that makes the change: what has died is taken up later."""
    tier, _ = open_tier(directory)
    first, change, asked = stored(tier, noise(8192)), getattr(Space, midst), list[int]()

    def changing(space: Space, *arguments: object) -> None:
        tier.restart_peak()
        asked.append(tier.used_bytes + tier.written_bytes)
        for take in (tier.at_hand, tier.reserve):
            with pytest.raises(RuntimeError, match="in the midst of a call"):
                take(8192)
        change(space, *arguments)

    monkeypatch.setattr(Space, midst, changing)
    del first
    slots = [stored(tier, noise(8192, seed)) for seed in range(3)]
    assert asked
    assert len({slot.region for slot in slots}) == 3
    for seed, slot in enumerate(slots):
        assert torch.equal(content(slot), noise(8192, seed))
    assert tier.used_bytes == 3 * 8192
