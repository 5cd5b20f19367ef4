"""Tiers that share a pool: what is idle serves all of them, and each keeps to its budget."""

from __future__ import annotations

import pytest
import torch

from eager_offload import Offload
from eager_offload.runtime.host import host_runtime
from eager_offload.tiers import limits
from eager_offload.tiers.host import HostTier
from eager_offload.tiers.limits import Headroom, HostBound, host_headroom
from eager_offload.tiers.pool import Pool
from tests.tiers.machines import GIB, FakeMachine
from tests.tiers.rig import MIB, System, equal, noise, reserve, stored


def test_what_is_idle_serves_every_tier_and_each_keeps_to_its_budget(pool: Pool, system: System) -> None:
    one, other = HostTier(pool, 4 * MIB), HostTier(pool, 6 * MIB)
    stored(one, noise(4 * MIB))
    slots = [stored(other, noise(4 * MIB, 1))]
    assert system.sizes == [4 * MIB], "the slab is the same"
    assert (one.used_bytes, other.used_bytes) == (0, 4 * MIB)
    slots += [reserve(one, 2 * MIB), reserve(one, 2 * MIB)]
    assert one.reserve(4096) is None, "there is room, but it is not its own"
    slots.append(reserve(other, 2 * MIB))
    assert other.reserve(1) is None
    assert one.held_bytes == other.held_bytes == 10 * MIB
    del slots[1]
    assert other.reserve(4096) is None
    slots.append(reserve(one, 2 * MIB))
    assert one.held_bytes == 10 * MIB
    assert equal(slots[:1], [1])


def test_h26_budgets_by_the_machine_are_one_budget_however_many_have_it(
    system: System, monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    machine = FakeMachine(tmp_path_factory.mktemp("machine"), total=32 * MIB)

    def look() -> Headroom:
        machine.set_memory(total=32 * MIB, available=16 * MIB - sum(slab.numel() for slab in system.alive))
        return host_headroom(machine.system)

    monkeypatch.setattr(limits, "host_headroom", look)
    pool = Pool(system, slab_bytes=MIB, idle_bytes=64 * MIB, bound=HostBound())
    tiers = [HostTier(pool) for _ in range(3)]
    slots = [reserve(tier, 2 * MIB) for tier in tiers]
    slots.append(reserve(tiers[0], 2 * MIB))
    assert all(tier.reserve(2 * MIB) is None for tier in tiers)
    assert sum(system.sizes) == 8 * MIB
    late = HostTier(pool)
    assert late.reserve(4096) is None, "what the pool holds is no less for it"
    explicit = HostTier(pool, 2 * MIB)
    slots.append(reserve(explicit, 2 * MIB))
    assert 'all of host_budget="auto" is in use: 8.0 MiB, which is 50% of the memory' in late.shortage.reason
    assert explicit.reserve(1) is None
    assert explicit.shortage == ("all of host_budget is in use: 2.0 MiB", "raise host_budget")
    assert late.reserve(4096) is None, "nor is that of another budget its own"


@pytest.mark.filterwarnings("ignore:eager_offload. tier=.host. on a CPU device")
def test_every_offload_shares_the_memory_of_its_runtime_and_the_last_gives_it_back() -> None:
    offloads = [Offload(tier="host", min_bytes=0, keep_last_bytes=0, host_budget=GIB) for _ in range(2)]
    x = torch.randn(256, 1024, requires_grad=True)
    expected = torch.autograd.grad(x.exp().sin().sum(), x)[0]
    for offload in offloads:
        with offload:
            loss = x.exp().sin().sum()
        assert torch.equal(torch.autograd.grad(loss, x)[0], expected)
        assert offload.stats(synchronize=True).bytes_out > 0
    tiers = [offload._offloaders._tiers[host_runtime()][0] for offload in offloads]
    del loss
    assert [tier.used_bytes for tier in tiers] == [0, 0]
    assert tiers[0].held_bytes == tiers[1].held_bytes > 0
    offloads[0].close()
    assert tiers[1].held_bytes > 0
    offloads[1].close()
    assert tiers[1].held_bytes == 0
