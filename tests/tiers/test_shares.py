"""Tiers that share an arena: what is idle serves all of them, and each keeps to its budget."""

from __future__ import annotations

import weakref

import pytest
import torch

from eager_offload import Offload
from eager_offload.runtime.host import host_runtime
from eager_offload.tiers import host
from eager_offload.tiers.arena import Arena
from eager_offload.tiers.host import HostTier, shared_arena
from eager_offload.tiers.limits import host_headroom
from tests.simulation.simulated import SimulatedRuntime
from tests.tiers.machines import GIB, FakeMachine
from tests.tiers.rig import MIB, System, noise, reserve


def test_what_is_idle_serves_every_tier(arena: Arena, system: System) -> None:
    one, other = HostTier(arena, 8 * MIB), HostTier(arena, 8 * MIB)
    slot = reserve(one, 4 * MIB)
    slot.write(noise(4 * MIB))
    assert (one.used_bytes, other.used_bytes) == (4 * MIB, 0)
    del slot
    again = reserve(other, 4 * MIB)
    again.write(noise(4 * MIB, 1))
    assert torch.equal(again.tensor, noise(4 * MIB, 1))
    assert (one.used_bytes, other.used_bytes) == (0, 4 * MIB)
    assert system.sizes == [4 * MIB], "the slab is the same"


def test_each_tier_keeps_to_its_budget_and_all_of_them_to_the_sum(arena: Arena) -> None:
    one, other = HostTier(arena, 4 * MIB), HostTier(arena, 6 * MIB)
    slots = [reserve(one, 2 * MIB), reserve(one, 2 * MIB)]
    assert one.reserve(4096) is None, "there is room, but it is not its own"
    slots += [reserve(other, 2 * MIB) for _ in range(3)]
    assert other.reserve(1) is None
    assert one.held_bytes == other.held_bytes == 10 * MIB
    del slots[0]
    assert other.reserve(4096) is None
    slots.append(reserve(one, 2 * MIB))
    assert one.held_bytes == 10 * MIB


def test_h26_budgets_by_the_machine_are_one_budget_however_many_have_it(
    arena: Arena, system: System, monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    machine = FakeMachine(tmp_path_factory.mktemp("machine"), available=16 * MIB)
    monkeypatch.setattr(host, "host_headroom", lambda: host_headroom(machine.system))
    tiers = [HostTier(arena) for _ in range(3)]
    assert [tier.budget for tier in tiers] == [8 * MIB] * 3
    slots = [reserve(tier, 2 * MIB) for tier in tiers]
    slots.append(reserve(tiers[0], 2 * MIB))
    machine.set_memory(available=8 * MIB)  # for this process took the rest
    assert all(tier.reserve(2 * MIB) is None for tier in tiers)
    assert sum(system.sizes) == 8 * MIB
    late = HostTier(arena)
    assert late.budget == 8 * MIB, "what the arena holds is no less for them"
    assert late.reserve(4096) is None
    explicit = HostTier(arena, 2 * MIB)
    slots.append(reserve(explicit, 2 * MIB))
    assert 'all of host_budget="auto" is in use: 8.0 MiB, which is 50% of what' in late.shortage.reason
    assert explicit.reserve(1) is None
    assert explicit.shortage == ("all of host_budget is in use: 2.0 MiB", "raise host_budget")


def test_memory_goes_back_with_the_last_tier_and_not_before(arena: Arena, system: System) -> None:
    one, other = HostTier(arena, 8 * MIB), HostTier(arena, 8 * MIB)
    slots = [reserve(one, 3 * MIB), reserve(other, 2 * MIB), reserve(other, 3 * MIB)]
    slots[0].write(noise(3 * MIB))
    del slots[1]
    one.close()
    one.close()
    assert torch.equal(slots[0].tensor, noise(3 * MIB)), "a slot outlives its tier"
    assert other.held_bytes == 8 * MIB, "the other one's idle slab stays"
    slots.append(reserve(other, 2 * MIB))
    assert len(system.sizes) == 3
    del slots[0]
    assert other.held_bytes == 8 * MIB, "and so does what comes back within its budget"
    slots.clear()
    other.close()
    assert other.held_bytes == other.used_bytes == one.used_bytes == len(system.alive) == 0


def test_what_only_a_closed_tier_had_a_budget_for_goes_back_at_once(arena: Arena, system: System) -> None:
    one, other = HostTier(arena, 8 * MIB), HostTier(arena, 2 * MIB)
    slots = [reserve(one, 3 * MIB), reserve(one, 3 * MIB)]
    slots.clear()
    one.close()
    assert other.held_bytes <= 2 * MIB
    assert len(system.alive) == 0


def test_there_is_one_arena_for_a_runtime_and_a_kind_of_memory_as_long_as_someone_has_it() -> None:
    runtime, another = SimulatedRuntime(), SimulatedRuntime()
    arena = shared_arena(runtime, False, Arena)
    assert shared_arena(runtime, False, Arena) is arena
    assert shared_arena(runtime, True, Arena) is not arena
    assert shared_arena(another, False, Arena) is not arena
    HostTier(arena, MIB).close()
    assert shared_arena(runtime, False, Arena) is not arena, "all have left it"
    gone = weakref.ref(arena)
    del arena
    assert gone() is None


@pytest.mark.filterwarnings("ignore:eager_offload. tier=.host. on a CPU device")
def test_every_offload_shares_the_arena_of_its_runtime_and_the_last_gives_it_back() -> None:
    offloads = [Offload(tier="host", min_bytes=0, keep_last_bytes=0, host_budget=GIB) for _ in range(2)]
    x = torch.randn(256, 1024, requires_grad=True)
    expected = torch.autograd.grad(x.exp().sin().sum(), x)[0]
    for offload in offloads:
        with offload:
            loss = x.exp().sin().sum()
        loss.backward()
        assert torch.equal(x.grad, expected)
        x.grad = None
        assert offload.stats(synchronize=True).bytes_out > 0
    arenas = {offload._offloaders._tiers[host_runtime()][0]._arena for offload in offloads}
    assert len(arenas) == 1
    (arena,) = arenas
    assert arena.used_bytes == 0
    assert arena.held_bytes > 0
    offloads[0].close()
    assert arena.held_bytes > 0
    offloads[1].close()
    assert arena.held_bytes == 0
