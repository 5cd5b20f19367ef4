"""A KeyboardInterrupt between a copy and whoever was to take note of it: nothing that it still touches is given away.

Of the part of a lane that both directions stand on; whole training steps are interrupted in ``test_interrupts.py``.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from eager_offload.eager.ground import Ground
from eager_offload.eager.handles import Reload
from eager_offload.runtime.base import Direction, Event, Stream
from eager_offload.runtime.simulated import SimulatedRuntime
from eager_offload.stats import Accounts
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

    def _copy(self, dst: Tensor | Slot, src: Tensor | Slot, stream: Stream, after: Sequence[Event]) -> Event:
        if self.enqueues:
            super()._copy(dst, src, stream, after)
        raise KeyboardInterrupt


class Scene:
    """A ground over such a runtime, with a tier that has room for one slot."""

    def __init__(self, *, enqueues: bool) -> None:
        self.runtime = InterruptedRuntime(enqueues=enqueues)
        self.ground = Ground(CPU, self.runtime, Accounts())
        self.tier = HostTier(Arena(self.runtime.host_buffer), 1 << 20)
        self.out = self.runtime.transfer_stream(CPU, Direction.OUT)
        self.inward = self.runtime.transfer_stream(CPU, Direction.IN)

    def slot(self) -> Slot:
        slot = self.tier.reserve(NBYTES)
        assert slot is not None
        return slot

    def interrupted_offload(self, slot: Slot, source: Tensor) -> None:
        offload = Reload(source, None, None)
        with pytest.raises(KeyboardInterrupt):
            self.ground.copy(slot, source, slot, self.out, (), keepalive=(source, slot), transfer=offload)
        assert offload.ticket is None

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
    scene.runtime.tidy()
    again = scene.slot()
    assert again.region == region
    assert read in again.fences


def test_h18_a_slot_knows_of_a_copy_that_nobody_took_note_of() -> None:
    scene = Scene(enqueues=True)
    for _ in range(2):  # the second time an event of the first is over
        slot = scene.slot()
        bytes_ = source()
        scene.interrupted_offload(slot, bytes_)
        assert any(not fence.passed() for fence in slot.fences), "its next owner has to wait"
        scene.runtime.drain()
        assert all(fence.passed() for fence in slot.fences)
    assert scene.runtime.faults == []


def test_h10_both_ends_of_an_interrupted_offload_outlive_its_copy() -> None:
    scene = Scene(enqueues=True)
    for _ in range(2):
        slot, bytes_ = scene.slot(), source()
        slot_alive, storage = weakref.ref(slot), weakref.ref(bytes_)
        scene.interrupted_offload(slot, bytes_)
        written = slot.tensor  # type: ignore[attr-defined]
        del slot, bytes_
        scene.runtime.tidy()
        assert slot_alive() is not None, "the copy is still to write there"
        assert storage() is not None, "the copy is still to read there"
        scene.runtime.drain()
        assert torch.equal(written, source())
        scene.runtime.tidy()
        assert slot_alive() is None
        assert storage() is None
    assert scene.runtime.faults == []
    assert scene.tier.used_bytes == 0


def test_h10_the_target_of_an_interrupted_reload_outlives_its_copy() -> None:
    scene = Scene(enqueues=True)
    slot = scene.slot()
    slot.write(source())
    target = torch.zeros(NBYTES, dtype=torch.uint8)
    alive = weakref.ref(target)
    reload = Reload(target, None, None)
    with pytest.raises(KeyboardInterrupt):
        scene.ground.copy(target, slot, slot, scene.inward, (), keepalive=(target, slot), transfer=reload)
    assert reload.ticket is None
    del reload
    assert any(not fence.passed() for fence in slot.fences), "nobody may write there yet"
    del target
    scene.runtime.tidy()
    assert alive() is not None
    scene.runtime.drain()
    scene.runtime.tidy()
    assert alive() is None
    assert scene.runtime.faults == []
