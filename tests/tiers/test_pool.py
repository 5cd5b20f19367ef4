"""The room of a tier: exact sizes, no byte for two slots, no use forgotten, little waste, and what goes back."""

from __future__ import annotations

import errno
import random
from pathlib import Path

import pytest
import torch
from hypothesis import strategies as st

from eager_offload import ConfigError, Offload
from eager_offload.tiers.base import Fence, Slot
from eager_offload.tiers.host import HostTier
from eager_offload.tiers.memory import PAGE, anonymous_slab
from eager_offload.tiers.pool import ExactSizes, Pool, PowersOfTwo, SlabSizes
from tests.sampling import search
from tests.simulation.log import region_of
from tests.tiers.files import failure
from tests.tiers.rig import MIB, Made, System, Verdicts, noise, reserve, stored

GIB = 1 << 30

# -- which bytes a slot gets ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["host", "disk"])
def test_h18_any_sequence_of_slots_shares_no_byte_and_loses_no_use_and_no_room(kind: str, directory: Path) -> None:
    """Against a model that remembers every page; a use is a fence."""

    def check(data: st.DataObject) -> None:
        tier = Made(kind, directory, MIB, one_slab=True).tier
        verdicts, events, space = Verdicts(), 0, region_of(reserve(tier, PAGE)).space
        uses: list[set[Fence] | None] = [set() for _ in range(MIB // PAGE)]  # `None` where a slot lives
        live: list[Slot] = []
        for _ in range(data.draw(st.integers(1, 60), "steps")):
            what = data.draw(st.sampled_from(["reserve", "reserve", "reserve", "drop", "pass"]), "what")
            if what == "drop" and live:
                slot = live.pop(data.draw(st.integers(0, len(live) - 1), "which"))
                for _ in range(data.draw(st.integers(0, 2), "uses")):
                    slot.record.fences += (verdicts.fence(events),)
                    events += 1
                for page in pages_of(slot):
                    uses[page] = set(slot.record.fences)
                del slot
            elif what == "pass" and events:
                verdicts.over.add(data.draw(st.integers(0, events - 1), "event"))
            elif what == "reserve":
                nbytes = data.draw(st.integers(PAGE, 80 * PAGE), "bytes")
                pages = -(-nbytes // PAGE)
                slot = tier.reserve(nbytes)
                assert (slot is None) == (pages > largest_hole(uses))
                if slot is not None:
                    assert region_of(slot).space == space
                    mine = pages_of(slot)
                    assert len(mine) == pages
                    assert all(uses[page] is not None for page in mine), "handed out twice"
                    going_on = {fence for page in mine for fence in uses[page] or () if not fence.passed()}
                    assert going_on <= set(slot.record.fences)
                    assert len(set(slot.record.fences)) == len(slot.record.fences)
                    assert sum(fence.passed() for fence in slot.record.fences) <= 1, "what is over does not add up"
                    for page in mine:
                        uses[page] = None
                    live.append(slot)
                del slot
            assert tier.used_bytes == sum(slot.nbytes for slot in live)
            assert tier.held_bytes == MIB
        live.clear()
        verdicts.over.update(range(events))
        assert not [fence for fence in reserve(tier, MIB).record.fences if not fence.passed()]

    search(check, st.data(), fixed=150 if kind == "host" else 30)  # a real file each


def pages_of(slot: Slot) -> range:
    return range(region_of(slot).start // PAGE, -(-region_of(slot).stop // PAGE))


def largest_hole(uses: list[set[Fence] | None]) -> int:
    return max(map(len, "".join("x" if use is None else "." for use in uses).split("x")))


def test_h18_memory_does_not_go_back_before_its_last_use_is_over(system: System) -> None:
    verdicts, pool = Verdicts(), Pool(system, slab_bytes=MIB, idle_bytes=0)
    for nbytes in (MIB, 8192):
        verdicts.over.clear()
        slot = pool.allocate(nbytes)
        slot.record.fences += (verdicts.fence("reload"),)
        del slot
        for _ in range(2):
            pool.poll()
            assert pool.used_bytes == 0
            assert len(system.alive) == 1, "a device may still read it"
            assert pool.allocate(nbytes).record.fences == (verdicts.fence("reload"),)
        verdicts.over.add("reload")
        pool.poll()
        assert len(system.alive) == 0


# -- how much memory that takes ---------------------------------------------------------------------------------------

# What one block of a decoder with a hidden size of 768 or 4096 saves, at 4 sequences of 1,024 tokens, in bytes.
SMALL_BLOCK = [12_582_912] * 4 + [37_748_736, 50_331_648, 50_331_648, 16_384, 16_384, 196_608]
LARGE_BLOCK = [33_554_432] * 4 + [100_663_296, 117_440_512, 117_440_512, 1_048_576]


def saved_by_a_llama(tokens: int, layers: int, width: int = 2048, inner: int = 8192, shared: int = 512) -> list[int]:
    """Bytes of what a decoder of about 1B parameters saves in bf16, in the order of saving."""
    per_token = [2 * width, 4, 2 * width, 2 * width, 2 * shared, 2 * shared, 128, 2 * width, 2 * width, 4]
    per_token += [2 * width, 2 * inner, 2 * inner, 2 * inner]
    return [tokens * nbytes for _ in range(layers) for nbytes in per_token]


STEPS = {
    "a small model": SMALL_BLOCK * 12,
    "a large model": LARGE_BLOCK * 12,
    **{f"{nbytes} bytes": [nbytes] * (128 * MIB // nbytes) for nbytes in (65_536, 200_704, 25_165_824)},
    "a byte more than a page": [65_537] * 2048,
    "two sizes": [786_432, 80_000] * 150,
    "a power of two of tokens": saved_by_a_llama(8192, 24),
    "an odd number of tokens": saved_by_a_llama(6151, 24),
    "few tokens": saved_by_a_llama(777, 64),
    "an odd width": saved_by_a_llama(5000, 24, width=2304, inner=5760, shared=768),
}


@pytest.mark.parametrize(
    ("step", "sizes"),
    [*[(step, ExactSizes(64 * MIB)) for step in STEPS], *[(step, PowersOfTwo()) for step in list(STEPS)[-4:]]],
)
def test_what_is_held_for_a_step_is_at_most_5_percent_more_than_it_saves(step: str, sizes: SlabSizes) -> None:
    taken: list[int] = []

    def system(nbytes: int) -> torch.Tensor:
        taken.append(nbytes)
        return torch.empty(nbytes, dtype=torch.uint8, device="meta")

    tier = HostTier(Pool(system, sizes=sizes, idle_bytes=64 * GIB), 64 * GIB)
    asked = sum(nbytes + -nbytes % PAGE if nbytes == 65_537 else nbytes for nbytes in STEPS[step])  # the worst size
    for _ in range(3):  # later steps find what they need
        slots = [reserve(tier, nbytes) for nbytes in STEPS[step]]
        assert tier.used_bytes == sum(STEPS[step])
        assert tier.held_bytes == sum(taken)
        slots.clear()
    if isinstance(sizes, PowersOfTwo):
        assert all(nbytes.bit_count() == 1 for nbytes in taken), "torch rounds nothing up"
        # The end of the newest slab is room for what comes next, and no waste.
        taken.remove(max(taken))
    assert sum(taken) <= 1.05 * asked


# -- budgets, the system, and what goes back --------------------------------------------------------------------------


@pytest.mark.parametrize("sizes", [ExactSizes(MIB), PowersOfTwo()])
def test_h26_the_budget_bounds_what_is_held_and_idle_memory_makes_way(sizes: SlabSizes) -> None:
    tier = HostTier(Pool(System(), sizes=sizes, idle_bytes=GIB), 100 * MIB)
    slots = [reserve(tier, 30 * MIB)]
    while (slot := tier.reserve(3 * MIB)) is not None:
        slots.append(slot)
    assert 80 * MIB < tier.used_bytes <= tier.held_bytes <= 100 * MIB
    small = []
    while (slot := tier.reserve(100_000)) is not None:
        small.append(slot)
    assert tier.held_bytes <= 100 * MIB
    del slots[::2]
    slots.append(reserve(tier, 3 * MIB))
    slots.clear()
    slots.append(reserve(tier, 32 * MIB))
    assert tier.held_bytes <= 100 * MIB
    assert HostTier(Pool(), 0).reserve(1) is None


def test_idle_memory_beyond_the_allowance_goes_back_at_once_and_the_rest_serves_again(system: System) -> None:
    pool = Pool(system, slab_bytes=8 * MIB, idle_bytes=20 * MIB)
    for nbytes in (10 * MIB, 100_000):  # a slab each, and many to a slab
        slots = [pool.allocate(nbytes + 4096 * (at % 7)) for at in range(30 * MIB // nbytes)]
        assert len(system.alive) > 2
        del slots[1::2]
        slots.clear()
        assert pool.used_bytes == 0
        assert pool.held_bytes == sum(slab.numel() for slab in system.alive) <= 20 * MIB
        given = len(system.sizes)
        pool.allocate(nbytes)
        assert len(system.sizes) == given, "an idle slab serves first"
    pool.release_idle()
    assert pool.held_bytes == len(system.alive) == 0


def test_a_system_without_room_is_no_room_for_a_slot_and_an_error_for_a_lease(pool: Pool, system: System) -> None:
    tier = HostTier(pool, 1 << 40)
    reserve(tier, 2 * MIB)
    system.refusal = failure(errno.ENOMEM)
    assert tier.reserve(4 * MIB) is None
    assert tier.held_bytes == 0, "what is idle is given back before a request fails"
    with pytest.raises(MemoryError, match="Cannot allocate"):
        pool.lease(MIB)
    system.refusal = None
    slot = stored(tier, noise(4 * MIB))
    assert torch.equal(slot.tensor, noise(4 * MIB))
    with pytest.raises(MemoryError, match=str(1 << 60)):
        anonymous_slab(1 << 60)


# -- what is reserved before a step -----------------------------------------------------------------------------------


def test_sizes_of_any_kind_are_cut_from_memory_that_is_taken_once(pool: Pool, system: System) -> None:
    tier = HostTier(pool, 32 * MIB)
    assert [tier.take(nbytes) for nbytes in (16 * MIB, 16 * MIB, MIB)] == [None] * 3
    assert system.sizes == [16 * MIB]
    sizes = [6 * MIB, 2 * MIB, 4096, MIB + 5, 4 * MIB, 2 * MIB, 64 * 1024, 200_000]
    for seed in range(3):
        random.Random(seed).shuffle(sizes)
        slots = [stored(tier, noise(nbytes, nbytes)) for nbytes in sizes]
        assert all(torch.equal(slot.tensor, noise(slot.nbytes, slot.nbytes)) for slot in slots)
        assert tier.take(16 * MIB) is None, "what is in use counts"
        slots.clear()
    assert system.sizes == [16 * MIB]
    more = [reserve(tier, 6 * MIB) for _ in range(3)]
    assert system.sizes == [16 * MIB, 6 * MIB], "where it is full, a step takes what it needs"
    more.clear()
    other = HostTier(pool, 16 * MIB)
    slot = reserve(other, 10 * MIB)
    assert tier.take(16 * MIB) is None
    assert len(system.sizes) == 3, "what another tier uses does not count"
    del slot
    assert other.take(16 * MIB) is None
    assert len(system.sizes) == 3, "what is idle serves both"
    tier.close()
    other.close()
    assert not system.alive
    tier = HostTier(Pool(system, sizes=PowersOfTwo()), 64 * MIB)
    assert tier.take(56 * MIB) is None
    assert system.sizes[3:] == [32 * MIB, 16 * MIB, 8 * MIB]


def test_without_room_to_reserve_it_says_why_and_keeps_what_it_has(pool: Pool, system: System) -> None:
    tier = HostTier(pool, 64 * MIB)
    assert tier.take(65 * MIB) == ("host_budget comes to 64.0 MiB", "raise host_budget")
    assert not system.sizes
    assert tier.take(32 * MIB) is None
    system.refusal = failure(errno.ENOMEM)
    assert tier.take(64 * MIB).reason == "the system refused it (Cannot allocate memory)"
    assert system.sizes == [32 * MIB]
    reserve(tier, 20 * MIB)
    with pytest.raises(ConfigError, match="nbytes='much' is not accepted"):
        Offload().reserve("much")
    with pytest.raises(ConfigError, match='reserve takes host memory, but tier="disk"'):
        Offload(tier="disk").reserve("1MiB")
    Offload(tier="disk", enabled=False).reserve("1MiB")
