"""Memory that a tensor owns: it goes back with its last view, and serves the next one until then."""

from __future__ import annotations

import torch

from eager_offload.tiers.memory import PAGE
from eager_offload.tiers.pool import Pool
from tests.tiers.rig import MIB, System, noise


def test_a_lease_goes_back_when_its_last_view_dies() -> None:
    system = System()
    pool = Pool(system, slab_bytes=MIB, idle_bytes=0)
    for nbytes in (1, 70_000, 5 * MIB + 3):
        tensor = pool.lease(nbytes)
        assert tensor.dtype is torch.uint8
        assert tensor.shape == (nbytes,)
        assert tensor.data_ptr() % PAGE == 0
        tensor.copy_(noise(nbytes))
        view = tensor[nbytes // 2 :].view(torch.int8).detach()
        del tensor
        assert pool.used_bytes == nbytes
        assert torch.equal(view.view(torch.uint8), noise(nbytes)[nbytes // 2 :])
        del view
        assert pool.used_bytes == pool.held_bytes == len(system.alive) == 0
    assert pool.lease(0).shape == (0,)


def test_h40_after_a_rest_every_slab_goes_with_its_last_lease_and_without_a_call() -> None:
    system, woken = System(), list[int]()
    pool = Pool(system, slab_bytes=MIB, wakes=lambda: woken.append(len(system.sizes)))
    small = [pool.lease(PAGE).copy_(noise(PAGE, seed)) for seed in range(3)]
    large, idle = pool.lease(2 * MIB).copy_(noise(2 * MIB)), pool.lease(3 * MIB)
    assert woken == [0], "it is told once until it rests"
    del idle
    pool.poll()
    assert len(system.alive) == 3, "what is idle is kept as long as leases go on"
    pool.rest()
    assert len(system.alive) == 2, "what is idle is not kept any more"
    assert pool.used_bytes == 3 * PAGE + 2 * MIB
    del small[0]
    after = [pool.lease(PAGE).copy_(noise(PAGE, seed)) for seed in (4, 5)]
    assert woken == [0, 3]
    assert len(system.alive) == 3, "what was there before serves none"
    kept = large[MIB:]
    del large, small[0]
    assert len(system.alive) == 3
    assert torch.equal(kept, noise(2 * MIB)[MIB:])
    assert torch.equal(small[0], noise(PAGE, 2))
    del kept
    assert len(system.alive) == 2
    small.clear()
    assert len(system.alive) == 1
    assert [torch.equal(lease, noise(PAGE, seed)) for lease, seed in zip(after, (4, 5), strict=True)] == [True] * 2
    after.clear()
    assert pool.held_bytes == pool.idle_bytes > 0, "the one that leases come from is kept for the next"
    again = pool.lease(PAGE)
    assert len(system.sizes) == 4
    pool.rest()
    pool.rest()
    del again
    assert len(system.alive) == pool.held_bytes == 0


def test_a_lease_that_has_died_serves_the_next_one_and_what_has_died_is_bounded(system: System) -> None:
    pool = Pool(system, slab_bytes=MIB, idle_bytes=MIB)
    one, live = pool.lease(70_000), pool.lease(PAGE).copy_(noise(PAGE, 1))
    place = one.data_ptr()
    for seed in range(5):
        del one
        smaller = pool.lease(2 * PAGE).copy_(noise(2 * PAGE, seed))
        one = pool.lease(70_000)
        assert one.data_ptr() == place, "the same size at the same place"
        one.copy_(noise(70_000, seed))
        assert torch.equal(smaller, noise(2 * PAGE, seed))
        assert torch.equal(live, noise(PAGE, 1))
        del smaller
    assert pool.used_bytes == 70_000 + PAGE
    del one, live
    leases = [pool.lease(16 << 10) for _ in range(60)]
    leases.clear()
    leases = [pool.lease(16 << 10), *[pool.lease(32 << 10) for _ in range(8)]]
    assert len(system.sizes) == 1, "what has died is used up before there is new memory"
    leases = [pool.lease(200_000) for _ in range(40)]
    assert len(system.alive) > 7
    leases.clear()
    pool.lease(200_000)
    pool.lease(200_000)
    assert len(system.alive) <= 2
    pool.poll()
    assert pool.idle_bytes == pool.held_bytes == sum(slab.numel() for slab in system.alive)
