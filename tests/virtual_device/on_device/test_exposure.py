"""What the link hides moves, by the times that the device's own events tell."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import eager_offload as eo
from tests.virtual_device import NAME, VirtualDevice

MIB = 1 << 20
WINDOW = MIB
LAYERS, WIDTH, ROWS = 24, 64, 1024  # each layer saves a quarter of a MiB twice
pytestmark = pytest.mark.usefixtures("one_thread")


def train(
    steps: int, virtual: VirtualDevice, bandwidth: float, **fields: object
) -> tuple[list[Tensor], eo.OffloadStats]:
    """The parameters after so many steps, and the stats of the last six."""
    torch.manual_seed(0)
    layers = (layer for _ in range(LAYERS) for layer in (nn.Linear(WIDTH, WIDTH), nn.Tanh()))
    model = nn.Sequential(*layers).to(NAME)
    batch = torch.ones(ROWS, WIDTH).to(NAME)
    windows = {"max_inflight_bytes": WINDOW, "prefetch_bytes": WINDOW}
    offload = eo.Offload(tier="host", min_bytes=MIB // 8, **windows, **fields)
    with virtual.slow_links(bandwidth=bandwidth):
        for step in range(steps):
            if step == steps - 6:
                offload.reset_stats()
            with offload:
                loss = model(batch).square().mean()
            loss.backward()
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter -= 0.01 * parameter.grad
                    parameter.grad = None
        stats = offload.stats(synchronize=True)
    offload.close()
    return [parameter.detach().cpu() for parameter in model.parameters()], stats


def test_behind_a_slow_link_most_stays_and_gradients_are_exact(virtual: VirtualDevice) -> None:
    steps = 80
    expected, plain = train(steps, virtual, 0.0, enabled=False)
    actual, free = train(steps, virtual, 5e7, policy="free")
    assert plain.bytes_out == 0
    assert all(torch.equal(one, other) for one, other in zip(actual, expected, strict=True))
    _, most = train(8, virtual, 5e7)
    assert most.bytes_out > 0
    assert free.bytes_out < most.bytes_out / 2
    assert free.keep_last_bytes > 4 * WINDOW
    assert free.followed_forwards > 0
