"""What is left on the machine is looked at again before memory is taken: idle slabs go back first, then nothing is."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from eager_offload.tiers import host, limits
from eager_offload.tiers.host import HostTier, shared_pool
from eager_offload.tiers.limits import Headroom, HostBound, host_headroom
from eager_offload.tiers.pool import HostSlot, Pool
from tests.simulation.simulated import SimulatedRuntime
from tests.tiers.machines import GIB, MIB, FakeMachine
from tests.tiers.rig import System


class Readings:
    """What a machine of files says whenever it is looked at; counts the looks."""

    total = 16 * GIB
    #: All that there is for this process; the reserve is a GiB.
    available = 3 * GIB

    def __init__(self, machine: FakeMachine) -> None:
        self.machine = machine
        self.looks = 0
        #: Takes its part of what is said to be available.
        self.held: Callable[[], int] = lambda: 0

    def __call__(self) -> Headroom:
        self.looks += 1
        self.machine.set_memory(total=self.total, available=max(self.available - self.held(), 0))
        return host_headroom(self.machine.system)


@pytest.fixture
def readings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Readings:
    """What the machine says; of it budgets may take so much that they do not bind."""
    readings = Readings(FakeMachine(tmp_path))
    monkeypatch.setattr(limits, "host_headroom", readings)
    monkeypatch.setattr(limits, "HOST_FRACTION", 1000)
    return readings


def guarded(readings: Readings) -> tuple[HostTier, System]:
    system = System()
    pool = Pool(system, slab_bytes=MIB, idle_bytes=GIB, bound=HostBound())
    readings.held = lambda: pool._held
    return HostTier(pool), system


def fill(tier: HostTier, nbytes: int) -> list[HostSlot]:
    slots: list[HostSlot] = []
    while (slot := tier.reserve(nbytes)) is not None:
        slots.append(slot)
    return slots


def test_h26_slabs_are_taken_until_only_the_reserve_is_left(readings: Readings) -> None:
    tier, system = guarded(readings)
    slots = fill(tier, 64 * MIB)
    assert len(slots) == 32, "2 GiB; the rest is for others"
    assert tier.shortage.reason == (
        "64.0 MiB more of host memory would leave less than 1.0 GiB of it for others, for 1.0 GiB of this machine's "
        "16.0 GiB of memory are available"
    )
    assert "take a machine with more of it" in tier.shortage.remedy
    slots.clear()
    slots.append(tier.reserve(1536 * MIB))
    assert slots[0] is not None, "what is idle goes back before memory is refused"
    assert tier.held_bytes == sum(slab.numel() for slab in system.alive) == 1536 * MIB


def test_memory_is_refused_where_no_descriptor_is_free_to_look_with(
    readings: Readings, monkeypatch: pytest.MonkeyPatch
) -> None:
    def cannot_look() -> Headroom:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    tier, _ = guarded(readings)
    with monkeypatch.context() as patch:
        patch.setattr(limits, "host_headroom", cannot_look)
        assert tier.reserve(64 * MIB) is None
        assert "Too many open files" in tier.shortage.reason
        tier.release_idle()
    assert tier.reserve(64 * MIB) is not None


def test_h26_when_a_forward_begins_idle_memory_of_all_the_process_goes_back_as_far_as_it_is_missed(
    readings: Readings, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier, _ = guarded(readings)
    own, other = tier._pool, HostTier(shared_pool(SimulatedRuntime(), False, lambda: Pool(System(), idle_bytes=GIB)))
    readings.held = lambda: own._held + other.held_bytes
    slots = [tier.reserve(256 * MIB) for _ in range(4)]
    other.reserve(512 * MIB)
    slots.clear()
    tier.release_idle()
    readings.available = 2304 * MIB
    tier.release_idle()
    assert tier.held_bytes == GIB, "it has not handed out enough to look again"
    monkeypatch.setattr(host, "_LOOK_BYTES", 0)
    tier._next_look = 0
    for available, held in ((2304, (768, 512)), (2304, (768, 512)), (1536, (0, 512)), (1280, (0, 0))):
        readings.available, looks = available * MIB, readings.looks
        tier.release_idle()
        assert readings.looks == looks + 1
        assert (tier.held_bytes, other.held_bytes) == (held[0] * MIB, held[1] * MIB)


def test_a_budget_that_follows_the_machine_is_half_of_what_there_is_and_more_when_there_is_more(
    readings: Readings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "HOST_FRACTION", 0.5)
    tier, _ = guarded(readings)
    slots = fill(tier, 32 * MIB)
    assert len(slots) == 48, "1.5 of 3 GiB"
    assert 'all of host_budget="auto" is in use: 1.5 GiB, which is 50% of the memory that this process could' in (
        tier.shortage.reason
    )
    assert "or give host_budget in bytes" in tier.shortage.remedy
    readings.available, refused = 6 * GIB, 0
    while (slot := tier.reserve(32 * MIB)) is None:
        refused += 1
    assert 0 < refused * 32 * MIB <= 256 * MIB, "a look is for so many bytes"
    slots += [slot, *fill(tier, 32 * MIB)]
    assert len(slots) == 96
    readings.available = 4 * GIB
    slots.pop()
    slots.append(tier.reserve(32 * MIB))
    assert slots[-1] is not None, "what is held serves on"
    assert tier.reserve(GIB) is None
