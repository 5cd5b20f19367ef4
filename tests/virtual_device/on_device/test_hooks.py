"""What pack and unpack cost the host and the device, beyond the copies themselves."""

from __future__ import annotations

from collections import Counter
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from eager_offload.observe.timeline import SliceKind
from eager_offload.observe.trace import read_trace
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
    before = virtual.host_waits
    torch.empty(MIB).copy_(torch.ones(MIB, device=NAME), non_blocking=True)
    assert virtual.host_waits > before, "the device counts the host's waits for pageable memory"


@pytest.mark.parametrize("tells_time", [True, False], ids=["with a clock", "without one"])
def test_no_step_that_is_traced_makes_the_host_wait_and_each_copy_is_timed(
    virtual: VirtualDevice, offloads: Any, tmp_path: Path, tells_time: bool
) -> None:
    offload, path = offloads(), tmp_path / "trace.json"
    clock = nullcontext() if tells_time else virtual.without_a_clock()
    with virtual.slow_links(bandwidth=2e8), clock, offload.trace(path):
        _, waits, _ = train(offload, virtual)
    assert waits == [0] * STEPS
    trace, stats = read_trace(path), offload.stats()
    kinds = Counter(one.kind for one in trace.slices)
    assert kinds[SliceKind.COMPUTE] > STEPS
    assert all(0 <= one.start <= one.stop <= trace.seconds for one in trace.slices)
    assert kinds[SliceKind.OFFLOAD] == (stats.offloaded_tensors if tells_time else 0)


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


@pytest.mark.parametrize("tier", ["host", "disk"])
def test_copies_that_a_slow_link_cannot_make_in_time_hold_no_sources(
    virtual: VirtualDevice, tier: str, offloads: Any
) -> None:
    def peak(around: AbstractContextManager[object]) -> int:
        """Most bytes above those before that four chains of operators take, each of which saves 2 MiB."""
        leaves = [torch.ones(MIB // 2).to(NAME).requires_grad_() for _ in range(4)]
        torch.accelerator.synchronize()
        torch.accelerator.reset_peak_memory_stats()
        held = torch.accelerator.memory_allocated()
        with around:
            losses = [leaf.sin().sin().sin().sum() for leaf in leaves]
        torch.autograd.backward(losses)
        torch.accelerator.synchronize()
        return torch.accelerator.max_memory_allocated() - held

    with virtual.slow_links(latency=0.02):
        plain, offload = peak(nullcontext()), offloads(tier=tier)
        assert max(peak(offload) for _ in range(2)) <= plain + 6 * MIB, "two copies and one target"
    assert offload.stats(synchronize=True).bytes_out > 0


# -- a device that is full, by its own account ------------------------------------------------------------------------


def test_h10_a_view_that_finds_no_room_to_be_gathered_stays(virtual: VirtualDevice, offloads: Any) -> None:
    torch.accelerator.empty_cache()  # else there may be room beside them in the segments that they get
    x, weight = torch.randn(2048, 4096).to(NAME), torch.randn(2048, 512).to(NAME).requires_grad_()

    def gradient(around: AbstractContextManager[object]) -> Tensor:
        """Saves an eighth of a tensor, and no more of it."""
        with around:
            product = (x * 2)[:, ::8] * weight
            loss = product.sum()
        del product  # it had the room while the view was to leave
        return torch.autograd.grad(loss, weight)[0].cpu()

    expected, offload = gradient(nullcontext()), offloads()
    for has_room in (True, False, True):
        offload.reset_stats()
        torch.accelerator.synchronize()
        torch.accelerator.empty_cache()
        # Else for the tensor and for the product, and none for the elements of the view side by side.
        room = torch.accelerator.memory_reserved() + x.nbytes + (5 if has_room else 1) * weight.nbytes + 4 * MIB
        message = f"{NAME}:0 has no memory left to gather the {weight.nbytes} bytes"
        with virtual.capacity(room), nullcontext() if has_room else pytest.warns(RuntimeWarning, match=message):
            assert torch.equal(gradient(offload), expected)
        stats = offload.stats(synchronize=True)
        assert stats.bytes_out == (weight.nbytes if has_room else 0)
        assert stats.kept_bytes.get("failed", 0) == (0 if has_room else weight.nbytes)
        assert stats.fallbacks == ({} if has_room else {"device_full": 1})
