"""The virtual device does what a GPU does, where the order of work and the owners of memory matter."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from eager_offload._torch import host_registration
from eager_offload.tiers.memory import PAGE, anonymous_slab
from tests.virtual_device import NAME, VirtualDevice

LATE = 0.05  # seconds; what a missing wait overtakes
MIB = 1 << 20


def side_stream() -> torch.Stream:
    return torch.Stream(device=NAME)


# -- streams and events -----------------------------------------------------------------------------------------------


def test_each_record_of_an_event_is_a_point_of_its_own(virtual: VirtualDevice) -> None:
    side, event = side_stream(), torch.Event(device=NAME)
    event.record()
    event.synchronize()
    assert event.query()
    virtual.sleep(LATE)
    event.record()
    assert not event.query(), "it stands for the later record now"
    side.wait_event(torch.Event(device=NAME))  # never recorded: no wait
    assert side.query()
    event.synchronize()


def test_an_error_on_a_stream_is_told_later(virtual: VirtualDevice) -> None:
    x = torch.zeros(4).to(NAME)
    index = torch.tensor([7]).to(NAME)
    x[index]  # out of range, which only the kernel sees
    with pytest.raises(RuntimeError, match="asynchronously: index 7 is out of bounds"):
        torch.accelerator.synchronize()
    torch.accelerator.synchronize()


# -- copies -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("out", [True, False])
def test_copies_arrive_in_parts(virtual: VirtualDevice, out: bool) -> None:
    host = torch.zeros(4 * PAGE, pin_memory=True)
    device = torch.ones(4 * PAGE, device=NAME)
    target, source = (host, device) if out else (device, host)
    torch.accelerator.synchronize()
    seen = set()
    with virtual.slow_links(latency=4 * LATE):
        target.copy_(source, non_blocking=True)
        event = torch.Event(device=NAME)
        event.record()
        while not event.query():
            now = host if out else virtual.peek(device)
            seen.add(int((now == source.new_tensor(float(out), device="cpu")).sum()) // PAGE)
    assert seen & {1, 2, 3}, "never half of it"
    assert torch.equal(host, device.cpu())


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


def test_a_block_is_handed_out_again_at_once_on_its_own_stream_and_painted(virtual: VirtualDevice) -> None:
    side = side_stream()
    x = torch.ones(MIB, device=NAME)
    address = x.data_ptr()
    with side:
        virtual.sleep(LATE)
        y = x + 1
    del x  # while the side stream has not read it
    again = torch.empty(MIB, device=NAME)
    assert again.data_ptr() == address
    torch.accelerator.synchronize()
    assert virtual.peek(again).isnan().all()
    with side:
        elsewhere = torch.empty(MIB, device=NAME)
    assert elsewhere.data_ptr() not in (address, y.data_ptr())


def test_record_stream_keeps_a_block_until_the_other_stream_is_there(virtual: VirtualDevice) -> None:
    x, side = torch.ones(MIB, device=NAME), side_stream()
    torch.accelerator.synchronize()
    address = x.data_ptr()
    with side:
        virtual.sleep(LATE)
        y = x + 1
    x.record_stream(side)
    del x
    assert torch.empty(MIB, device=NAME).data_ptr() != address
    side.synchronize()
    assert torch.equal(y.cpu(), torch.full((MIB,), 2.0))
    assert torch.empty(MIB, device=NAME).data_ptr() == address


def test_it_is_full_at_its_capacity_and_tries_again_without_the_cache(virtual: VirtualDevice) -> None:
    torch.accelerator.empty_cache()
    held = torch.accelerator.memory_reserved()
    with virtual.capacity(held + 8 * MIB):
        x = torch.empty(6 * MIB, dtype=torch.uint8, device=NAME)
        with pytest.raises(torch.OutOfMemoryError, match="Tried to allocate 6291456 bytes"):
            torch.empty(6 * MIB, dtype=torch.uint8, device=NAME)
        del x
        assert torch.accelerator.memory_reserved() == held + 6 * MIB, "cached"
        y = torch.empty(8 * MIB, dtype=torch.uint8, device=NAME)  # too large for the cache
        assert torch.accelerator.memory_allocated() >= y.nbytes


def test_pinned_memory_is_cached_and_rounded_up(virtual: VirtualDevice) -> None:
    x = torch.empty(3 * PAGE, dtype=torch.uint8, pin_memory=True)
    address = x.data_ptr()
    del x
    y = torch.empty(4 * PAGE, dtype=torch.uint8, pin_memory=True)
    assert y.data_ptr() == address, "both are four pages"
    source = torch.ones(4 * PAGE, dtype=torch.uint8, device=NAME)
    with virtual.slow_links(latency=LATE):
        y.copy_(source, non_blocking=True)
        del y
        assert torch.empty(4 * PAGE, dtype=torch.uint8, pin_memory=True).data_ptr() != address, "a copy still writes it"
        torch.accelerator.synchronize()


def test_the_host_that_touches_device_memory_dies_of_it() -> None:
    program = (
        "import ctypes, torch; from tests.virtual_device import install; install()\n"
        "x = torch.ones(4, device='virtual'); ctypes.string_at(x.data_ptr(), 4)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode < 0
    assert "the host touched its memory at 0x" in done.stderr


# -- operators --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "size"),
    [
        (lambda: nn.ConvTranspose2d(4, 6, 3, groups=2), (2, 4, 5, 5)),
        (lambda: nn.Sequential(nn.Conv2d(3, 4, 3, stride=2), nn.MaxPool2d(2)), (2, 3, 9, 9)),
        (lambda: nn.Sequential(nn.BatchNorm1d(6), nn.Linear(6, 6), nn.GELU(), nn.Softmax(-1)), (8, 6)),
        (lambda: nn.TransformerEncoderLayer(16, 4, 32, dropout=0.0, batch_first=True), (2, 6, 16)),
    ],
)
def test_values_are_those_of_the_cpu(
    virtual: VirtualDevice, make: Callable[[], nn.Module], size: tuple[int, ...]
) -> None:
    torch.manual_seed(1)
    module, x = make(), torch.randn(*size)

    def gradients(module: nn.Module, x: Tensor) -> list[Tensor]:
        x = x.clone().requires_grad_()
        y = module(x)
        grads = torch.autograd.grad(y.square().sum(), [x, *module.parameters()])
        return [y.detach().cpu(), *(grad.cpu() for grad in grads)]

    expected = gradients(module, x)
    with virtual.slow_compute(1e-3):
        for one, other in zip(gradients(module.to(NAME), x.to(NAME)), expected, strict=True):
            torch.testing.assert_close(one, other)


def test_what_draws_numbers_takes_one_from_the_generator_and_does_not_wait(virtual: VirtualDevice) -> None:
    def draws() -> list[Tensor]:
        return [torch.randn(5, device=NAME), torch.nn.functional.dropout(ones, 0.5), torch.rand(5, device=NAME)]

    ones = torch.ones(1 << 10, device=NAME)
    torch.manual_seed(3)
    with virtual.held():
        waits = virtual.host_waits
        first = draws()
        assert virtual.host_waits == waits
    state = torch.get_rng_state()
    torch.manual_seed(3)
    assert all(torch.equal(one, other) for one, other in zip(first, draws(), strict=True))
    assert torch.equal(torch.get_rng_state(), state)
    assert not torch.equal(first[0], draws()[0])
    assert 400 < (first[1] == 2).sum().item() < 624


def test_tensors_of_the_host_are_refused_but_for_numbers_and_indices(virtual: VirtualDevice) -> None:
    x, there, indices = torch.arange(4.0, device=NAME), torch.ones(4), torch.tensor([3, 1])
    for operate in (lambda: x + there, lambda: there @ x, lambda: torch.cat([x, there]), lambda: x.add_(there)):
        with pytest.raises(RuntimeError, match=r"Expected all tensors to be on the same device.*virtual:0 and cpu"):
            operate()
    assert (x + torch.tensor(1.0)).tolist() == [1, 2, 3, 4]
    assert x[indices].tolist() == [3, 1]
    x[indices] = torch.tensor(7.0)
    assert x.tolist() == [0, 7, 2, 7]
