"""Two devices in one process: streams, targets and windows are those of the device that a tensor is on."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import pytest
import torch
from torch import Tensor

from eager_offload import Offload
from eager_offload.runtime.accelerator import accelerator_runtime
from eager_offload.runtime.base import Direction
from tests.hazards.backends import assert_settled
from tests.virtual_device import NAME, VirtualDevice

DEVICES = [torch.device(NAME, index) for index in range(2)]


def saves(device: torch.device, around: AbstractContextManager[object], count: int = 3) -> tuple[Tensor, Tensor]:
    """A leaf, and the end of a graph that saves ``count`` tensors of 4 KiB."""
    x = torch.linspace(0, 1, 1 << 10, device=device).requires_grad_()
    y = x * 1
    with around:
        for _ in range(count):
            y = y.sin()
    return x, y.sum()


@pytest.mark.parametrize("selected", [0, 1])
@pytest.mark.parametrize("owner", [0, 1])
def test_h30_a_tensor_leaves_and_comes_back_by_its_own_device_whichever_is_selected(
    virtual: VirtualDevice, owner: int, selected: int, offloads: Callable[..., Offload]
) -> None:
    offload, device, runtime = offloads(prefetch_bytes=0), DEVICES[owner], accelerator_runtime()
    out, back = (runtime.transfer_stream(device, way).stream_id for way in Direction)
    x, loss = saves(device, nullcontext())
    (expected,) = torch.autograd.grad(loss, x)
    with virtual.noted() as calls:
        x, loss = saves(device, offload)
        offload.stats(synchronize=True)
        with torch.accelerator.device_index(selected):
            before = [torch.accelerator.current_stream(one) for one in DEVICES]
            (found,) = torch.autograd.grad(loss, x)
            assert torch.accelerator.current_device_index() == selected
            assert [torch.accelerator.current_stream(one) for one in DEVICES] == before
    assert torch.equal(found, expected)
    copies = {call.partition(" on ")[2] for call in calls if call.startswith("copy 4096 ")}
    assert copies == {f"{owner}/{out}", f"{owner}/{back}"}
    del loss
    assert assert_settled(offload).bytes_in > 0


def test_h30_a_full_window_of_one_device_does_not_hold_up_the_other(
    virtual: VirtualDevice, offloads: Callable[..., Offload], monkeypatch: pytest.MonkeyPatch
) -> None:
    runtime = accelerator_runtime()
    monkeypatch.setattr(type(runtime), "holds_copies_back", False)
    offload = offloads(max_inflight_bytes=1 << 14)
    away = runtime.transfer_stream(DEVICES[0], Direction.OUT)
    for device in DEVICES:
        saves(device, offload)  # host memory is pinned
    offload.stats(synchronize=True)
    with virtual.held_stream(away):
        with virtual.noted() as calls:
            losses = [saves(DEVICES[0], offload), saves(DEVICES[1], offload, 8)]
        assert virtual.copied_bytes[0] > 0
        assert f"synchronize 0/{away.stream_id}" not in calls
        by_device = {one.device: one.inflight_bytes for one in offload._offloaders.all()}
        assert 0 < by_device[DEVICES[0]] <= 3 << 12
    losses.clear()
    assert assert_settled(offload).bytes_out > 0
