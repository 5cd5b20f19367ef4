"""What may happen between two steps of the library, put there on purpose: other threads, interrupts, late news."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from eager_offload import Offload
from eager_offload.engine.offloader import DeviceOffloader
from eager_offload.engine.transfer import BytesRecord, Transfer
from eager_offload.runtime.base import Direction, Event, Layout, Stream
from eager_offload.schedule import Windows
from eager_offload.stats import Accounts, KeepReason
from eager_offload.tiers.arena import Arena
from eager_offload.tiers.base import Fence, Slot, Tier
from eager_offload.tiers.host import HostTier
from tests.hazards.backends import Backend, offloader_of
from tests.hazards.probes import Allocations
from tests.hazards.programs import leaf
from tests.simulation.simulated import SimulatedRuntime, SimulatedStream
from tests.threads import collect

CPU = torch.device("cpu")


# -- an Offload that goes while bytes travel ------------------------------------------------------------------------


class Slots:
    """Weak references to every slot that a tier hands out."""

    def __init__(self) -> None:
        self.refs: list[weakref.ref[Slot]] = []

    def around(self, tier: Tier) -> Tier:
        def noting(take: Callable[[int], Slot | None]) -> Callable[[int], Slot | None]:
            def noted(nbytes: int) -> Slot | None:
                slot = take(nbytes)
                if slot is not None:
                    self.refs.append(weakref.ref(slot))
                return slot

            return noted

        tier.reserve, tier.at_hand = noting(tier.reserve), noting(tier.at_hand)
        return tier

    @property
    def alive(self) -> int:
        return sum(ref() is not None for ref in self.refs)


def on_a_device(**rates: float) -> tuple[SimulatedRuntime, Offload, Slots, Tensor]:
    """A simulated device, an ``Offload`` on it, the slots of its tier, and a leaf."""
    runtime, slots = SimulatedRuntime(**rates), Slots()
    fields = {"tier": "host", "min_bytes": 0, "keep_last_bytes": 0}
    return runtime, Offload(runtime=runtime, around_tier=slots.around, **fields), slots, leaf(32, 32)


def assert_slots_are_there_until_copies_are_over(runtime: SimulatedRuntime, slots: Slots) -> None:
    collect()
    runtime.poll()
    assert slots.alive >= runtime.pending_copies > 0, "a copy engine knows addresses, and nothing of who owns them"
    runtime.synchronize_all()
    assert runtime.faults == [], "nor was the end on the device gone"
    runtime.poll()
    collect()
    assert slots.alive == 0


def test_h18_a_slot_is_there_until_its_copy_is_over_though_everyone_has_gone() -> None:
    runtime, offload, slots, x = on_a_device(launch_seconds=0.0)
    with offload:
        y = (x + 1.0).sin().cos()
    assert runtime.pending_copies == slots.alive > 0
    del y, offload
    assert_slots_are_there_until_copies_are_over(runtime, slots)


def test_h18_a_slot_is_there_until_it_has_been_read_though_everyone_has_gone() -> None:
    runtime, offload, slots, x = on_a_device(launch_seconds=0.0)
    with offload:
        y = (x + 1.0).sin()
        z = y.cos().exp()
    offload.stats(synchronize=True)
    runtime.synchronize_all()
    torch.autograd.grad(z.sum(), y)  # what sin saved is brought back early, and not asked for
    assert runtime.pending_copies > 0
    del y, z, offload
    assert_slots_are_there_until_copies_are_over(runtime, slots)


# -- what was brought back early and is not wanted, while its graph lives on ----------------------------------------


def test_h26_what_is_not_needed_now_goes_before_a_full_device_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    nbytes = 32 * 32 * 4
    runtime, offload, _, x = on_a_device()
    (expected,) = torch.autograd.grad((x + 1.0).sin().cos().cos().sum(), x)
    with offload:
        y = (x + 1.0).sin().cos().cos()
        out = y.exp()
    offload.stats(synchronize=True)
    torch.autograd.grad(out.sum(), y)
    offloader = offloader_of(offload)
    assert offloader.census().resident_bytes == 3 * nbytes, "all that is asked for before it"
    resident = []

    def full_at_first(number: int) -> bool:
        resident.append(offloader.resident_bytes)
        return number == 1

    Allocations(runtime, monkeypatch, full_at_first)
    with runtime.stream(SimulatedStream("side")):
        (gradient,) = torch.autograd.grad(y.sum(), x)
    assert torch.equal(gradient, expected)
    assert resident[:2] == [3 * nbytes, nbytes], "but for what is needed now"


# -- two threads that need the same bytes ---------------------------------------------------------------------------


def test_h29_who_comes_second_waits_for_the_reload_that_another_thread_has_taken_up(
    backend: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    offload = backend.offload()
    x, w, v = (leaf(32, 32, seed=seed) for seed in range(3))
    y = x + 1.0
    with offload:
        first, second = y * w, y * v
    expected = y.detach().clone()
    del y
    offload.stats(synchronize=True)
    offloader = offloader_of(offload)
    wait, found = offloader.wait, []

    def after_another_thread(transfer: Transfer, stream: Stream, what: str) -> None:
        monkeypatch.undo()
        backend.in_thread(lambda: found.extend(torch.autograd.grad(second.sum(), v)))
        wait(transfer, stream, what)

    monkeypatch.setattr(offloader, "wait", after_another_thread)
    found.extend(torch.autograd.grad(first.sum(), w))
    assert len(found) == 2
    assert torch.equal(found[0], expected)
    assert torch.equal(found[1], expected)
    assert offload.stats(synchronize=True).bytes_in == expected.nbytes, "once, for both"


# -- an interrupt between a copy and its entry among the transfers ----------------------------------------------------


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
        self.offloader = DeviceOffloader(CPU, self.runtime, [self.tier], Accounts(), windows=Windows(1 << 20, 1 << 20))
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
    slot, allocations = scene.slot(), Allocations(scene.runtime, monkeypatch)
    slot.write(source())
    with pytest.raises(KeyboardInterrupt):
        scene.offloader.reload(slot, Layout(NBYTES), scene.runtime.current_stream(CPU), "reload")
    assert any(not fence.passed() for fence in slot.fences), "nothing may be written there yet"
    scene.runtime.poll()
    assert allocations.calls == allocations.alive == 1
    scene.runtime.synchronize_all()
    scene.runtime.poll()
    assert allocations.alive == 0
    assert scene.runtime.faults == []
