"""H40, H69: memory goes back when its use is over, although the program calls the library no more, and although a tier
is slower than the step: copies of graphs that are gone are cancelled, and their sources go.

Of H40 nothing asks for stats, packs, unpacks or enters a context between what ends the use and what is asserted. The
tier of H69 carries nothing at all until it is let, so that no time comes into it.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from eager_offload.runtime import transfer_threads
from tests.hazards.backends import Backend, assert_settled
from tests.hazards.probes import Gone, Transfers
from tests.hazards.programs import Settled, assert_moved
from tests.programs import leaf

SIDE, LAYERS = 64, 12
NBYTES = SIDE * SIDE * 4


def forward(x: Tensor, gone: Gone, layers: int = LAYERS) -> Tensor:
    for _ in range(layers):
        x = gone.see(x.sin())
    return x.sum()


def gradient(x: Tensor, layers: int = LAYERS) -> Tensor:
    return torch.autograd.grad(forward(x, Gone(), layers), x)[0]


@pytest.fixture
def no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    """Transfers pause as soon as there are none."""
    monkeypatch.setattr(transfer_threads, "_PAUSE_SECONDS", 0.0)


@pytest.mark.usefixtures("no_pause")
@pytest.mark.parametrize("ends", ["dropped", "with copies on their way", "later"])
def test_h40_sources_go_with_the_end_of_their_copies(ends: str, disk: Backend) -> None:
    offload, gone, x = disk.offload(), Gone(), leaf(SIDE, SIDE)
    with disk.gate() as gate:
        with offload:
            loss = forward(x, gone)
        gate.wait_until_reached()
        if ends == "with copies on their way":
            loss.backward()
        if ends != "later":
            del loss
        assert gone.alive, "the copies are still to read them"
        gate.open()
        gone.wait()
    if ends == "later":
        loss.backward()
        del loss
    assert ends == "dropped" or torch.equal(gradient(x), x.grad)
    stats = assert_settled(offload)
    assert_moved(stats)
    assert ends != "later" or stats.bytes_in > 0


@pytest.fixture
def slabs(no_pause: None, disk: Backend, monkeypatch: pytest.MonkeyPatch) -> Gone:
    """What the runtime's pool takes from the system."""
    pool, taken = disk.runtime.pool, Gone()
    pool.rest()
    allocate = pool._allocate_slab
    monkeypatch.setattr(pool, "_allocate_slab", lambda nbytes: taken.see(allocate(nbytes)))
    return taken


def test_h40_targets_that_will_not_be_asked_for_go_with_their_graph_and_their_memory_with_them(
    disk: Backend, slabs: Gone
) -> None:
    offload = disk.offload()
    with Transfers(disk.runtime) as transfers:
        with Settled(offload):
            half = leaf(SIDE, SIDE).sin().sin().sin()
            loss = forward(half, Gone())
        torch.autograd.grad(loss, half)
        assert len(transfers.targets) > 5, "nothing was brought back early"
        del loss, half
        slabs.wait()
        assert [target() for target in transfers.targets] == [None] * len(transfers.targets)
    assert slabs.seen > 0
    assert_moved(assert_settled(offload))


# -- a slow tier ------------------------------------------------------------------------------------------------------

#: How many copies a transfer stream is given at once.
GIVEN = 2


@pytest.mark.usefixtures("held_back")
@pytest.mark.parametrize("plans", [True, False], ids=["with step plans", "without"])
@pytest.mark.parametrize("goes_backward", [True, False], ids=["trained", "dropped"])
def test_h69_sources_of_graphs_that_are_gone_do_not_pile_up(plans: bool, goes_backward: bool, disk: Backend) -> None:
    offload, gone, x = disk.offload(step_tables=plans), Gone(), leaf(SIDE, SIDE)
    with disk.gate() as gate:
        for number in range(8):
            with offload:
                loss = forward(x * 1, gone)
            if goes_backward:
                x.grad = None
                loss.backward()
            del loss
            stats = offload.stats()
            assert gone.alive <= GIVEN, f"step {number}"
            assert stats.inflight_bytes_peak <= (LAYERS + 2 + GIVEN) * NBYTES
            assert stats.device_bytes_peak <= stats.without_offload_bytes_peak + GIVEN * NBYTES
        gate.open()
        assert assert_settled(offload).bytes_out > 0
    assert not goes_backward or torch.equal(gradient(x), x.grad)


@pytest.mark.usefixtures("held_back")
def test_h69_a_thread_that_has_carried_all_that_it_was_given_takes_the_rest(disk: Backend) -> None:
    """No call of the library comes: what was held back leaves all the same, and its sources go."""
    offload, gone = disk.offload(), Gone()
    with offload:
        loss = forward(leaf(SIDE, SIDE) * 1, gone)
    gone.wait()
    loss.backward()
    assert assert_settled(offload).bytes_out >= LAYERS * NBYTES
