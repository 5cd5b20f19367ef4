"""H10: an interrupt at any line of a tier: no byte is handed out twice, every range and every fence comes back."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from linecache import getline
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch

import eager_offload.tiers
from eager_offload.tiers.arena import Arena
from eager_offload.tiers.base import Slot, Tier
from eager_offload.tiers.disk import DiskTier
from eager_offload.tiers.host import HostTier
from tests.sampling import one_in
from tests.tiers.files import Watched
from tests.tiers.rig import MIB, System, Verdicts, content, noise, reserve

_HERE = str(Path(eager_offload.tiers.__file__).parent)


@contextmanager
def interrupted_at(number: int) -> Iterator[list[int]]:
    """Within it, a KeyboardInterrupt comes before the line of the tiers' code of that number; yields how many came."""
    lines = [0]

    def trace(frame: FrameType, event: str, arg: object) -> Any:
        if not frame.f_code.co_filename.startswith(_HERE):
            return None
        # Behind these the interpreter does not look for signals.
        silent = getline(frame.f_code.co_filename, frame.f_lineno).lstrip().startswith(("with ", "try:"))
        if event == "line" and not silent:
            lines[0] += 1
            if lines[0] == number:
                raise KeyboardInterrupt
        return trace

    sys.settrace(trace)
    try:
        yield lines
    finally:
        sys.settrace(None)


def steps(tier: Tier, verdicts: Verdicts) -> None:
    """Every way in which room is found, and comes back."""
    first = [tier.reserve(nbytes) for nbytes in (100, 8192, 8192, 70_000, 700_000, 2 * MIB)]
    for name, slot in enumerate(first):
        assert slot is not None
        slot.fences += (verdicts.fence(name),)
    del slot, first[::2]
    verdicts.over.update(range(4))
    second = [tier.reserve(nbytes) for nbytes in (8192, 5000, 12_000, 3 * MIB, 66 * MIB)]
    assert None not in second
    first.clear()
    assert tier.used_bytes > 0


def host(directory: Path) -> tuple[Tier, Callable[[], bool]]:
    system = System()
    arena = Arena(system, slab_bytes=MIB, idle_bytes=MIB)
    return HostTier(arena, 256 * MIB), lambda: not system.alive


def disk(directory: Path) -> tuple[Tier, Callable[[], bool]]:
    Watched.opened.clear()
    return DiskTier([directory, directory], 512 * MIB, file_type=Watched), lambda: True


@pytest.mark.parametrize("make", [host, disk])
def test_h10_an_interrupt_at_any_line_loses_no_room_and_no_fence(
    make: Callable[[Path], tuple[Tier, Callable[[], bool]]], directory: Path
) -> None:
    tier, _ = make(directory)
    with interrupted_at(0) as lines:
        steps(tier, Verdicts())
    numbers = one_in(30, list(range(1, lines[0] + 1)))
    assert len(numbers) > 25
    for number in numbers:
        (tier, is_gone), verdicts = make(directory), Verdicts()
        with interrupted_at(number), pytest.raises(KeyboardInterrupt):
            steps(tier, verdicts)
        assert tier.used_bytes == 0, number
        slots: list[tuple[Slot, int]] = []
        for seed, nbytes in enumerate((8192, 100, 8192, 70_000, 600_000)):
            slot = reserve(tier, nbytes)
            slot.write(noise(nbytes, seed))
            slots.append((slot, seed))
        assert all(torch.equal(content(slot), noise(slot.nbytes, seed)) for slot, seed in slots), number
        assert tier.used_bytes == sum(slot.nbytes for slot, _ in slots)
        del slot
        slots.clear()
        assert tier.used_bytes == 0
        verdicts.over.update(range(10))
        tier.close()
        assert tier.used_bytes == tier.held_bytes == 0, number
        assert is_gone(), number


def test_h10_an_interrupt_at_any_line_hands_no_lease_out_twice() -> None:
    def lease_again(arena: Arena) -> None:
        leases = [arena.lease(nbytes) for nbytes in (8192, 8192, 70_000)]
        for _ in range(3):
            del leases[0]
            leases.append(arena.lease(8192))
            del leases[0]
            leases.append(arena.lease(100))

    with interrupted_at(0) as lines:
        lease_again(Arena(System(), slab_bytes=MIB))
    for number in one_in(3, list(range(1, lines[0] + 1))):
        system = System()
        arena = Arena(system, slab_bytes=MIB, idle_bytes=MIB)
        kept = arena.lease(8192).copy_(noise(8192, 99))
        with suppress(KeyboardInterrupt), interrupted_at(number):
            lease_again(arena)
        leases = [(arena.lease(nbytes), seed) for seed, nbytes in enumerate((8192, 100, 8192, 70_000, 8192, 8192))]
        for lease, seed in leases:
            lease.copy_(noise(lease.numel(), seed))
        assert all(torch.equal(lease, noise(lease.numel(), seed)) for lease, seed in leases), number
        assert torch.equal(kept, noise(8192, 99)), number
        assert arena.used_bytes == 8192 + sum(lease.numel() for lease, _ in leases), number
        del lease, kept
        leases.clear()
        assert arena.used_bytes == 0, number
        arena.close()
        assert arena.held_bytes == 0, number
        assert not system.alive, number


def test_h10_a_use_that_goes_on_holds_up_the_next_owner_of_its_bytes_after_an_interrupt() -> None:
    system = System()
    arena = Arena(system, slab_bytes=MIB, idle_bytes=0)
    with interrupted_at(0) as lines:
        arena.allocate(8192)
    del arena
    for number in range(1, 2 * lines[0]):
        verdicts, arena = Verdicts(), Arena(system, slab_bytes=MIB, idle_bytes=0)
        slot = arena.allocate(8192)
        slot.fences += (verdicts.fence("reload"),)
        region = slot.region
        del slot
        try:
            with interrupted_at(number):
                arena.allocate(8192)
        except KeyboardInterrupt:
            pass
        arena.poll()
        assert len(system.alive) == 1, "a device may still read it"
        heir = arena.allocate(8192)
        assert heir.region.space == region.space, number
        assert heir.fences == (verdicts.fence("reload"),), number
        verdicts.over.add("reload")
        del heir
        arena.poll()
        assert not system.alive, number


@pytest.mark.parametrize("several", [1, 2])
def test_h10_a_file_that_grew_into_an_interrupt_is_used_all_the_same(several: int, directory: Path) -> None:
    class Interrupted(Watched):
        interrupt = False

        def allocate(self, offset: int, nbytes: int) -> None:
            super().allocate(offset, nbytes)
            if self.interrupt:
                raise KeyboardInterrupt

    tier = DiskTier([directory] * several, 512 * MIB, file_type=Interrupted)
    files = list(Watched.opened)
    for file in files:
        assert isinstance(file, Interrupted)
        file.interrupt = True
        with pytest.raises(KeyboardInterrupt):
            tier.reserve(10 * MIB)
        file.interrupt = False
    slot = reserve(tier, 10 * MIB)
    slot.write(noise(10 * MIB))
    assert tier.held_bytes == sum(file.stat.st_size for file in files) == 64 * MIB * several
    assert torch.equal(content(slot), noise(10 * MIB))
