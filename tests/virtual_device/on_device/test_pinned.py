"""Pinned slabs: exact sizes, given back from where the driver may be called, and never by a child."""

from __future__ import annotations

import mmap
import os
import warnings
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from torch import Tensor

from eager_offload import CapacityError, Offload, OffloadError
from eager_offload.graphs import GraphCaptureGuard
from eager_offload.runtime import accelerator
from eager_offload.runtime.accelerator import AcceleratorRuntime, accelerator_runtime
from eager_offload.runtime.base import Direction
from eager_offload.tiers.host import HostTier
from eager_offload.tiers.memory import PAGE
from eager_offload.tiers.pool import Pool
from tests.hazards.backends import assert_settled
from tests.hazards.programs import Settled
from tests.processes import printed_by
from tests.threads import collect, on_a_thread
from tests.virtual_device import NAME, VirtualDevice
from tests.virtual_device.api import Api
from tests.virtual_device.backend import side_stream

MIB, GIB = 1 << 20, 1 << 30


def tier_of(runtime: AcceleratorRuntime) -> HostTier:
    return HostTier(Pool(runtime.host_buffer, sizes=runtime.slab_sizes()), GIB)


def test_a_slab_is_unregistered_before_its_pages_go_and_not_in_its_finalizer(
    api: Api, runtime: AcceleratorRuntime
) -> None:
    slab = runtime.host_buffer(MIB)
    part, address = slab[PAGE:], slab.data_ptr()
    del slab
    runtime.poll()
    assert address in api.registered, "a view keeps the slab"
    with runtime._pinned._lock:  # a finalizer that took it would stand still here
        del part
        collect()
    assert address in api.registered, "the driver is not called by a finalizer"
    slabs = [runtime.host_buffer(MIB) for _ in range(4)]  # a call that may call the driver
    assert api.registered.keys() == {one.data_ptr() for one in slabs}
    on_a_thread(slabs.clear)
    assert len(api.registered) == 4
    runtime.poll()
    assert api.registered == {}


def test_a_slab_that_cannot_be_unregistered_is_kept_until_it_can(api: Api, runtime: AcceleratorRuntime) -> None:
    """Its pages would be another tensor's, and the driver would still write to them."""
    slabs = [runtime.host_buffer(MIB) for _ in range(2)]
    pages = weakref.ref(next(iter(runtime._pinned._records)).pages)
    slabs.clear()
    collect()
    api.fail("unregister", *[RuntimeError("cudaHostUnregister failed with error 4")] * 4)
    with pytest.warns(RuntimeWarning, match=r"bytes of pinned host memory could not be unpinned \(.*error 4\)"):
        runtime.poll()
    with warnings.catch_warnings(action="error"):  # it was told
        runtime.poll()
    assert len(api.registered) == 2
    assert pages() is not None
    runtime.poll()
    assert not api.registered
    assert pages() is None


