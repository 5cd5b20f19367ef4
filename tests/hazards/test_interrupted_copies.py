"""A KeyboardInterrupt between a copy and its entry among the transfers: nothing that it still touches is given away.

Of a device's offloader alone; whole training steps are interrupted in ``test_interrupts.py``.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from eager_offload.engine.offloader import DeviceOffloader
from eager_offload.engine.transfer import BytesRecord, Transfer
from eager_offload.runtime.base import Direction, Event, Layout, Stream
from eager_offload.simulation.simulated import SimulatedRuntime
from eager_offload.stats import Accounts, KeepReason
from eager_offload.tiers.arena import Arena
from eager_offload.tiers.base import Fence, Slot
from eager_offload.tiers.host import HostTier

CPU = torch.device("cpu")
NBYTES = 4096


class InterruptedRuntime(SimulatedRuntime):
    """Every copy is interrupted: before it is enqueued, or right after."""

    def __init__(self, *, enqueues: bool) -> None:
        super().__init__(launch_seconds=0.0)
        self.enqueues = enqueues

    def copy(self, dst: Tensor | Slot, src: Tensor | Slot, stream: Stream, after: Sequence[Event] = ()) -> Event:
        if self.enqueues:
            super().copy(dst, src, stream, after)
        raise KeyboardInterrupt


class Scene:
    """An offloader over such a runtime."""

    def __init__(self, *, enqueues: bool) -> None:
        self.runtime = InterruptedRuntime(enqueues=enqueues)
        self.tier = HostTier(Arena(self.runtime.host_buffer), 1 << 20)
        self.offloader = DeviceOffloader(CPU, self.runtime, [self.tier], Accounts(), max_inflight_bytes=1 << 20)
        self.inward = self.runtime.transfer_stream(CPU, Direction.IN)

    def slot(self) -> Slot:
        return self.tier.reserve(NBYTES)

    def interrupted_offload(self, slot: Slot, source: Tensor) -> None:
        counters, record = self.offloader.accounts.counters, BytesRecord(slot)
        record.save(counters, source.nbytes, KeepReason.NEWEST)
        transfer, stream = Transfer(slot, source.nbytes, counters, record), self.runtime.current_stream(CPU)
        with pytest.raises(KeyboardInterrupt):
            self.offloader.offload(source, slot, stream, transfer)
        assert self.offloader.census().in_flight == 0

    def pending_fence(self) -> Fence:
        """A use of some bytes on the other stream that is not over."""
        self.runtime.advance(self.inward, 1.0)
        fence = Fence(self.runtime, self.runtime.record(self.inward))
        assert not fence.passed()
        return fence


def source() -> Tensor:
    return torch.arange(NBYTES, dtype=torch.int64).to(torch.uint8)


def test_h18_earlier_uses_of_a_slot_are_in_force_when_its_copy_never_began() -> None:
    scene = Scene(enqueues=False)
    slot, read = scene.slot(), scene.pending_fence()
    slot.fences = (read,)
    scene.interrupted_offload(slot, source())
    region = slot.region
    del slot
    scene.runtime.poll()
    again = scene.slot()
    assert again.region == region
    assert read in again.fences


def test_h18_a_slot_knows_of_a_copy_that_was_not_noted() -> None:
    scene = Scene(enqueues=True)
    for _ in range(2):  # the second time an event of the first is over
        slot = scene.slot()
        bytes_ = source()
        scene.interrupted_offload(slot, bytes_)
        assert any(not fence.passed() for fence in slot.fences), "its next owner has to wait"
        scene.runtime.synchronize_all()
        assert all(fence.passed() for fence in slot.fences)
    assert scene.runtime.faults == []


def test_h10_both_ends_of_an_interrupted_offload_outlive_its_copy() -> None:
    scene = Scene(enqueues=True)
    for _ in range(2):
        slot, bytes_ = scene.slot(), source()
        slot_alive, storage = weakref.ref(slot), weakref.ref(bytes_)
        scene.interrupted_offload(slot, bytes_)
        written = slot.tensor
        del slot, bytes_
        scene.runtime.poll()
        assert slot_alive() is not None, "the copy is still to write there"
        assert storage() is not None, "the copy is still to read there"
        scene.runtime.synchronize_all()
        assert torch.equal(written, source())
        scene.runtime.poll()
        assert slot_alive() is None
        assert storage() is None
    assert scene.runtime.faults == []
    assert scene.tier.used_bytes == 0


def test_h10_the_target_of_an_interrupted_reload_outlives_its_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene(enqueues=True)
    slot, targets, allocate = scene.slot(), [], scene.runtime.allocate
    slot.write(source())

    def noted(layout: Layout, device: torch.device, stream: Stream) -> Tensor:
        target = allocate(layout, device, stream)
        targets.append(weakref.ref(target))
        return target

    monkeypatch.setattr(scene.runtime, "allocate", noted)
    with pytest.raises(KeyboardInterrupt):
        scene.offloader.reload(slot, Layout(NBYTES), scene.runtime.current_stream(CPU), "reload")
    assert any(not fence.passed() for fence in slot.fences), "nothing may be written there yet"
    scene.runtime.poll()
    (alive,) = targets
    assert alive() is not None
    scene.runtime.synchronize_all()
    scene.runtime.poll()
    assert alive() is None
    assert scene.runtime.faults == []
