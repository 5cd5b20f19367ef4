"""The simulated runtime carries copies out as late as the ordering allows, so a missing edge gives wrong bytes."""

from __future__ import annotations

import weakref

import pytest
import torch

from eager_offload.simulation.checker import AccessKind
from eager_offload.simulation.simulated import SimulatedRuntime
from tests.runtime.simulated_rig import Rig, flat


@pytest.fixture
def rig() -> Rig:
    return Rig(SimulatedRuntime())


def test_h16_a_source_that_is_dropped_too_early_leaves_garbage(rig: Rig) -> None:
    source = torch.randn(64)
    slot = rig.slot(256)
    rig.runtime.copy(slot, flat(source), rig.out)
    offloaded = rig.runtime.record(rig.out)
    del source
    rig.runtime.synchronize(offloaded)
    assert slot.tensor.eq(0xFF).all()
    (fault,) = rig.runtime.faults
    assert "the source was freed before the copy ran" in str(fault)


def test_h16_dropping_a_source_too_early_is_in_the_report(rig: Rig) -> None:
    with rig.runtime.checked() as checker:
        source = torch.randn(64)
        rig.runtime.wait(rig.out, rig.runtime.record(rig.main))
        rig.runtime.copy(rig.slot(256), flat(source), rig.out)
        del source
    kinds = [(violation.earlier is not None, violation.later.kind) for violation in checker.violations]
    assert kinds == [(True, AccessKind.FREE), (False, AccessKind.READ)]
    assert checker.violations[1].later.region == checker.violations[0].later.region


def test_h17_a_reload_that_does_not_wait_for_the_offload_brings_the_slots_old_bytes(rig: Rig) -> None:
    for ordered in (False, True):
        slot = rig.slot(256)
        slot.tensor.fill_(9)
        source, target = torch.ones(64), rig.target(256)
        rig.runtime.copy(slot, flat(source), rig.out)
        offloaded = rig.runtime.record(rig.out)
        if ordered:
            rig.runtime.wait(rig.inward, offloaded)
        rig.runtime.copy(target, slot, rig.inward)
        rig.runtime.wait(rig.main, rig.runtime.record(rig.inward))
        assert torch.equal(target, flat(source)) == ordered


def test_h18_a_slot_that_goes_back_too_early_is_overwritten_before_it_is_read(rig: Rig) -> None:
    for ordered in (False, True):
        slot = rig.slot(256)
        slot.tensor.fill_(9)
        target, source = rig.target(256), torch.ones(64)
        rig.runtime.copy(target, slot, rig.inward)
        reloaded = rig.runtime.record(rig.inward)
        del slot
        if ordered:
            rig.runtime.wait(rig.out, reloaded)
        rig.runtime.copy(rig.slot(256), flat(source), rig.out)
        rig.runtime.wait(rig.main, rig.runtime.record(rig.out))
        rig.runtime.wait(rig.main, reloaded)
        assert bool(target.eq(9).all()) == ordered


def test_h18_a_pending_copy_does_not_keep_a_slot_in_memory_alive(rig: Rig) -> None:
    slot = rig.slot(256)
    source = torch.ones(64)
    rig.runtime.copy(slot, flat(source), rig.out)
    died: list[bool] = []
    gone = weakref.ref(slot, lambda _: died.append(True))
    del slot
    assert gone() is None
    assert died == [True]


def test_h19_a_target_that_is_dropped_before_its_copy_ran_is_a_fault(rig: Rig) -> None:
    target = rig.target(256)
    rig.runtime.copy(target, rig.slot(256), rig.inward)
    del target
    rig.runtime.synchronize_all()
    (fault,) = rig.runtime.faults
    assert "the target was freed before the copy ran" in str(fault)


def test_a_chain_of_waits_carries_out_everything_that_comes_before(rig: Rig) -> None:
    runtime = rig.runtime
    source, target = torch.randn(64), rig.target(256)
    tensors = [rig.target(256) for _ in range(2000)]
    slot = rig.slot(256)
    runtime.copy(slot, flat(source), rig.out)
    for hop in tensors:
        runtime.wait(rig.inward, runtime.record(rig.out))
        runtime.copy(hop, slot, rig.inward)
        runtime.wait(rig.out, runtime.record(rig.inward))
        runtime.copy(slot, hop, rig.out)
    assert runtime.pending_copies == 4001
    runtime.wait(rig.inward, runtime.record(rig.out))
    runtime.copy(target, slot, rig.inward)
    runtime.synchronize(runtime.record(rig.inward))
    assert torch.equal(target, flat(source))
    assert runtime.pending_copies == 0


def test_a_copy_on_a_compute_stream_runs_in_its_order_at_once(rig: Rig) -> None:
    source, slot = torch.randn(64), rig.slot(256)
    rig.runtime.copy(slot, flat(source), rig.main)
    assert torch.equal(slot.tensor, flat(source))
