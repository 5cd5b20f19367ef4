"""The device is full, by its own account."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.virtual_device import NAME, VirtualDevice

MIB = 1 << 20


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
