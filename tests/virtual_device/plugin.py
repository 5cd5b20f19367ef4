"""A pytest plugin, ``-p tests.virtual_device.plugin``: the virtual device is the accelerator of the tests' process."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
import torch

from tests.virtual_device import VirtualDevice, install

_device = install()  # before tests are collected, which ask whether there is an accelerator

#: Hazards that are not run on the device, by what their names match, and why.
_LEFT_OUT = {
    r"sparse|quantized|H67|ragged": "torch has this layout on devices of its own only",
    r"h\d\d_what_a_collective|h13_h06_the_local_part": "there is no process group for the device",
    r"h36_.*on its way-share|h36_.*was_given.*share": "memory of a device is shared without being moved",
    r"h29_who_comes_second": "both backwards would run in autograd's one thread of the device",
}


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for_nothing = re.compile("|".join(_LEFT_OUT))
    left_out = [item for item in items if "[virtual" in item.name and for_nothing.search(item.nodeid)]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if item not in left_out]


@pytest.fixture
def virtual() -> Iterator[VirtualDevice]:
    """The device, on which nothing runs when the test begins and when it has ended."""
    torch.accelerator.synchronize()
    yield _device
    for index in range(_device.devices):
        torch.accelerator.synchronize(index)
