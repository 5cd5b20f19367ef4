"""H09, H11, H19, H21, H25: what is held, for how long, and that none of it grows."""

from __future__ import annotations

import gc
import os
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple, TypeAlias

import psutil
import pytest
import torch
from torch import Tensor, nn

from eager_offload import Offload
from tests.hazards.backends import Backend, assert_settled, lane_of, tracked_storages
from tests.hazards.functions import Returned, saving
from tests.hazards.programs import REGIMES, Settled, assert_identical, assert_moved, leaf, same_gradients

Around: TypeAlias = AbstractContextManager[Any]


@contextmanager
def without_gc() -> Iterator[None]:
    """Lifetimes must not depend on the cyclic collector."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


# -- H09 --------------------------------------------------------------------------------------------------------------


class Storages:
    """Counts which of the storages that it was shown still live."""

    def __init__(self) -> None:
        self._seen: list[weakref.ref[torch.UntypedStorage]] = []

    def see(self, tensor: Tensor) -> Tensor:
        self._seen.append(weakref.ref(tensor.untyped_storage()))
        return tensor

    @property
    def alive(self) -> int:
        return sum(seen() is not None for seen in self._seen)

    def __len__(self) -> int:
        return len(self._seen)


def forward(offload: Around, storages: Storages, seed: int) -> Tensor:
    x = leaf(16, 16, seed=seed)
    with offload:
        h = storages.see((x * 2).tanh())
        return storages.see(h.exp() @ h).sum()


def a_dropped_graph(offload: Around, storages: Storages, seed: int) -> None:
    forward(offload, storages, seed)


def a_dropped_graph_of_a_module(offload: Around, storages: Storages, seed: int) -> None:
    model = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.BatchNorm1d(16), nn.Linear(16, 16))
    with offload:
        storages.see(model(storages.see(leaf(16, 16, seed=seed) * 2)))


def a_branch_without_backward(offload: Around, storages: Storages, seed: int) -> None:
    x = leaf(16, 16, seed=seed)
    with offload:
        trunk = storages.see(x.tanh() * 2)
        used, unused = (trunk.exp()).sum(), storages.see(trunk.sin() @ trunk).cos().sum()
    used.backward()
    assert unused.requires_grad


def a_loss_of_none(offload: Around, storages: Storages, seed: int) -> None:
    def step() -> Tensor | None:
        with offload:
            forward(nullcontext(), storages, seed)
            return None  # the batch was skipped

    assert step() is None


def an_expert_that_got_no_tokens(offload: Around, storages: Storages, seed: int) -> None:
    x = leaf(16, 16, seed=seed)
    experts = [leaf(16, 16, seed=seed + index) for index in range(4)]
    with offload:
        routed = [storages.see((x[4 * i : 4 * i + 4] * 2) @ experts[i]).tanh() for i in range(4)]
        loss = routed[seed % 4].square().sum()
    loss.backward()


DROPPED = [
    a_dropped_graph,
    a_dropped_graph_of_a_module,
    a_branch_without_backward,
    a_loss_of_none,
    an_expert_that_got_no_tokens,
]


@pytest.mark.parametrize("step", DROPPED, ids=lambda step: step.__name__)
def test_h09_dropped_graphs_give_everything_back_at_once(
    step: Callable[[Around, Storages, int], None], backend: Backend
) -> None:
    offload, storages = backend.offload(prefetch_bytes=1 << 12), Storages()
    with without_gc():
        for seed in range(50):
            step(offload if seed % 2 else Settled(offload), storages, seed)
        offload.stats(synchronize=True)
        assert storages.alive == 0, f"{storages.alive} of {len(storages)} storages live on"
        assert_moved(assert_settled(offload))


def test_h09_a_thousand_dropped_graphs(backend: Backend) -> None:
    offload, storages = backend.offload(), Storages()
    with without_gc():
        for seed in range(1000):
            a_dropped_graph(offload, storages, seed)
            if seed % 100 == 0:
                offload.stats(synchronize=True)
                assert tracked_storages(offload) == 0
                assert lane_of(offload).tiers[0].used_bytes == 0
        offload.stats(synchronize=True)
        assert storages.alive == 0
        stats = assert_settled(offload)
    assert_moved(stats)
    assert stats.released_bytes == stats.offloaded_bytes, "nobody asked for anything"
    assert stats.bytes_in == 0


def test_h09_graphs_that_are_held_hold_and_those_that_are_dropped_do_not(backend: Backend) -> None:
    offload, storages = backend.offload(), Storages()
    with without_gc():
        losses = [forward(offload, storages, seed) for seed in range(20)]
        offload.stats(synchronize=True)
        whole = lane_of(offload).tiers[0].used_bytes
        del losses[5:15]
        offload.stats(synchronize=True)
        assert lane_of(offload).tiers[0].used_bytes == whole / 2
        for loss in losses:
            loss.backward()
        del loss, losses
        assert_moved(assert_settled(offload))


def test_h09_a_graph_in_a_cycle_waits_for_the_collector_and_no_longer(backend: Backend) -> None:
    """The finalizers run inside the collector, at any moment: also while the library holds its lock."""
    offload, storages = backend.offload(), Storages()
    threshold = gc.get_threshold()
    gc.set_threshold(10, 2, 2)
    try:
        for seed in range(100):
            cycle: list[object] = [forward(offload, storages, seed)]
            cycle.append(cycle)
            del cycle
    finally:
        gc.set_threshold(*threshold)
    gc.collect()
    assert storages.alive == 0
    assert_moved(assert_settled(offload))


# -- H11 --------------------------------------------------------------------------------------------------------------


class Ground:
    """Places tensors one after the other at one address, each in a storage of its own."""

    def __init__(self, nbytes: int) -> None:
        self._bytes = bytearray(nbytes)
        self._last: weakref.ref[torch.UntypedStorage] | None = None
        self.addresses: list[int] = []

    def place(self, values: Tensor) -> Tensor:
        assert self._last is None or self._last() is None, "the last owner of these bytes still lives"
        tensor = torch.frombuffer(self._bytes, dtype=values.dtype).view(values.size())
        tensor.copy_(values)
        self._last = weakref.ref(tensor.untyped_storage())
        self.addresses.append(tensor.data_ptr())
        return tensor


def test_h11_an_address_that_a_new_tensor_got_is_not_taken_for_the_old_one(backend: Backend) -> None:
    def program(offload: Around, place: Callable[[Tensor], Tensor]) -> object:
        w, losses = leaf(32, 32), []
        for seed in range(6):
            with offload:
                x = place(leaf(32, 32, seed=10 + seed, grad=False))
                losses.append((w * x).sum() + (w[1:] * x[1:]).sum() + (w[3] * x[3]).sum())
            del x
        for index in (0, 5, 2, 4, 1, 3):
            losses[index].backward()
        return w.grad

    expected, ground, offload = program(nullcontext(), torch.clone), Ground(32 * 32 * 4), backend.offload()
    assert_identical(expected, program(Settled(offload), ground.place))
    assert len(set(ground.addresses)) == 1
    stats = assert_settled(offload)
    assert_moved(stats)
    assert stats.offloaded_bytes + stats.shared_bytes == stats.saved_bytes
    assert stats.offloaded_tensors >= 6, "a storage was taken for an older one"


def test_h11_the_address_is_used_again_within_one_forward(backend: Backend) -> None:
    def program(offload: Around, place: Callable[[Tensor], Tensor], let_go: Callable[[], object]) -> object:
        w, seen = leaf(32, 32), list[Returned]()
        with offload:
            total = (w * 0).sum()
            for seed in range(6):
                x = place(leaf(32, 32, seed=10 + seed, grad=False))
                total = total + saving(w, x, seen=seen).sum()
                del x
                w.sin()  # the operator before it has run: what it saved may leave
                let_go()
        total.backward()
        return w.grad, [returned.parts()[:-1] for returned in seen]

    offload, ground = backend.offload(max_inflight_bytes=1), Ground(32 * 32 * 4)

    def let_go() -> None:
        w = leaf(2)
        (w * w.exp()).sum()
        offload.stats(synchronize=True)

    expected = program(nullcontext(), torch.clone, lambda: None)
    assert_identical(expected, program(offload, ground.place, let_go))
    assert len(set(ground.addresses)) == 1
    assert_moved(assert_settled(offload))


def test_h11_blocks_that_the_allocator_hands_out_again(backend: Backend) -> None:
    addresses: list[int] = []

    def program(offload: Around) -> object:
        w, losses = leaf(32, 32), []
        for seed in range(20):
            with offload:
                h = w * (seed + 1)
                addresses.append(h.data_ptr())
                losses.append((h.exp() * h).sum())
            del h
        for loss in losses[::2] + losses[1::2]:
            loss.backward()
        return w.grad

    same_gradients(program, backend)
    assert len(set(addresses)) < len(addresses), "no address was ever used again"


# -- H19 --------------------------------------------------------------------------------------------------------------


def test_h19_what_was_prefetched_and_never_asked_for_is_freed_and_counted(backend: Backend) -> None:
    limit = 1 << 16
    offload = backend.offload(prefetch_bytes=limit)

    def program() -> None:
        leaves = [leaf(16, 16, seed=seed) for seed in range(8)]
        with Settled(offload):
            losses = [((x * 2).tanh().exp()).sum() for x in leaves]
        losses[-1].backward()
        before = offload.stats(synchronize=True)
        assert before.bytes_in > before.reloaded_bytes, "nothing was brought back that was not asked for"
        assert 0 < lane_of(offload).resident_bytes <= limit
        del losses
        after = offload.stats(synchronize=True)
        assert lane_of(offload).resident_bytes == 0
        assert after.released_bytes == after.offloaded_bytes - after.reloaded_bytes - after.forwarded_bytes > 0

    program()
    assert_moved(assert_settled(offload))


def test_h19_a_second_graph_takes_the_room_of_what_the_first_one_never_asked_for(backend: Backend) -> None:
    limit = 1 << 13

    def program(offload: Around, look: Callable[[], object]) -> object:
        first, second = leaf(16, 16, seed=1), leaf(16, 16, seed=2)
        with offload:
            abandoned = [((first * n).tanh().exp()).sum() for n in range(2, 10)]
        with offload:
            used = sum(((second * n).tanh().exp()).sum() for n in range(2, 30))
        assert isinstance(used, Tensor)
        abandoned[-1].backward()
        look()
        used.backward()
        look()
        return first.grad, second.grad, len(abandoned)

    expected = program(nullcontext(), lambda: None)
    for regime in REGIMES:
        offload = backend.offload(**{**regime.fields, "prefetch_bytes": limit})

        def resident_is_bounded(offload: Offload = offload) -> None:
            offload.stats(synchronize=True)
            assert lane_of(offload).resident_bytes <= limit + (1 << 10)

        assert_identical(expected, program(regime.around(offload), resident_is_bounded))
        assert_moved(assert_settled(offload))


# -- H21 --------------------------------------------------------------------------------------------------------------


def ragged_step(offload: Around, model: nn.Module, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    rows, length = (int(torch.randint(1, 24, (), generator=generator)) for _ in range(2))
    x = torch.randn(rows, length, 16, generator=generator)
    with offload:
        h = model(x)
        routed = h.view(-1, 16)[torch.randperm(rows * length, generator=generator)[: 1 + rows * length // 2]]
        loss = (routed.tanh() @ routed.t()).square().mean()
    loss.backward()
    return loss.detach()


def test_h21_shapes_that_change_every_step(backend: Backend) -> None:
    def program(offload: Around) -> object:
        model = nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.LayerNorm(16), nn.Linear(16, 16))
        losses = [ragged_step(offload, model, seed) for seed in range(12)]
        return losses, [parameter.grad for parameter in model.parameters()]

    same_gradients(program, backend)


def test_h21_the_pools_stay_bounded_when_no_two_steps_are_alike(backend: Backend) -> None:
    offload, model = backend.offload(), nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 16))
    largest = 0
    for seed in range(100):
        before = offload.stats(synchronize=True).saved_bytes
        ragged_step(Settled(offload), model, seed)
        largest = max(largest, offload.stats(synchronize=True).saved_bytes - before)
        for tier in lane_of(offload).tiers:
            assert tier.used_bytes == 0
    stats = assert_settled(offload)
    assert_moved(stats)
    assert stats.saved_bytes > 15 * largest
    # A file and a slab grow by steps of their own; what matters is that they do not grow with the steps of training.
    assert max(stats.host_bytes_peak, stats.disk_bytes_peak) <= max(64 << 20, 2 * largest)


# -- H25 --------------------------------------------------------------------------------------------------------------


class State(NamedTuple):
    """What must not grow from step to step."""

    pending: int
    storages: int
    slots: int
    line: int
    uses: int
    orphans: int
    threads: int
    files: int
    held: int


def state_of(offload: Offload) -> State:
    offload.stats(synchronize=True)
    lane = lane_of(offload)
    census = lane.census()
    return State(
        pending=census.pending,
        storages=census.storages + census.names + census.leaving,
        slots=sum(tier.used_bytes for tier in lane.tiers),
        line=sum(line.nbytes for line in offload._session.lines.values()),
        uses=census.uses + census.promised_bytes,
        orphans=census.orphans + len(lane.graveyard),
        threads=threading.active_count(),
        files=len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0,
        held=sum(tier.held_bytes for tier in lane.tiers),
    )


def train(offload: Offload, model: nn.Module, steps: int) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(steps):
        with offload:
            loss = model(leaf(16, 32, seed=step)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def small_model() -> nn.Module:
    return nn.Sequential(nn.Linear(32, 32), nn.GELU(), nn.LayerNorm(32), nn.Linear(32, 32))


@pytest.mark.parametrize("window", [1, 1 << 15])
def test_h25_a_hundred_steps_leave_the_state_as_the_first_ones_did(window: int, backend: Backend) -> None:
    offload, model = backend.offload(max_inflight_bytes=window), small_model()
    train(offload, model, 20)
    first = state_of(offload)
    train(offload, model, 100)
    assert state_of(offload) == first
    assert_moved(assert_settled(offload))


@pytest.mark.long
def test_h25_a_thousand_steps_leave_state_and_memory_as_they_were(backend: Backend) -> None:
    offload, model, process = backend.offload(), small_model(), psutil.Process()
    states, resident = [], []
    train(offload, model, 100)
    for _ in range(10):
        train(offload, model, 100)
        states.append(state_of(offload))
        resident.append(process.memory_info().rss)
    assert len(set(states)) == 1, states
    if backend.name == "disk":  # the simulated runtime keeps a timeline and a log
        assert resident[-1] - resident[0] <= 2 << 20, resident
    assert_moved(assert_settled(offload))
