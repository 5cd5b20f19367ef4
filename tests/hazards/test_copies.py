"""H16 to H18: what a copy reads, what is asked for while it runs, and who may write to its slot afterwards."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
from torch import Tensor

from eager_offload import Offload
from eager_offload.runtime.base import Direction
from eager_offload.tiers.base import ByteRegion
from eager_offload.tiers.disk import DiskSlot
from tests.hazards.backends import Backend, assert_settled, gate_before
from tests.hazards.blocks import Step
from tests.hazards.probes import meanwhile
from tests.hazards.programs import Around, Settled, assert_identical, assert_moved, leaf
from tests.simulation.log import Recorded, Waited, WrittenLog
from tests.simulation.simulated import SimulatedRuntime


def test_h16_the_copy_reads_the_old_bytes_when_the_block_gets_a_new_owner(backend: Backend) -> None:
    """Everything of the forward is dropped while its copies wait, and compute takes whatever memory is free."""

    def program(offload: Around, meanwhile: Callable[[], None]) -> object:
        step = Step(1).forward(offload)
        noise = [torch.full((32, 32), float("nan")) for _ in range(50)]
        for tensor in noise:
            tensor.mul_(2).sin_()
        meanwhile()
        del noise
        again = [torch.full((32, 32), float("inf")) for _ in range(50)]
        del again
        return step.backward().result

    expected, offload = program(nullcontext(), lambda: None), backend.offload()
    with backend.gate() as gate:

        def let_them_leave() -> None:
            gate.open()
            offload.stats(synchronize=True)

        assert_identical(expected, program(offload, let_them_leave))
    stats = assert_settled(offload)
    assert_moved(stats)
    assert stats.bytes_in > 0


def test_h16_a_source_lives_exactly_until_its_copy_is_over(backend: Backend) -> None:
    offload, x = backend.offload(), leaf(32, 32)
    with backend.gate() as gate:
        with offload:
            h = (x * 2).tanh()
            y = h.exp().sum()
        source = weakref.ref(h.untyped_storage())
        del h
        offload.stats()
        assert source() is not None, "the source went before its copy was over"
        gate.open()
        offload.stats(synchronize=True)
    assert source() is None, "the source stayed after its copy was over"
    y.backward()
    del y
    assert_moved(assert_settled(offload))


def test_h17_an_unpack_during_its_own_copy_out_is_served_from_the_source(backend: Backend) -> None:
    expected, offload = Step(1).forward(nullcontext()).backward().result, backend.offload()
    with backend.gate() as gate:
        # Nothing can arrive, so an unpack that waited would wait for ever.
        assert_identical(expected, Step(1).forward(offload).backward().result)
        stats = offload.stats()
        assert stats.forwarded_bytes == stats.offloaded_bytes > 0
        assert stats.bytes_in == 0
        gate.open()
    assert_moved(assert_settled(offload))


def test_h18_an_offload_waits_for_the_last_read_of_its_slot() -> None:
    """Reading is so slow here that the next forward comes to the slots while they are still being read."""
    simulated, recording = SimulatedRuntime(in_bandwidth=1e4), WrittenLog()
    with simulated.checked(recording) as checker:
        offload = Offload(runtime=simulated, tier="host", min_bytes=0, keep_last_bytes=0)
        for seed in range(4):
            expected = Step(seed).forward(nullcontext()).backward().result
            assert_identical(expected, Step(seed).forward(Settled(offload)).backward().result)
        assert_moved(assert_settled(offload))
        offload.close()
    checker.assert_clean()
    out, back = (simulated.transfer_stream(torch.device("cpu"), direction) for direction in Direction)
    reads = {entry.event for entry in recording.entries if isinstance(entry, Recorded) and entry.stream is back}
    waits = [entry for entry in recording.entries if isinstance(entry, Waited) and entry.stream is out]
    assert any(entry.event in reads for entry in waits), "no slot was used again while it was being read"


def test_h18_on_disk_a_write_behind_a_read_that_is_held_back_waits_for_it(
    disk: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    offload, waiting, log = disk.offload(prefetch_bytes=1 << 20), threading.Event(), list[tuple[str, ByteRegion]]()

    def note(name: str) -> None:
        call = getattr(DiskSlot, name)

        def noting(slot: DiskSlot, tensor: Tensor) -> None:
            call(slot, tensor)
            log.append((name, slot.region))

        monkeypatch.setattr(DiskSlot, name, noting)

    note("read")
    note("write")
    x = leaf(32, 32)
    with Settled(offload):
        losses = [(x * n).exp().sum() for n in range(1, 5)]
    log.clear()
    backward = threading.Thread(target=losses.pop().backward)
    with gate_before(DiskSlot, "read") as gate, meanwhile(waiting.set, backward):
        backward.start()
        assert waiting.wait(60)  # the first of four reads stands before the gate, the others behind it
        losses.clear()
        with offload:
            losses = [(x * n).exp().sum() for n in range(5, 12)]
        gate.open()
        backward.join()
        offload.stats(synchronize=True)
    kinds = [what for what, _ in log]
    assert (kinds.count("read") >= 4, kinds.count("write")) == (True, 7)
    for index, (what, region) in enumerate(log):
        assert what == "read" or ("read", region) not in log[index:], f"written before its last read: {log}"
    while losses:
        losses.pop().backward()
    assert_moved(assert_settled(offload))