@pytest.mark.parametrize("call", ["register", "empty_pinned"])
def test_a_slab_that_cannot_be_pinned_is_pageable_which_is_said_once(
    virtual: VirtualDevice, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    api = Api(monkeypatch, can_register=call == "register")
    runtime = AcceleratorRuntime()
    runtime.host_buffer(PAGE)
    runtime.poll()
    api.calls.clear()
    api.fail(call, *[RuntimeError("CUDA error: out of memory\nmany more lines")] * 2)
    with pytest.warns(RuntimeWarning, match=r"1048576 bytes.*could not be pinned \(CUDA error: out of memory\)"):
        assert runtime.host_buffer(MIB).fill_(7).shape == (MIB,)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert runtime.host_buffer(MIB).fill_(7).data_ptr() % PAGE == 0
        slab = runtime.host_buffer(MIB)
    collect()
    runtime.poll()
    assert slab.is_pinned()
    assert api.calls == [f"{call} {MIB}"] * 3, "what was not registered is not unregistered"
    del slab
    runtime.poll()


def test_a_step_after_reserve_pins_nothing_and_a_capture_reserves_nothing(
    api: Api, runtime: AcceleratorRuntime, offloads: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(accelerator, "_runtime", runtime)
    offload = offloads(host_budget="64MiB")
    offload.reserve("32MiB")
    offload.reserve(32 << 20)
    registered = dict(api.registered)
    assert sum(registered.values()) == 32 * MIB
    for _ in range(2):
        y = torch.ones(512, 512, device=NAME, requires_grad=True)
        with Settled(offload):
            for _ in range(6):
                y = (y * 1.01).sin()
            loss = y.sum()
        del y
        loss.backward()
        del loss
    stats = assert_settled(offload)
    assert stats.bytes_out > 0
    assert 0 < stats.host_bytes_peak < 32 * MIB
    assert api.registered == registered
    with pytest.raises(CapacityError, match=r"80.0 MiB of host memory cannot be reserved.*comes to 64.0 MiB.*raise"):
        offload.reserve("80MiB")
    with GraphCaptureGuard(), pytest.raises(OffloadError, match="captured"):
        offload.reserve("48MiB")
    assert api.registered == registered
    offload.close()


# -- a slab has a new owner, or goes back, when the copies of its last owner are over ---------------------------------
#
# Each tensor has 40 MiB and so a slab of its own. Its last owner is gone as soon as backward is enqueued, while the
# copy that brings its bytes back has not begun: the stream for copies in stands still.


@pytest.fixture
def offload(offloads: Callable[..., Offload]) -> Offload:
    return offloads(host_budget="90MiB", max_inflight_bytes="1GiB", prefetch_bytes="1GiB")


def forward(x: Tensor, stream: torch.Stream, around: AbstractContextManager[object]) -> Tensor:
    """A graph on ``stream`` that saves one tensor of the size of ``x``, the values that ``x`` gets as its gradient."""
    with stream, around:
        return x.exp().sum()


def leaf_and_gradient(seed: int, mib: int = 40, device: int = 0) -> tuple[Tensor, Tensor]:
    """A leaf, and the gradient that it has without offload."""
    values = torch.randn(mib * MIB // 4, generator=torch.Generator().manual_seed(seed))
    x = values.to(f"{NAME}:{device}").requires_grad_()
    return x, torch.autograd.grad(x.exp().sum(), x)[0].cpu()


def transfers(device: torch.device, direction: Direction) -> torch.Stream:
    stream: torch.Stream = accelerator_runtime().transfer_stream(device, direction)
    return stream


@pytest.mark.parametrize("there", [0, 1], ids=["another stream", "another device"])
def test_a_slab_is_not_written_before_its_last_owner_is_read(
    virtual: VirtualDevice, offload: Offload, there: int
) -> None:
    (first, wanted), (second, also) = leaf_and_gradient(1), leaf_and_gradient(2, device=there)
    loss = forward(first, side_stream(), offload)
    offload.stats(synchronize=True)
    with virtual.held_stream(transfers(first.device, Direction.IN)):
        loss.backward()
        del loss
        stream = side_stream(there)
        again = forward(second, stream, offload)
        stream.synchronize()  # from here on nothing else holds the copy up
        waits = not transfers(second.device, Direction.OUT).query()
    stats = offload.stats(synchronize=True)
    again.backward()
    del again
    assert torch.equal(first.grad.cpu(), wanted)
    assert torch.equal(second.grad.cpu(), also)
    assert waits
    assert stats.host_bytes_peak == 40 * MIB, "both had the same slab"
    assert stats.bytes_out == offload.stats(synchronize=True).bytes_in == 2 * 40 * MIB


def test_a_slab_is_not_unregistered_before_its_last_owner_is_read(virtual: VirtualDevice, offload: Offload) -> None:
    (first, wanted), (second, also) = leaf_and_gradient(1), leaf_and_gradient(2, mib=60)
    loss = forward(first, side_stream(), offload)
    offload.stats(synchronize=True)
    # There is room for the second where the idle slab is given back, which cannot be yet: so it stays.
    with virtual.held_stream(transfers(first.device, Direction.IN)):
        loss.backward()
        del loss
        with pytest.warns(RuntimeWarning, match="no room for"):
            again = forward(second, side_stream(), offload)
    torch.accelerator.synchronize()  # raises what a stream ran into
    stats = offload.stats(synchronize=True)
    assert (stats.kept_bytes["budget"], stats.host_bytes_peak) == (second.nbytes, first.nbytes)
    again.backward()
    del again
    again = forward(second, side_stream(), offload)
    assert offload.stats(synchronize=True).bytes_out == first.nbytes + second.nbytes, "it has gone back meanwhile"
    again.backward()
    assert torch.equal(first.grad.cpu(), wanted)
    assert torch.equal(second.grad.cpu(), also + also)


# -- fork -------------------------------------------------------------------------------------------------------------


def test_h28_a_forked_child_gives_back_nothing_of_its_parents(api: Api, runtime: AcceleratorRuntime) -> None:
    tier = tier_of(runtime)
    slot, slab, gone = tier.reserve(40 * MIB), runtime.host_buffer(MIB), runtime.host_buffer(MIB)
    event = runtime.record(runtime.current_stream(torch.device(NAME, 0)))
    runtime.keep_until(event, slab)
    del gone  # to be given back, and not yet
    before = list(api.calls)
    child = os.fork()
    if child == 0:
        status = 1
        try:
            del slot, slab, event
            tier.close()
            collect()
            runtime.poll()
            runtime._pinned.poll()
            status = 0 if api.calls == before else 2
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    runtime.poll()
    assert len(api.registered) == 2, "the parent goes on"
    del slot, slab, event
    tier.close()
    torch.accelerator.synchronize()
    runtime.poll()


#: A child maps something of its own where a slab of its parent is, and stops when its interpreter has ended.
ENDS = """
import ctypes, mmap, os, signal, sys
from tests.virtual_device import install
install()
from eager_offload.runtime.accelerator import accelerator_runtime

runtime = accelerator_runtime()
slab = runtime.host_buffer(1 << 20).fill_(7)
start = slab.data_ptr()

def flags(process):
    # Those of the pages at the slab's address.
    is_there = False
    for line in open(f"/proc/{process}/smaps"):
        first, dash, rest = line.partition(" ")[0].partition("-")
        if dash:
            is_there = int(first, 16) <= start < int(rest, 16)
        elif is_there and line.startswith("VmFlags:"):
            return line.split()
    return []

assert "dc" in flags("self"), "a fork copies them"  # "do not copy area on fork"
child = os.fork()
if child == 0:
    library = ctypes.CDLL(None)
    library.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    library.mmap(start, 1 << 20, mmap.PROT_READ, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x10, -1, 0)  # MAP_FIXED
    library.on_exit(getattr(library, "raise"), None)  # of the status
    del slab, runtime
    sys.exit(int(signal.SIGSTOP))
_, status = os.waitpid(child, os.WUNTRACED)
assert os.WIFSTOPPED(status), status
mapped = flags(child)
os.kill(child, signal.SIGKILL)
os.waitpid(child, 0)
assert mapped and "dc" not in mapped, "the child has unmapped what is not its parent's any more"
assert slab.sum() == 7 << 20
"""


@pytest.mark.skipif(not hasattr(mmap, "MADV_DONTFORK"), reason="this system leaves no pages out of a fork")
def test_h64_a_forked_child_has_no_pinned_page_and_unmaps_nothing_of_its_own() -> None:
    printed_by("-c", ENDS)
