"""A slab of pinned memory serves a new owner, or goes back, when the copies of its last owner are over.

Each tensor has 40 MiB and so a slab of its own. Its last owner is gone as soon as backward is enqueued, while the copy
that brings its bytes back has not begun: the stream for copies in stands still.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

import pytest
import torch
from torch import Tensor

from eager_offload import Offload
from eager_offload._torch import host_registration
from eager_offload.runtime.accelerator import accelerator_runtime
from eager_offload.runtime.base import Direction
from tests.virtual_device import NAME, VirtualDevice

MIB = 1 << 20


@pytest.fixture(autouse=True)
def _pages_are_registered(virtual: VirtualDevice) -> None:
    assert host_registration() is not None, "else all slabs are powers of two, and are shared"


@pytest.fixture
def offload() -> Iterator[Offload]:
    with_all = Offload(tier="host", keep_last_bytes=0, min_bytes=0, host_budget="90MiB")
    yield with_all
    with_all.close()


def forward(x: Tensor, stream: torch.Stream, around: AbstractContextManager[object]) -> Tensor:
    """A graph on ``stream`` that saves one tensor of the size of ``x``, the values that ``x`` gets as its gradient."""
    with stream, around:
        return x.exp().sum()


def leaf(seed: int, mib: int = 40, device: int = 0) -> Tensor:
    values = torch.randn(mib * MIB // 4, generator=torch.Generator().manual_seed(seed))
    return values.to(f"{NAME}:{device}").requires_grad_()


def side_stream(device: int = 0) -> torch.Stream:
    """One that no transfers run on: torch hands out a few in turn."""
    place, runtime = torch.device(NAME, device), accelerator_runtime()
    transfers = [runtime.transfer_stream(place, direction) for direction in Direction]
    while (stream := torch.Stream(device=place)) in transfers:
        pass
    return stream


def finish(virtual: VirtualDevice) -> None:
    for index in range(virtual.devices):
        torch.accelerator.synchronize(index)


def expected(x: Tensor) -> Tensor:
    """The gradient without offload."""
    grad = torch.autograd.grad(x.exp().sum(), x)[0]
    return grad.cpu()


@contextmanager
def held(virtual: VirtualDevice, direction: Direction) -> Iterator[None]:
    """What is copied on device 0 begins at the end."""
    with virtual.held_stream(accelerator_runtime().transfer_stream(torch.device(NAME, 0), direction)):
        yield


@pytest.mark.parametrize("there", [0, 1], ids=["another stream", "another device"])
def test_a_slab_is_not_written_before_its_last_owner_is_read(
    virtual: VirtualDevice, offload: Offload, there: int
) -> None:
    first, second = leaf(1), leaf(2, device=there)
    wanted = [expected(first), expected(second)]
    finish(virtual)
    loss = forward(first, side_stream(), offload)
    offload.stats(synchronize=True)
    with held(virtual, Direction.IN):
        loss.backward()
        del loss
        stream = side_stream(there)
        again = forward(second, stream, offload)
        stream.synchronize()  # from here on nothing else holds the copy up
        waits = not accelerator_runtime().transfer_stream(second.device, Direction.OUT).query()
    finish(virtual)
    stats = offload.stats(synchronize=True)
    again.backward()
    del again
    finish(virtual)
    assert torch.equal(first.grad.cpu(), wanted[0])
    assert torch.equal(second.grad.cpu(), wanted[1])
    assert waits
    assert stats.host_bytes_peak == 40 * MIB, "both had the same slab"
    assert stats.bytes_out == 2 * 40 * MIB
    assert offload.stats().bytes_in == 2 * 40 * MIB


def test_a_slab_is_not_unregistered_before_its_last_owner_is_read(virtual: VirtualDevice, offload: Offload) -> None:
    first, second = leaf(1), leaf(2, mib=60)
    wanted = [expected(first), expected(second)]
    finish(virtual)
    loss = forward(first, side_stream(), offload)
    offload.stats(synchronize=True)
    # There is room for the second where the idle slab is given back, which cannot be yet: so it stays.
    with held(virtual, Direction.IN):
        loss.backward()
        del loss
        with pytest.warns(RuntimeWarning, match="no room for"):
            again = forward(second, side_stream(), offload)
    finish(virtual)  # raises what a stream ran into
    stats = offload.stats(synchronize=True)
    assert stats.kept_bytes["budget"] == second.nbytes
    assert stats.host_bytes_peak == 40 * MIB
    again.backward()
    assert torch.equal(first.grad.cpu(), wanted[0])
    assert torch.equal(second.grad.cpu(), wanted[1])
    second.grad = None
    del again
    again = forward(second, side_stream(), offload)
    stats = offload.stats(synchronize=True)
    again.backward()
    finish(virtual)
    assert stats.bytes_out == first.nbytes + second.nbytes, "it has gone back meanwhile"
    assert torch.equal(second.grad.cpu(), wanted[1])


def test_a_slab_is_not_idle_before_its_owner_is_written(virtual: VirtualDevice, offload: Offload) -> None:
    first, second = leaf(1), leaf(2, device=1)
    wanted = expected(second)
    finish(virtual)
    with held(virtual, Direction.OUT):
        loss = forward(first, side_stream(), offload)
        del loss  # while its bytes have not begun to leave
        again = forward(second, side_stream(1), offload)
    finish(virtual)
    stats = offload.stats(synchronize=True)
    (tier,) = offload._offloaders.tiers()
    assert tier.held_bytes == 2 * 40 * MIB, "two slabs"
    assert stats.bytes_out == 2 * 40 * MIB
    again.backward()
    finish(virtual)
    assert offload.stats().bytes_in == second.nbytes
    assert torch.equal(second.grad.cpu(), wanted)
