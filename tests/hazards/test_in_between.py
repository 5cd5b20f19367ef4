"""What may happen between two steps of the library, put there on purpose: other threads, interrupts, late news."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import nullcontext, suppress
from typing import Any

import pytest
import torch
from torch import Tensor

from eager_offload import Offload
from eager_offload.core.schedule import Windows
from eager_offload.engine.offloader import DeviceOffloader
from eager_offload.engine.transfer import Transfer
from eager_offload.engine.transfer_log import TransferLog
from eager_offload.runtime.base import Direction, Event, Layout, Stream
from eager_offload.stats import Accounts
from eager_offload.tiers.base import Fence, Slot, Tier
from eager_offload.tiers.host import HostTier
from eager_offload.tiers.pool import Pool
from tests.hazards.backends import Backend, assert_settled, offloader_of
from tests.hazards.probes import Allocations
from tests.programs import leaf
from tests.simulation.simulated import SimulatedRuntime, SimulatedStream
from tests.threads import collect


class Slots:
    """Weak references to every slot that a tier hands out."""

    def __init__(self) -> None:
        self.refs: list[weakref.ref[Slot]] = []

    def around(self, tier: Tier) -> Tier:
        def noting(take: Callable[[int], Slot | None]) -> Callable[[int], Slot | None]:
            def noted(nbytes: int) -> Slot | None:
                slot = take(nbytes)
                self.refs += [] if slot is None else [weakref.ref(slot)]
                return slot

            return noted

        tier.reserve, tier.at_hand = noting(tier.reserve), noting(tier.at_hand)
        return tier

    @property
    def alive(self) -> int:
        return sum(ref() is not None for ref in self.refs)


def on_a_device(runtime: SimulatedRuntime, **fields: Any) -> tuple[Offload, Slots]:
    slots = Slots()
    everything = {"tier": "host", "min_bytes": 0, "keep_last_bytes": 0}
    return Offload(runtime=runtime, around_tier=slots.around, **everything, **fields), slots


@pytest.mark.parametrize("back", [False, True], ids=["written", "read"])
def test_h18_a_slot_is_there_until_its_copy_is_over_though_everyone_has_gone(back: bool) -> None:
    runtime, x = SimulatedRuntime(launch_seconds=0.0), leaf(32, 32)
    offload, slots = on_a_device(runtime)
    with offload:
        y = (x + 1.0).sin()
        z = y.cos().exp()
    if back:
        offload.stats(synchronize=True)
        runtime.synchronize_all()
        torch.autograd.grad(z.sum(), y)  # what sin saved is brought back early, and not asked for
    assert runtime.pending_copies > 0
    del y, z, offload
    collect()
    runtime.poll()
    assert slots.alive >= runtime.pending_copies > 0, "a copy engine knows addresses, and nothing of who owns them"
    runtime.synchronize_all()
    assert runtime.faults == [], "nor was the end on the device gone"
    runtime.poll()
    collect()
    assert slots.alive == 0


def test_h26_what_is_not_needed_now_goes_before_a_full_device_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was brought back early and is not wanted, while its graph lives on."""
    nbytes, runtime, x = 32 * 32 * 4, SimulatedRuntime(), leaf(32, 32)
    offload, _ = on_a_device(runtime)
    (expected,) = torch.autograd.grad((x + 1.0).sin().cos().cos().sum(), x)
    with offload:
        y = (x + 1.0).sin().cos().cos()
        out = y.exp()
    offload.stats(synchronize=True)
    torch.autograd.grad(out.sum(), y)
    offloader, resident = offloader_of(offload), list[int]()
    assert offloader.census().resident_bytes == 3 * nbytes, "all that is asked for before it"

    def full_at_first(number: int) -> bool:
        resident.append(offloader.resident_bytes)
        return number == 1

    Allocations(runtime, monkeypatch, full_at_first)
    with runtime.stream(SimulatedStream("side")):
        (gradient,) = torch.autograd.grad(y.sum(), x)
    assert torch.equal(gradient, expected)
    assert resident[:2] == [3 * nbytes, nbytes], "but for what is needed now"


