"""Host memory that is taken before a step: whatever the step then asks for is cut from it."""

from __future__ import annotations

import random

import pytest

from eager_offload import ConfigError, Offload
from eager_offload.tiers.arena import Arena
from eager_offload.tiers.host import HostTier
from eager_offload.tiers.slabs import PowersOfTwo
from tests.tiers.rig import MIB, System, noise, reserve


def test_sizes_of_any_kind_are_cut_from_one_slab_that_is_taken_once(arena: Arena, system: System) -> None:
    tier = HostTier(arena, 512 * MIB)
    assert tier.take(256 * MIB) is None
    assert tier.take(256 * MIB) is None
    assert tier.take(MIB) is None
    assert system.sizes == [256 * MIB]
    sizes = [100 * MIB, 40 * MIB, 4096, 3 * MIB + 5, 70 * MIB, 33 * MIB, 64 * 1024, 4 * MIB]
    for seed in range(3):
        random.Random(seed).shuffle(sizes)
        slots = [reserve(tier, nbytes) for nbytes in sizes]
        for slot in slots:
            slot.write(noise(slot.nbytes, slot.nbytes))
        assert all(bool((slot.tensor == noise(slot.nbytes, slot.nbytes)).all()) for slot in slots)
        assert tier.take(256 * MIB) is None, "what is in use counts"
        slots.clear()
        del slot
    assert system.sizes == [256 * MIB]
    more = [reserve(tier, 100 * MIB) for _ in range(3)]
    assert system.sizes == [256 * MIB, 100 * MIB], "where it is full, a step takes what it needs"
    assert tier.take(450 * MIB) is None
    more.clear()
    tier.close()
    assert not system.alive


def test_what_others_use_does_not_count(system: System) -> None:
    arena = Arena(system, idle_bytes=256 * MIB)
    one, other = HostTier(arena, 64 * MIB), HostTier(arena, 64 * MIB)
    slot = reserve(other, 40 * MIB)
    assert one.take(48 * MIB) is None
    assert system.sizes == [40 * MIB, 48 * MIB]
    del slot
    assert one.take(64 * MIB) is None
    assert len(system.sizes) == 2, "what is idle serves both"


def test_where_sizes_are_powers_of_two_it_is_taken_in_such(system: System) -> None:
    tier = HostTier(Arena(system, sizes=PowersOfTwo()), 64 * MIB)
    assert tier.take(56 * MIB) is None
    assert system.sizes == [32 * MIB, 16 * MIB, 8 * MIB]


def test_without_room_it_says_why_and_keeps_what_it_has(arena: Arena, system: System) -> None:
    tier = HostTier(arena, 64 * MIB)
    assert tier.take(65 * MIB) == ("host_budget comes to 64.0 MiB", "raise host_budget")
    assert not system.sizes
    assert tier.take(32 * MIB) is None
    system.refuse = True
    shortage = tier.take(64 * MIB)
    assert shortage is not None
    assert shortage.reason == "the system refused it (none left)"
    assert system.sizes == [32 * MIB]
    reserve(tier, 20 * MIB)


def test_what_cannot_be_reserved_is_an_error_that_says_why() -> None:
    with pytest.raises(ConfigError, match="nbytes='much' is not accepted"):
        Offload().reserve("much")
    with pytest.raises(ConfigError, match='reserve takes host memory, and with tier="disk"'):
        Offload(tier="disk").reserve("1MiB")
    Offload(tier="disk", enabled=False).reserve("1MiB")
