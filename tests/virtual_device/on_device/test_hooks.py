"""What pack and unpack cost the host and the device, beyond the copies themselves."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from eager_offload import Offload
from eager_offload._torch import weak_storage
from eager_offload.runtime.accelerator import accelerator_runtime
from eager_offload.runtime.base import Direction
from tests.virtual_device import NAME, VirtualDevice

MIB = 1 << 20
STEPS = 4


def train(around: AbstractContextManager[object], virtual: VirtualDevice) -> tuple[list[Tensor], list[int], list[int]]:
    """Gradients of the last step; how often the host waited in each step, and the device's peak in each."""
    torch.manual_seed(0)
    model = nn.Sequential(*(layer for _ in range(8) for layer in (nn.Linear(128, 128), nn.Tanh()))).to(NAME)
    x = torch.randn(2048, 128).to(NAME)
    waits, peaks = [], []
    for _ in range(STEPS):
        model.zero_grad()
        torch.accelerator.synchronize()
        torch.accelerator.reset_peak_memory_stats()
        before, held = virtual.host_waits, torch.accelerator.memory_allocated()
        with around:
            loss = model(x).square().mean()
        loss.backward()
        del loss
        waits.append(virtual.host_waits - before)
        torch.accelerator.synchronize()
        peaks.append(torch.accelerator.max_memory_allocated() - held)
    return [parameter.grad.cpu() for parameter in model.parameters() if parameter.grad is not None], waits, peaks


def test_nothing_in_a_step_makes_the_host_wait_or_takes_memory_to_measure_with(
    virtual: VirtualDevice, offloads: Any
) -> None:
    with virtual.slow_links(bandwidth=2e8):
        expected, _, plain = train(nullcontext(), virtual)
        offload = offloads()
        actual, waits, peaks = train(offload, virtual)
    stats = offload.stats(synchronize=True)
    assert all(torch.equal(one, other) for one, other in zip(actual, expected, strict=True))
    assert stats.bytes_out > 0
    assert waits == [0] * STEPS
    assert max(peaks) <= max(plain) + 3 * MIB, "two copies and one target"


def test_compute_stalls_for_a_reload_while_the_host_goes_on(virtual: VirtualDevice, offloads: Any) -> None:
    offload = offloads(max_inflight_bytes="1GiB", prefetch_bytes=1)
    x, expected = (torch.linspace(0, 1, 512 * 512).view(512, 512).to(NAME).requires_grad_() for _ in range(2))
    expected.sin().cos().exp().sum().backward()
    with offload:
        loss = x.sin().cos().exp().sum()
    offload.stats(synchronize=True)
    offload.reset_stats()
    runtime = accelerator_runtime()
    with virtual.held_stream(runtime.transfer_stream(x.device, Direction.IN)):
        loss.backward()
        assert offload.stats().stall_seconds == 0, "compute has not come to the end of a wait"
    stats = offload.stats(synchronize=True)
    assert torch.equal(x.grad, expected.grad)
    assert stats.bytes_in > 0
    assert stats.stall_seconds > 0 == stats.host_wait_seconds
    assert stats.window_stall_seconds == 0


def test_a_stream_has_two_copies_and_those_that_have_not_started_when_their_graph_is_dropped_are_not_made(
    virtual: VirtualDevice, offloads: Any
) -> None:
    """With one the link would be idle until the host notices that it is over."""
    offload = offloads(max_inflight_bytes="1GiB")
    x = torch.ones(512, 512).to(NAME).requires_grad_()
    runtime, copied = accelerator_runtime(), virtual.copied_bytes[0]
    transfers = runtime.transfer_stream(x.device, Direction.OUT)
    with virtual.held_stream(transfers):
        with offload:
            y = x * 1
            for _ in range(4):
                y = y.sin()
        assert offload.stats().bytes_out > 3 * x.nbytes, "all that the window has room for is to leave"
        del y
        offload.stats()
    stats = offload.stats(synchronize=True)
    assert stats.bytes_out == virtual.copied_bytes[0] - copied == 2 * x.nbytes, "those that the stream had been given"
    assert stats.offloaded_bytes == stats.released_bytes == 2 * x.nbytes
    assert stats.kept_bytes["newest"] == stats.saved_bytes - 2 * x.nbytes


def test_a_fast_link_is_given_little_ahead_of_what_the_device_would_hold(virtual: VirtualDevice, offloads: Any) -> None:
    """What it has been given holds its source until the copy is over, whatever backward has done meanwhile."""
    offload, runtime = offloads(), accelerator_runtime()
    x, several = torch.ones(1 << 12).to(NAME).requires_grad_(), 96

    def forward() -> torch.Tensor:
        y = x * 1
        with offload:
            for _ in range(several):
                y = y.sin()
        return y

    for _ in range(3):  # by which its rate is known
        y = forward()
        offload.stats(synchronize=True)
        del y
    copied = virtual.copied_bytes[0]
    with virtual.held_stream(runtime.transfer_stream(x.device, Direction.OUT)):
        y = forward()
        del y
        offload.stats()
    offload.stats(synchronize=True)
    assert 0 < virtual.copied_bytes[0] - copied <= several / 32 * x.nbytes


