"""H40: memory goes back when its use is over, although the program calls the library no more.

Nothing here asks for stats, packs, unpacks or enters a context between what ends the use and what is asserted.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from eager_offload.runtime import transfer_threads
from eager_offload.runtime.base import Direction
from tests.hazards.backends import Backend, DiskBackend, assert_settled
from tests.hazards.probes import Gone, Transfers
from tests.hazards.programs import Settled, assert_identical, assert_moved, leaf

SIDE = 64


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[Backend]:
    """The CPU device with the disk tier: the one whose transfers have threads of the library's own."""
    monkeypatch.setattr(transfer_threads, "_PAUSE_SECONDS", 0.0)
    with DiskBackend() as backend:
        yield backend
        backend.assert_nothing_is_held()


def forward(x: Tensor, gone: Gone, layers: int = 12) -> Tensor:
    for _ in range(layers):
        x = gone.see(x.sin())
    return x.sum()


def test_h40_the_sources_of_a_dropped_graph_go_with_the_end_of_their_copies(disk: Backend) -> None:
    offload, gone = disk.offload(), Gone()
    with disk.gate() as gate:
        with offload:
            loss = forward(leaf(SIDE, SIDE), gone)
        gate.wait_until_reached()
        del loss
        assert gone.alive, "the copies are still to read them"
        gate.open()
        gone.wait()
    assert_moved(assert_settled(offload))


@pytest.mark.parametrize("asked", ["on their way", "when transfers pause"])
def test_h40_the_sources_of_a_step_go_with_the_end_of_their_copies(asked: str, disk: Backend) -> None:
    offload, gone, x = disk.offload(), Gone(), leaf(SIDE, SIDE)
    forward(x, Gone()).backward()
    expected, x.grad = x.grad, None
    on_their_way = asked == "on their way"
    with disk.gate() as gate:
        with offload:
            loss = forward(x, gone)
        if on_their_way:
            loss.backward()
            del loss
        gate.open()
        gone.wait()
    if not on_their_way:
        loss.backward()
        del loss
    assert_identical(expected, x.grad)
    stats = assert_settled(offload)
    assert_moved(stats)
    assert on_their_way or stats.bytes_in > 0


@pytest.fixture
def slabs(disk: Backend, monkeypatch: pytest.MonkeyPatch) -> Gone:
    """What the runtime's arena takes from the system."""
    arena, taken = disk.runtime.arena, Gone()
    arena.rest()
    allocate = arena._allocate_slab
    monkeypatch.setattr(arena, "_allocate_slab", lambda nbytes: taken.see(allocate(nbytes)))
    return taken


def test_h40_targets_that_will_not_be_asked_for_go_with_their_graph_and_their_memory_with_them(
    disk: Backend, slabs: Gone
) -> None:
    offload = disk.offload()
    with Transfers(disk.runtime) as transfers:
        half = h = x = leaf(SIDE, SIDE)
        with Settled(offload):
            for layer in range(12):
                h = h.sin()
                half = h if layer == 6 else half
            loss = h.sum()
        torch.autograd.grad(loss, half)
        assert len(transfers.back) > 5, "nothing was brought back early"
        del loss, h, half
        slabs.wait()
        assert all(moved.storage() is None for moved in transfers.back)
    assert slabs.seen > 0
    assert x.grad is None
    assert_moved(assert_settled(offload))


def test_h40_the_memory_of_reloads_goes_after_backward_and_serves_again_until_then(
    disk: Backend, slabs: Gone, monkeypatch: pytest.MonkeyPatch
) -> None:
    offload, x = disk.offload(prefetch_bytes=SIDE * SIDE * 4), leaf(SIDE, SIDE)
    forward(x, Gone(), layers=200).backward()
    expected, x.grad = x.grad, None
    back = disk.runtime.transfer_stream(x.device, Direction.IN)
    paused, rest = threading.Event(), back.pauses
    # A backward without a pause of that length.
    monkeypatch.setattr(back, "pauses", lambda: None if not paused.is_set() else rest())
    with Settled(offload):
        loss = forward(x, Gone(), layers=200)
    loss.backward()
    del loss
    assert 0 < slabs.seen <= 2, "each reload took new memory"
    paused.set()
    back._bell.put(None)
    slabs.wait()
    assert_identical(expected, x.grad)
    stats = assert_settled(offload)
    assert_moved(stats)
    assert stats.bytes_in > 100 * SIDE * SIDE * 4
