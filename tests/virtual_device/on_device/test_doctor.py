"""What the doctor measures is the device's own speed, not that at which the host hands work over."""

from __future__ import annotations

import pytest
import torch

from eager_offload.observe.doctor import probes
from tests.virtual_device import NAME, VirtualDevice

SIDE, SECONDS = 64, 0.02


def test_products_are_timed_until_the_device_has_made_them(
    virtual: VirtualDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(probes, "_SIZE", SIDE)
    with virtual.slow_compute(0.0, mm=SECONDS):
        flops = probes.matmul_flops(torch.device(NAME, 0), torch.float32)
    assert 0 < flops <= 2 * SIDE**3 / SECONDS
