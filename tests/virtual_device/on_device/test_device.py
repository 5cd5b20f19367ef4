"""The virtual device does what a GPU does, where the order of work and the owners of memory matter."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from eager_offload.tiers.memory import PAGE, anonymous_slab
from eager_offload.torch_private.captures import host_registration
from tests.virtual_device import NAME, VirtualDevice

LATE = 0.05  # seconds; what a missing wait overtakes
MIB = 1 << 20


# -- copies -----------------------------------------------------------------------------------------------------------


def test_pageable_memory_makes_the_host_wait(virtual: VirtualDevice) -> None:
    x = torch.ones(MIB, device=NAME)
    pinned, pageable = torch.empty(MIB, pin_memory=True), torch.empty(MIB)
    torch.accelerator.synchronize()
    for target, expected in ((pinned, 0), (pageable, 1)):
        with virtual.slow_links(latency=LATE):
            waits = virtual.host_waits
            target.copy_(x, non_blocking=True)
            assert virtual.host_waits - waits == expected
    torch.accelerator.synchronize()
    assert torch.equal(pinned, pageable)


def test_a_copy_has_to_be_in_one_registration_that_outlives_it(virtual: VirtualDevice) -> None:
    registration = host_registration()
    assert registration is not None
    pages, x = anonymous_slab(3 * PAGE), torch.zeros(2 * PAGE, dtype=torch.uint8, device=NAME)
    for page in range(2):
        assert registration.register(pages.data_ptr() + page * PAGE, PAGE, 0) == 0
    assert registration.register(pages.data_ptr(), 2 * PAGE, 0) != 0, "what is registered already"
    assert pages[:PAGE].is_pinned()
    for start in (0, PAGE):
        with pytest.raises(RuntimeError, match="invalid argument"):
            x.copy_(pages[start : start + 2 * PAGE], non_blocking=True)
    with virtual.slow_links(latency=LATE):
        x[:PAGE].copy_(pages[PAGE : 2 * PAGE], non_blocking=True)
        for page in range(2):
            assert registration.unregister(pages.data_ptr() + page * PAGE) == 0
        with pytest.raises(RuntimeError, match="unregistered while a copy used it"):
            torch.accelerator.synchronize()
    torch.accelerator.synchronize()
    assert registration.unregister(pages.data_ptr()) != 0


# -- memory -----------------------------------------------------------------------------------------------------------


def test_the_host_that_touches_device_memory_dies_of_it() -> None:
    program = (
        "import ctypes, torch; from tests.virtual_device import install; install()\n"
        "x = torch.ones(4, device='virtual'); ctypes.string_at(x.data_ptr(), 4)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode < 0
    assert "the host touched its memory at 0x" in done.stderr
