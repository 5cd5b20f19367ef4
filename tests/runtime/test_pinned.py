"""Pinned slabs: exact sizes, little waste, given back from where the driver may be called, and never by a child."""

from __future__ import annotations

import mmap
import os
import sys
import warnings

import pytest
import torch

from eager_offload.runtime.accelerator import AcceleratorRuntime
from eager_offload.tiers.arena import Arena
from eager_offload.tiers.host import HostTier
from eager_offload.tiers.memory import PAGE
from eager_offload.tiers.slabs import ExactSizes, HostSlot, PowersOfTwo, SlabSizes
from tests.doubles.recording_accelerator import RecordingAccelerator
from tests.processes import printed_by
from tests.threads import collect, on_a_thread
from tests.tiers.rig import System

MIB, GIB = 1 << 20, 1 << 30


@pytest.fixture
def double() -> RecordingAccelerator:
    return RecordingAccelerator(can_register=True)


@pytest.fixture
def runtime(double: RecordingAccelerator) -> AcceleratorRuntime:
    return AcceleratorRuntime(double)


# -- registered -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("nbytes", [PAGE, 3 * PAGE, 5 * MIB + PAGE])
def test_a_slab_is_registered_to_the_byte_and_the_page(
    double: RecordingAccelerator, runtime: AcceleratorRuntime, nbytes: int
) -> None:
    slab = runtime.host_buffer(nbytes)
    assert slab.shape == (nbytes,)
    assert slab.dtype is torch.uint8
    assert double.registered == {slab.data_ptr(): nbytes}
    assert slab.data_ptr() % PAGE == 0
    assert double.pinned_by_torch == 0
    assert int(slab.fill_(3).sum()) == 3 * nbytes


def test_a_slab_is_unregistered_before_its_pages_go_and_not_in_its_finalizer(
    double: RecordingAccelerator, runtime: AcceleratorRuntime
) -> None:
    slab = runtime.host_buffer(MIB)
    part = slab[PAGE:]
    address = slab.data_ptr()
    del slab
    runtime.poll()
    assert address in double.registered, "a view keeps the slab"
    with runtime._pinned._lock:  # a finalizer that took it would stand still here
        del part
        collect()
    assert address in double.registered, "the driver is not called by a finalizer"
    runtime.poll()
    assert double.registered == {}


def test_a_slab_that_dies_in_another_thread_is_unregistered_in_this_one(
    double: RecordingAccelerator, runtime: AcceleratorRuntime
) -> None:
    slabs = [runtime.host_buffer(MIB) for _ in range(4)]
    on_a_thread(slabs.clear)
    assert len(double.registered) == 4
    slab = runtime.host_buffer(PAGE)  # a call that may call the driver
    assert double.registered == {slab.data_ptr(): PAGE}


def test_closing_the_tier_and_the_last_user_unregisters_everything(
    double: RecordingAccelerator, runtime: AcceleratorRuntime
) -> None:
    tier, user = HostTier(Arena(runtime.host_buffer, sizes=runtime.slab_sizes()), GIB), object.__new__(Arena)
    runtime.attach_user(user)
    slots = [tier.reserve(nbytes) for nbytes in (100, 5000, 40 * MIB)]
    assert all(slots)
    assert sum(double.registered.values()) == tier.held_bytes
    slots.clear()
    tier.close()
    runtime.detach_user(user)
    assert double.registered == {}


# -- where it fails -------------------------------------------------------------------------------------------------


def test_a_slab_that_cannot_be_registered_is_pageable_which_is_said_once(
    double: RecordingAccelerator, runtime: AcceleratorRuntime
) -> None:
    runtime.host_buffer(PAGE)
    for _ in range(2):
        double.fail("register", RuntimeError("cudaHostRegister of 1048576 bytes failed with error 2"))
    with pytest.warns(RuntimeWarning, match=r"could not be pinned \(cudaHostRegister of 1048576 bytes failed"):
        assert runtime.host_buffer(MIB).fill_(7).shape == (MIB,)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert runtime.host_buffer(MIB).shape == (MIB,)
        slab = runtime.host_buffer(MIB)
    assert double.registered[slab.data_ptr()] == MIB
    assert double.pinned_by_torch == 0


