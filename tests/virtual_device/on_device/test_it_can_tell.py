"""What is missing shows: without any one kind of order or keepalive, training gives other bits, run after run.

Not in each of them: on a busy machine the host may be so slow that what comes late comes early enough.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor

from eager_offload import Offload
from eager_offload.engine.offloader import DeviceOffloader
from eager_offload.engine.transfer import Transfer
from eager_offload.runtime.accelerator import AcceleratorEvent, AcceleratorRuntime
from eager_offload.runtime.base import Direction, Event
from eager_offload.tiers.base import Slot
from tests.virtual_device import NAME, VirtualDevice

WIDTH, LAYERS, STEPS = 64, 3, 2

# -- what is trained --------------------------------------------------------------------------------------------------


def layer(x: Tensor, weight: Tensor) -> Tensor:
    """Saves whole storages, and an eighth of another one, which is gathered before it leaves."""
    h = (x @ weight).tanh()
    few = h.sin()[:, ::8]
    return x + h.exp() * h + (few * few).repeat(1, 8)


def train(
    seed: int, around: AbstractContextManager[object], abandoned: AbstractContextManager[object] | None = None
) -> list[Tensor]:
    """The losses and gradients of a few steps, and the parameters after them.

    Args:
        abandoned: around a loss before each, of which only the last layer's gradient is asked for.
    """
    generator = torch.Generator().manual_seed(seed)

    def numbers(scale: float) -> Tensor:
        return (torch.randn(WIDTH, WIDTH, generator=generator) * scale).to(NAME)

    def loss_of(batch: Tensor, around: AbstractContextManager[object]) -> Tensor:
        with around:
            loss = functools.reduce(layer, weights, batch).square().mean()
        torch.accelerator.synchronize()  # as for a loss that is printed: without it nothing would have to come back
        return loss

    weights = [numbers(1 / WIDTH).requires_grad_() for _ in range(LAYERS)]
    found = []
    for batch in [numbers(1) for _ in range(STEPS)]:
        if abandoned is not None:
            torch.autograd.grad(loss_of(batch, abandoned), weights[-1:])
        loss = loss_of(batch, around)
        gradients = torch.autograd.grad(loss, weights)
        found += [loss.detach(), *gradients]
        del loss
        with torch.no_grad():
            for weight, gradient in zip(weights, gradients, strict=True):
                weight -= 0.1 * gradient
    torch.accelerator.synchronize()
    return [tensor.detach().cpu() for tensor in (*found, *weights)]


@functools.cache
def expected(seed: int) -> list[Tensor]:
    values = train(seed, nullcontext())
    assert all(tensor.isfinite().all() for tensor in values)
    return values


Regime = Callable[[VirtualDevice], AbstractContextManager[None]]


LATE: dict[str, Regime] = {
    "copies": lambda virtual: virtual.slow_links(latency=2e-3),
    "compute": lambda virtual: virtual.slow_compute(1e-3),
    "copies in": lambda virtual: virtual.slow_links(latency=1e-2, out=False),
}


def offload_of_all() -> Offload:
    return Offload(tier="host", keep_last_bytes=0, min_bytes=0)


def runs_that_differ(virtual: VirtualDevice, late: str, runs: int) -> int:
    """How many of ``runs`` give other bits with offload than without.

    Where copies in are late, only losses that are abandoned are offloaded. What the others save stays, in blocks that
    were targets.
    """
    differ = 0
    for seed in range(runs):
        values, offload = expected(seed), offload_of_all()
        with LATE[late](virtual):
            offloaded = train(seed, nullcontext(), offload) if late == "copies in" else train(seed, offload)
        stats = offload.stats()
        assert min(stats.bytes_out, stats.bytes_in) > 0
        offload.close()
        differ += not all(map(torch.equal, values, offloaded))
    return differ


# -- what is taken out ------------------------------------------------------------------------------------------------


def nothing(*_: object) -> None:
    """Does not wait."""


def waits_of_streams(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(AcceleratorEvent, "wait_on", nothing)


def the_wait_of_compute_for_reloads(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(AcceleratorRuntime, "wait", nothing)  # those of transfer streams do not go through it


def _what_copies_wait_for(patch: pytest.MonkeyPatch, left: Callable[[bool, Sequence[Event]], Sequence[Event]]) -> None:
    def copy(
        self: AcceleratorRuntime,
        dst: Tensor | Slot,
        src: Tensor | Slot,
        stream: torch.Stream,
        after: Sequence[Event],
        *,
        timed: bool,
    ) -> Event:
        return intact(self, dst, src, stream, left(isinstance(dst, Slot), after), timed=timed)

    intact = AcceleratorRuntime.copy
    patch.setattr(AcceleratorRuntime, "copy", copy)


def the_wait_of_copies_out_for_compute(patch: pytest.MonkeyPatch) -> None:
    _what_copies_wait_for(patch, lambda out, after: after[1:] if out else after)  # the slot's last uses are behind it


def the_wait_of_copies_in_for_the_blocks_last_owner(patch: pytest.MonkeyPatch) -> None:
    _what_copies_wait_for(patch, lambda out, after: after if out else ())


def goes_out(runtime: AcceleratorRuntime, event: Event) -> bool:
    """Whether ``event`` stands for a copy out."""
    assert isinstance(event, AcceleratorEvent)
    stream = event.recorded_on
    return stream is not None and stream == runtime.transfer_stream(stream.device, Direction.OUT)


def the_sources_stay_until_their_copies_are_over(patch: pytest.MonkeyPatch) -> None:
    """Saved tensors are held by their handles, which let go of them when they hear that the copy is over."""

    def query(self: AcceleratorRuntime, event: Event) -> bool:
        return goes_out(self, event) or intact(self, event)

    def synchronize(self: AcceleratorRuntime, event: Event) -> None:
        if not goes_out(self, event):
            intact_synchronize(self, event)

    intact, intact_synchronize = AcceleratorRuntime.query, AcceleratorRuntime.synchronize
    patch.setattr(AcceleratorRuntime, "query", query)
    patch.setattr(AcceleratorRuntime, "synchronize", synchronize)


def the_keepalive_of_targets(patch: pytest.MonkeyPatch) -> None:
    """The program does not hold what was to be written by reloads that were abandoned."""

    def enqueue(self: DeviceOffloader, transfer: Transfer, *rest: Any) -> None:
        intact(self, transfer, *rest)
        if transfer in self._in:
            self._in[transfer] = None

    intact = DeviceOffloader._enqueue
    patch.setattr(DeviceOffloader, "_enqueue", enqueue)


#: What is taken out, if anything, and what is late.
TAKEN_OUT: list[tuple[Callable[[pytest.MonkeyPatch], None] | None, str]] = [
    *((None, late) for late in LATE),
    (waits_of_streams, "copies"),
    (waits_of_streams, "compute"),
    (the_wait_of_compute_for_reloads, "copies"),
    (the_wait_of_copies_out_for_compute, "compute"),
    (the_wait_of_copies_in_for_the_blocks_last_owner, "compute"),
    (the_sources_stay_until_their_copies_are_over, "copies"),
    (the_keepalive_of_targets, "copies in"),
]


@pytest.mark.parametrize("runs", [pytest.param(3, marks=pytest.mark.short), pytest.param(8, marks=pytest.mark.long)])
@pytest.mark.parametrize(("take_out", "late"), TAKEN_OUT)
def test_without_it_most_runs_differ_and_none_with_it(
    virtual: VirtualDevice,
    monkeypatch: pytest.MonkeyPatch,
    take_out: Callable[[pytest.MonkeyPatch], None] | None,
    late: str,
    runs: int,
) -> None:
    # Held back, most copies would be cancelled: here as many as can are on their way.
    monkeypatch.setattr(AcceleratorRuntime, "holds_copies_back", False)
    if take_out is not None:
        take_out(monkeypatch)
    differ = runs_that_differ(virtual, late, runs)
    assert differ == 0 if take_out is None else differ > 0.6 * runs


# -- a source whose block is another stream's -------------------------------------------------------------------------


def train_on_two_streams(around: AbstractContextManager[object]) -> list[Tensor]:
    """Saves, on one stream, what another one has computed, on which nothing is saved: its operators go on."""
    x = torch.randn(WIDTH, WIDTH, generator=torch.Generator().manual_seed(7)).to(NAME).requires_grad_()
    side, main, total = torch.Stream(device=NAME), torch.accelerator.current_stream(), torch.zeros((), device=NAME)
    with around:
        for _ in range(2 * LAYERS):
            side.wait_stream(main)
            with side:
                h = x * 2
            main.wait_stream(side)
            total = total + h.sin().sum()
            del h
            with side:
                for _ in range(2):
                    torch.full((WIDTH, WIDTH), 3.0, device=NAME)  # in the block of `h`, if that is free
    torch.accelerator.synchronize()
    (gradient,) = torch.autograd.grad(total, x)
    torch.accelerator.synchronize()
    return [gradient.cpu()]


@pytest.mark.parametrize("lets_go", [False, True])
def test_that_the_current_stream_waits_for_a_copy_does_not_free_its_source(
    virtual: VirtualDevice, monkeypatch: pytest.MonkeyPatch, lets_go: bool
) -> None:
    """To let go of it then looks safe for what has a ``grad_fn``, is no view and was not written since: it is not."""

    def query(self: AcceleratorRuntime, event: Event) -> bool:
        if goes_out(self, event):
            event.wait_on(torch.accelerator.current_stream())
            return True
        return intact(self, event)

    wanted, intact = train_on_two_streams(nullcontext()), AcceleratorRuntime.query
    if lets_go:
        monkeypatch.setattr(AcceleratorRuntime, "query", query)
        monkeypatch.setattr(AcceleratorRuntime, "synchronize", nothing)
    offload = offload_of_all()
    monkeypatch.setattr(AcceleratorRuntime, "holds_copies_back", False)
    with LATE["copies"](virtual):
        found = (train_on_two_streams(offload) for _ in range(8 if lets_go else 1))
        assert any(not all(map(torch.equal, wanted, one)) for one in found) is lets_go
    assert offload.stats().bytes_in > 0
    offload.close()