@pytest.mark.parametrize(("capacity", "windows"), [(1 << 30, [64, 4, 4]), (64 * MIB, [4, 4, 4]), (32 * MIB, [2, 2, 2])])
def test_windows_are_of_the_last_step_and_at_most_a_16th_of_the_device(
    virtual: VirtualDevice, capacity: int, windows: list[int]
) -> None:
    """16 tensors of a MiB."""
    x, found = torch.linspace(-1, 1, MIB // 4).to(NAME).requires_grad_(), []

    def step(around: AbstractContextManager[object]) -> Tensor:
        with around:
            y = x * 1
            for _ in range(16):
                y = y.sigmoid() * 2
        (gradient,) = torch.autograd.grad(y.sum(), x)
        return gradient

    expected = step(nullcontext())
    with virtual.capacity(capacity):
        offload = Offload(tier="host", min_bytes=0)
        for _ in windows:
            assert torch.equal(step(offload), expected)
            stats = offload.stats(synchronize=True)
            found.append(stats.max_inflight_bytes)
    assert found == [window * MIB for window in windows]
    assert stats.bytes_out > 0
    offload.close()


def peak_of_a_step(around: AbstractContextManager[object], nbytes: int) -> int:
    """Most bytes above those before that four chains of operators take, each of which saves ``nbytes``."""
    leaves = [torch.ones(nbytes // 4).to(NAME).requires_grad_() for _ in range(4)]
    torch.accelerator.synchronize()
    torch.accelerator.reset_peak_memory_stats()
    held = torch.accelerator.memory_allocated()
    with around:
        losses = [leaf.sin().sin().sin().sum() for leaf in leaves]
    torch.autograd.backward(losses)
    torch.accelerator.synchronize()
    return torch.accelerator.max_memory_allocated() - held


@pytest.mark.parametrize("tier", ["host", "disk"])
def test_copies_that_a_slow_link_cannot_make_in_time_hold_no_sources(
    virtual: VirtualDevice, tier: str, offloads: Any
) -> None:
    with virtual.slow_links(latency=0.02):
        plain = peak_of_a_step(nullcontext(), 2 * MIB)
        offload = offloads(tier=tier)
        peaks = [peak_of_a_step(offload, 2 * MIB) for _ in range(2)]
    stats = offload.stats(synchronize=True)
    assert stats.bytes_out > 0
    assert max(peaks) <= plain + 6 * MIB, "two copies and one target"


@pytest.mark.parametrize("plans", [False, True], ids=["decided", "followed"])
def test_h54_a_source_goes_at_the_save_at_which_it_went_before(
    virtual: VirtualDevice, plans: bool, offloads: Any
) -> None:
    """Its copy is over by then, and what is saved there shares a storage."""
    offload = offloads(step_plans=plans)
    for number in range(4):
        x = torch.ones(64, 64).to(NAME).requires_grad_()
        with offload:
            h = x * 2
            source = weak_storage(h.untyped_storage())
            y = h.sin().exp()  # whose result is saved, and the copy of `h` starts
            del h
            torch.accelerator.synchronize()
            assert source() is not None
            loss = y.cos().sum()
            assert source() is None, number
        del y
        loss.backward()
        del loss
        stats = offload.stats(synchronize=True)  # or a copy that is still on its way would hold the next one back
    assert stats.followed_forwards == (3 if plans else 0)
    assert not stats.plan_misses


# -- a device that is full, by its own account ------------------------------------------------------------------------


def gradient(x: Tensor, weight: Tensor, around: AbstractContextManager[object]) -> Tensor:
    """Saves an eighth of a tensor, and no more of it."""
    with around:
        product = (x * 2)[:, ::8] * weight
        loss = product.sum()
    del product  # it had the room while the view was to leave
    return torch.autograd.grad(loss, weight)[0].cpu()


def test_h10_a_view_that_finds_no_room_to_be_gathered_stays(virtual: VirtualDevice, offloads: Any) -> None:
    torch.accelerator.empty_cache()  # else there may be room beside them in the segments that they get
    x, weight = torch.randn(4096, 4096), torch.randn(4096, 512)
    x, weight = x.to(NAME), weight.to(NAME).requires_grad_()
    expected = gradient(x, weight, nullcontext())
    offload = offloads()
    assert torch.equal(gradient(x, weight, offload), expected)
    assert offload.stats(synchronize=True).bytes_out == weight.nbytes, "gathered"
    offload.reset_stats()
    torch.accelerator.synchronize()
    torch.accelerator.empty_cache()
    # Room for the tensor and for the product, and none for the elements of the view side by side.
    with virtual.capacity(torch.accelerator.memory_reserved() + x.nbytes + weight.nbytes + 4 * MIB):
        with pytest.warns(RuntimeWarning, match=f"{NAME}:0 has no memory left to gather the {weight.nbytes} bytes"):
            assert torch.equal(gradient(x, weight, offload), expected)
        torch.accelerator.empty_cache()
    stats = offload.stats(synchronize=True)
    assert stats.kept_bytes["failed"] == weight.nbytes
    assert stats.demotions == {"device_full": 1}
    assert stats.bytes_out == 0
    # What follows finds room.
    assert torch.equal(gradient(x, weight, offload), expected)
    assert offload.stats(synchronize=True).bytes_out == weight.nbytes
