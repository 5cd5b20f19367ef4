"""A stall is what the stream that computes has waited; what the host has waited is a number of its own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from eager_offload import Offload, OffloadStats
from tests.simulation.simulated import SimulatedRuntime
from tests.simulation.timeline import Timeline

N = 64
NBYTES = N * N * 4
SECOND = 1 << 20  # bytes of a transfer that takes one

pytestmark = pytest.mark.filterwarnings("ignore:eager_offload. tier=.host.")


@contextmanager
def training(runtime: SimulatedRuntime, **fields: Any) -> Iterator[Offload]:
    with runtime.checked() as checker:
        offload = Offload(runtime=runtime, tier="host", min_bytes=0, keep_last_bytes=0, **fields)
        yield offload
        offload.close()
    checker.assert_clean()


def forward(x: Tensor, offload: Offload, runtime: SimulatedRuntime, seconds: float = 0.0) -> Tensor:
    """``seconds``: of work that compute is given after each save."""
    with offload:
        h = x
        for _ in range(6):
            h = h.sin()
            runtime.advance(runtime.default_stream, seconds)
        return h.sum()


def gradient() -> Tensor:
    x = torch.linspace(-1, 1, N * N).view(N, N).requires_grad_()
    h = x
    for _ in range(6):
        h = h.sin()
    return torch.autograd.grad(h.sum(), x)[0]


def check(x: Tensor, stats: OffloadStats) -> None:
    assert x.grad is not None
    assert torch.equal(x.grad, gradient())
    assert stats.bytes_out >= 5 * NBYTES


def test_the_host_waits_for_room_while_compute_has_work() -> None:
    runtime = SimulatedRuntime(launch_seconds=0.0, out_bandwidth=SECOND, in_bandwidth=1e12)
    with training(runtime, max_inflight_bytes=NBYTES) as offload:
        x = torch.linspace(-1, 1, N * N).view(N, N).requires_grad_()
        loss = forward(x, offload, runtime, seconds=1.0)
        waited = runtime.timeline.host_wait_seconds
        stats = offload.stats()
        loss.backward()
        check(x, offload.stats(synchronize=True))
    assert stats.host_wait_seconds == pytest.approx(waited)
    assert waited > 0
    assert stats.stall_seconds == stats.window_stall_seconds == 0.0
    assert "stalled 0.0 %" in str(stats)
    assert not any("waited" in sentence and "raise" in sentence for sentence in stats.advice), stats.advice


def test_compute_waits_for_what_is_not_back_while_the_host_goes_on() -> None:
    runtime = SimulatedRuntime(launch_seconds=0.0, out_bandwidth=1e12, in_bandwidth=SECOND)
    with training(runtime, max_inflight_bytes=1 << 30, prefetch_bytes=NBYTES) as offload:
        x = torch.linspace(-1, 1, N * N).view(N, N).requires_grad_()
        loss = forward(x, offload, runtime)
        assert offload.stats(synchronize=True).stall_seconds == 0.0
        runtime.timeline = Timeline()
        loss.backward()
        stalled, waited = runtime.timeline.stall_seconds, runtime.timeline.host_wait_seconds
        stats = offload.stats(synchronize=True)
        check(x, stats)
    assert stats.stall_seconds == pytest.approx(stalled)
    assert stalled > 0
    assert stats.window_stall_seconds == stats.host_wait_seconds == waited == 0.0
    assert any("waited" in sentence for sentence in stats.advice), stats.advice


def test_compute_has_nothing_to_do_while_the_host_waits_for_room() -> None:
    """Then both wait: what the stream has missed is a stall, and the host's wait is longer."""
    runtime = SimulatedRuntime(launch_seconds=0.0, out_bandwidth=SECOND, in_bandwidth=1e12)
    with training(runtime, max_inflight_bytes=NBYTES) as offload:
        x = torch.linspace(-1, 1, N * N).view(N, N).requires_grad_()
        loss = forward(x, offload, runtime, seconds=NBYTES / SECOND / 4)
        stats = offload.stats()
        loss.backward()
        check(x, offload.stats(synchronize=True))
    assert stats.host_wait_seconds > stats.stall_seconds == stats.window_stall_seconds > 0
