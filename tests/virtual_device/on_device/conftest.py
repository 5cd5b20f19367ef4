"""A runtime of a test's own, over calls that are noted and made to fail."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from eager_offload.runtime.accelerator import AcceleratorRuntime
from tests.threads import collect
from tests.virtual_device import VirtualDevice
from tests.virtual_device.api import Api


@pytest.fixture
def api(virtual: VirtualDevice, monkeypatch: pytest.MonkeyPatch) -> Api:
    return Api(monkeypatch)


@pytest.fixture
def runtime(api: Api, virtual: VirtualDevice) -> Iterator[AcceleratorRuntime]:
    """In the end it has nothing registered."""
    runtime = AcceleratorRuntime(probe_bytes=1 << 16)
    yield runtime
    for index in range(virtual.devices):
        torch.accelerator.synchronize(index)
    collect()
    runtime.close()
    runtime.poll()
    assert not api.registered