def test_h29_who_comes_second_waits_for_the_reload_that_another_thread_has_taken_up(
    backend: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    offload, (x, w, v) = backend.offload(), (leaf(32, 32, seed=seed) for seed in range(3))
    y = x + 1.0
    with offload:
        first, second = y * w, y * v
    expected = y.detach().clone()
    del y
    offload.stats(synchronize=True)
    wait, found = offloader_of(offload).wait, []

    def after_another_thread(transfer: Transfer, stream: Stream, what: str) -> None:
        monkeypatch.undo()
        backend.in_thread(lambda: found.extend(torch.autograd.grad(second.sum(), v)))
        wait(transfer, stream, what)

    monkeypatch.setattr(offloader_of(offload), "wait", after_another_thread)
    found.extend(torch.autograd.grad(first.sum(), w))
    assert [torch.equal(one, expected) for one in found] == [True, True]
    assert offload.stats(synchronize=True).bytes_in == expected.nbytes, "once, for both"


# -- an interrupt between a copy and its entry among the transfers ----------------------------------------------------


class InterruptedRuntime(SimulatedRuntime):
    """Copy ``number``, from 1, is interrupted: before it is enqueued, or right after."""

    def __init__(self, number: int, *, enqueues: bool) -> None:
        super().__init__(launch_seconds=0.0)
        self.left, self._enqueues = number, enqueues

    def copy(self, *given: Any, **options: Any) -> Event:
        self.left -= 1
        event = super().copy(*given, **options) if self.left != 0 or self._enqueues else None
        if self.left == 0 or event is None:
            raise KeyboardInterrupt
        return event


def step(offload: Offload | None, seed: int, *, settles: bool = True) -> Tensor:
    x = leaf(32, 32, seed=seed)
    with offload or nullcontext():
        loss = ((x + 1.0).sin().exp() * 2.0).cos().tanh().sum()
    if offload is not None and settles:
        offload.stats(synchronize=True)
    loss.backward()
    return x.grad


@pytest.mark.parametrize("enqueues", [False, True], ids=["before", "after"])
def test_h10_h18_both_ends_of_an_interrupted_copy_stay_until_it_is_over(enqueues: bool) -> None:
    """Wherever it comes, out or back: the checker sees whose bytes are written too early."""
    expected, number, was_reached = [step(None, seed) for seed in range(3)], 0, True
    while was_reached:
        number += 1
        runtime = InterruptedRuntime(number, enqueues=enqueues)
        with runtime.checked() as checker:
            offload, slots = on_a_device(runtime, step_tables=False)
            for seed in range(2):
                with suppress(KeyboardInterrupt):
                    step(offload, seed, settles=seed == 0)  # else the host would know that slots have been read
            was_reached, runtime.left = runtime.left <= 0, 0
            assert slots.alive >= runtime.pending_copies
            for seed in range(3):
                assert torch.equal(step(offload, seed, settles=seed == 2), expected[seed])
            assert_settled(offload)
            offload.close()
            runtime.synchronize_all()
            runtime.poll()
            collect()
            assert slots.alive == 0
        checker.assert_clean()
        assert runtime.faults == []
    assert number > 8


@pytest.mark.parametrize("enqueues", [False, True], ids=["before", "after"])
def test_h18_a_slot_knows_of_an_interrupted_copy_and_of_all_uses_before_it(enqueues: bool) -> None:
    runtime, cpu = InterruptedRuntime(1, enqueues=enqueues), torch.device("cpu")
    tier = HostTier(Pool(runtime.host_buffer), 1 << 20)
    offloader = DeviceOffloader(cpu, runtime, [tier], Accounts(), TransferLog(), windows=Windows(1 << 20, 1 << 20))
    outward, slot = runtime.transfer_stream(cpu, Direction.OUT), tier.reserve(4096)
    slot.write(torch.zeros(4096, dtype=torch.uint8))
    runtime.advance(outward, 1.0)
    earlier = Fence(runtime, runtime.record(outward))
    slot.record.fences = (earlier,)
    with pytest.raises(KeyboardInterrupt):
        offloader.reload(slot, Layout(4096), runtime.current_stream(cpu), "reload")
    assert earlier in slot.record.fences
    assert len(slot.record.fences) == 2, "its next owner has to wait for the copy, too"
    runtime.synchronize_all()
    assert runtime.faults == []