def test_a_slab_that_could_not_be_registered_is_not_unregistered(
    double: RecordingAccelerator, runtime: AcceleratorRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whichever goes first of what the interpreter takes down after the error."""
    runtime.host_buffer(PAGE)
    runtime.poll()
    kept = []

    def refuse(address: int, nbytes: int) -> None:
        kept.append(sys._getframe(1).f_locals["record"])
        raise RuntimeError("out of memory")

    monkeypatch.setattr(double, "register", refuse)
    double.calls.clear()
    with pytest.warns(RuntimeWarning, match="could not be pinned"):
        runtime.host_buffer(MIB)
    collect()
    assert kept[0]() is None
    runtime.poll()
    assert double.calls == []


def test_a_machine_that_cannot_register_is_asked_once_and_pins_through_torch() -> None:
    double = RecordingAccelerator()
    runtime = AcceleratorRuntime(double)
    slabs = [runtime.host_buffer(MIB) for _ in range(3)]
    assert double.calls == [f"register {PAGE}", *[f"empty_pinned {MIB}"] * 3]
    assert double.pinned_by_torch >= sum(slab.numel() for slab in slabs)
    assert isinstance(runtime.slab_sizes(), PowersOfTwo)


def test_slabs_are_registered_in_pieces_of_a_slab_each(
    double: RecordingAccelerator, runtime: AcceleratorRuntime
) -> None:
    """A copy must not straddle two registrations."""
    tier = HostTier(Arena(runtime.host_buffer, sizes=runtime.slab_sizes()), GIB)
    slots = [tier.reserve(nbytes) for nbytes in (PAGE, MIB, 33 * MIB, 70 * MIB, 9000)]
    assert len(double.registered) > 1
    for slot in slots:
        assert isinstance(slot, HostSlot)
        assert any(
            start <= slot.address and slot.address + slot.nbytes <= start + nbytes
            for start, nbytes in double.registered.items()
        )


# -- fork -----------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
def test_h28_a_forked_child_gives_back_nothing_of_its_parents(
    double: RecordingAccelerator, runtime: AcceleratorRuntime
) -> None:
    tier = HostTier(Arena(runtime.host_buffer, sizes=runtime.slab_sizes()), GIB)
    slot, slab, gone = tier.reserve(40 * MIB), runtime.host_buffer(MIB), runtime.host_buffer(MIB)
    event = runtime.record(runtime.current_stream(torch.device("cuda", 0)))
    runtime.keep_until(event, slab)
    del gone  # to be given back, and not yet
    before = list(double.calls)
    child = os.fork()
    if child == 0:
        status = 1
        try:
            del slot, slab, event
            tier.close()
            collect()
            runtime.poll()
            runtime._pinned.poll()
            status = 0 if double.calls == before else 2
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    runtime.poll()
    assert len(double.registered) == 2, "the parent goes on"


#: A child maps something of its own where a slab of its parent is, and stops when its interpreter has ended.
ENDS = """
import ctypes, mmap, os, signal, sys
from eager_offload.runtime.accelerator import AcceleratorRuntime
from tests.doubles.recording_accelerator import RecordingAccelerator

runtime = AcceleratorRuntime(RecordingAccelerator(can_register=True))
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


# -- waste ----------------------------------------------------------------------------------------------------------


class Counted(System):
    """Adds up what torch's allocator would have taken."""

    @property
    def rounded(self) -> int:
        return sum(1 << (nbytes - 1).bit_length() for nbytes in self.sizes)


def saved_by_a_llama(tokens: int, layers: int, width: int = 2048, inner: int = 8192, shared: int = 512) -> list[int]:
    """Bytes of what a decoder of about 1B parameters saves in bf16, in the order of saving."""
    per_token = [2 * width, 4, 2 * width, 2 * width, 2 * shared, 2 * shared, 128, 2 * width, 2 * width, 4]
    per_token += [2 * width, 2 * inner, 2 * inner, 2 * inner]
    return [tokens * nbytes for _ in range(layers) for nbytes in per_token]


STEPS = {
    "a power of two of tokens": saved_by_a_llama(8192, 24),
    "an odd number of tokens": saved_by_a_llama(6151, 24),
    "few tokens": saved_by_a_llama(777, 64),
    "an odd width": saved_by_a_llama(5000, 24, width=2304, inner=5760, shared=768),
}


@pytest.mark.parametrize("sizes", [ExactSizes(64 * MIB), PowersOfTwo()], ids=["registered", "pinned by torch"])
@pytest.mark.parametrize("step", STEPS)
def test_what_is_pinned_for_a_step_is_at_most_5_percent_more_than_it_saves(step: str, sizes: SlabSizes) -> None:
    system = Counted()
    tier = HostTier(Arena(system, sizes=sizes, idle_bytes=64 * GIB), 64 * GIB)
    for _ in range(2):
        slots = [tier.reserve(nbytes) for nbytes in STEPS[step]]
        assert all(slots)
        asked, taken = sum(STEPS[step]), sum(system.sizes)
        assert tier.held_bytes == taken
        if isinstance(sizes, PowersOfTwo):
            assert system.rounded == taken, "torch rounds nothing up"
            # The end of the newest slab is room for what comes next, and no waste.
            taken -= max(system.sizes)
        assert taken <= 1.05 * asked
        slots.clear()


@pytest.mark.parametrize("need", [MIB, 3 * MIB, 17 * MIB, 31 * MIB + PAGE, 50 * MIB])
def test_a_full_slab_of_a_power_of_two_has_at_most_a_20th_left_over(need: int) -> None:
    size = PowersOfTwo().wanted(need, held=0)
    assert size & (size - 1) == 0
    assert size % need <= size / 20
    assert size <= GIB


@pytest.mark.parametrize("held", [0, GIB, 100 * GIB])
@pytest.mark.parametrize("need", [PAGE, 520 * MIB, 3 * GIB + PAGE])
def test_a_slab_of_a_power_of_two_holds_its_request_and_does_not_double_what_is_held(need: int, held: int) -> None:
    sizes = PowersOfTwo()
    size = sizes.wanted(need, held)
    assert need <= size <= max(GIB, held, 2 * need)
    assert sizes.least(need) <= size
    assert sizes.within(need, need - 1) == 0
    assert need <= sizes.within(need, 2 * need) <= 2 * need


def test_a_budget_bounds_what_is_held_where_slabs_are_powers_of_two() -> None:
    tier = HostTier(Arena(Counted(), sizes=PowersOfTwo(), idle_bytes=GIB), budget=100 * MIB)
    slots = []
    while (slot := tier.reserve(3 * MIB)) is not None:
        slots.append(slot)
    assert tier.held_bytes <= 100 * MIB
    assert len(slots) * 3 * MIB > 80 * MIB
    del slots[::2]
    assert tier.reserve(3 * MIB) is not None, "the holes are used again"
