"""H21, H25: steps that are all alike and steps of which no two are; nothing grows."""

from __future__ import annotations

import gc
import os
import threading
import tracemalloc
from contextlib import AbstractContextManager, nullcontext

import pytest
import torch
from torch import Tensor, nn

from eager_offload import Offload
from tests.hazards.backends import Backend, assert_settled, offloader_of, queued_bytes, saves_of, tracked
from tests.hazards.programs import Settled, assert_identical, assert_moved
from tests.programs import Run, leaf
from tests.programs.repeated import ragged_step
from tests.threads import collect


def test_h21_the_pools_stay_bounded_when_no_two_steps_are_alike(backend: Backend) -> None:
    offload, model = backend.offload(), nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 16))
    largest = 0
    for seed in range(100):
        before = offload.stats(synchronize=True).saved_bytes
        ragged_step(Run(Settled(offload)), model, seed)
        largest = max(largest, offload.stats(synchronize=True).saved_bytes - before)
        assert offloader_of(offload).census().used_bytes == 0
    stats = assert_settled(offload)
    assert_moved(stats)
    assert stats.saved_bytes > 15 * largest
    # A file and a slab grow by steps of their own; what matters is that they do not grow with the steps of training.
    assert max(stats.host_bytes_peak, stats.disk_bytes_peak) <= max(64 << 20, 2 * largest)


def state_of(offload: Offload) -> dict[str, object]:
    """What must not grow from step to step."""
    offload.stats(synchronize=True)
    offloader = offloader_of(offload)
    return {
        "counted": offloader.census(),
        "known": tracked(saves_of(offload)),
        "finalized": len(offloader.finalized),
        "slots": [(tier.used_bytes, tier.held_bytes) for tier in offloader.tiers],
        "queued": queued_bytes(offload),
        "threads": threading.active_count(),
        "files": len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0,
    }


def train(offload: Offload, model: nn.Module, steps: int) -> None:
    """The last step waits for its copies before backward: its reloads need their thread on a busy machine too."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(steps):
        with Settled(offload) if step == steps - 1 else offload:
            loss = model(leaf(16, 32, seed=step)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.usefixtures("threads_stay")
@pytest.mark.parametrize(("window", "step_tables"), [(1, False), (1 << 15, True)])
def test_h25_h54_a_hundred_steps_leave_the_state_as_the_first_ones_did(
    window: int, step_tables: bool, backend: Backend
) -> None:
    """On the disk, where no log is written, three hundred steps that follow, and no more objects, such as events."""
    offload = backend.offload(max_inflight_bytes=window, step_tables=step_tables)
    model = nn.Sequential(nn.Linear(32, 32), nn.GELU(), nn.LayerNorm(32), nn.Linear(32, 32))
    counts_objects = backend.name == "disk"
    train(offload, model, 60 if step_tables else 20)
    collect()
    first, objects = state_of(offload), len(gc.get_objects())
    train(offload, model, 300 if step_tables and counts_objects else 100)
    collect()
    more = len(gc.get_objects()) - objects
    assert state_of(offload) == first
    assert more <= 50 or not counts_objects
    stats = assert_settled(offload)
    assert_moved(stats)
    assert stats.table_forwards > 100 or not step_tables


@pytest.mark.filterwarnings("ignore:eager_offload. nothing moved:RuntimeWarning")
@pytest.mark.long
def test_h41_a_configuration_that_is_not_used_any_more_costs_little() -> None:
    def use(min_bytes: int) -> None:
        offload = Offload(tier="disk", min_bytes=min_bytes)
        with offload:
            leaf(8, 8).sin()
        offload.close()

    use(1_000_000)
    collect()
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        for number in range(100):
            use(1_000_001 + number)
        collect()
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert (after - before) / 100 < 2048, "graph modules of torch take 25 KiB"


class Routed(nn.Module):
    """Sends each token to one of three experts."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.dense = nn.Linear(32, 32)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 32)) for _ in range(3))

    def forward(self, x: Tensor, route: Tensor) -> Tensor:
        x = self.dense(x.sin()).tanh()
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            chosen = (route == number).nonzero().flatten()
            out = out.index_add(0, chosen, expert(x[chosen]))
        return (x + out.cos()).square().mean()


@pytest.mark.long
@pytest.mark.usefixtures("threads_stay")
@pytest.mark.filterwarnings("ignore:eager_offload. tier")
def test_a_thousand_steps_of_random_routing_are_followed_and_leave_the_pool_as_it_is() -> None:
    """Each expert has a token at least: what is saved is the same but for its sizes."""
    model, x = Routed(), leaf(64, 32)
    offload = Offload(tier="host", min_bytes=0, keep_last_bytes=0, step_tables=True)
    generator = torch.Generator().manual_seed(0)

    def step(around: AbstractContextManager[object], route: Tensor) -> list[Tensor]:
        with around:
            loss = model(x, route)
        loss.backward()
        found = [loss.detach(), *(one.grad for one in model.parameters() if one.grad is not None)]
        model.zero_grad(set_to_none=True)
        return found

    held = []
    for number in range(1000):
        route = torch.cat([torch.arange(3), torch.randint(3, (61,), generator=generator)])
        found = step(offload, route)
        if number % 100 == 99:
            assert_identical(step(nullcontext(), route), found, f"step {number}")
            offload.stats(synchronize=True)
            held.append(sum(tier.held_bytes for tier in offloader_of(offload).tiers))
    stats = assert_settled(offload)
    assert_moved(stats)
    assert held == held[:1] * 10
    assert stats.table_forwards >= 990
    assert sum(stats.table_misses.values()) <= 100, "until each size has varied once"
