"""What is measured is the device's own speed, not that at which the host hands work over."""

from __future__ import annotations

import torch

from eager_offload.machine import measure
from tests.virtual_device import NAME, VirtualDevice

SECONDS = 0.03


def test_products_are_timed_until_the_device_has_made_them(virtual: VirtualDevice) -> None:
    with virtual.slow_compute(0.0, mm=SECONDS):
        found = measure(torch.device(NAME, 0)).machine
    assert 0 < found.single_flops <= 2 * 512**3 / SECONDS
