"""What compiled code offloads and no tier has room for: a copy on the device, whose order and life are kept."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from eager_offload import Offload
from eager_offload.compile import ops
from tests.threads import collect
from tests.virtual_device import NAME, VirtualDevice

SIDE = 64


@pytest.mark.filterwarnings("ignore:eager_offload. no room for:RuntimeWarning")
def test_h26_what_stays_on_the_device_is_read_after_it_was_copied_and_lives_until_then(
    virtual: VirtualDevice, offloads: Callable[..., Offload], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One stream copies and is late; another one reads, while whatever stood for the copy is dropped."""
    monkeypatch.setattr(ops, "_homes", lambda device, nbytes: [device])  # the host has no memory left
    one, other = torch.Stream(device=NAME), torch.Stream(device=NAME)
    device, offload = torch.device(NAME), offloads(host_budget=1)
    config = offload.config.to_text()
    source = torch.arange(SIDE * SIDE, dtype=torch.float32, device=NAME) * 2
    expected = source.cpu()
    with virtual.held_stream(one):
        with one, offload:
            host = ops.offload(source, config=config, wait=True)
        with other:
            back = ops.reload(host, device, config=config, wait=True)
        del host
        collect()
        with one:
            others = [torch.full_like(source, 7.0) for _ in range(8)]
    torch.accelerator.synchronize()
    assert torch.equal(back.cpu(), expected)
    assert len(others) == 8
    assert offload.stats(synchronize=True).kept_bytes["budget"] == source.nbytes
