"""H69: a tier that is slower than the step costs no memory: copies of graphs that are gone are cancelled, and their
sources go. The tier here carries nothing at all until it is let, so that no time comes into it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.hazards.backends import DiskBackend, assert_settled
from tests.hazards.probes import Gone
from tests.hazards.programs import assert_identical
from tests.threads import on_a_thread

pytestmark = pytest.mark.usefixtures("held_back")

SIZE, LAYERS, STEPS = 128, 8, 8
#: Of one saved tensor, and how many copies a transfer stream is given at once.
NBYTES, GIVEN = SIZE * SIZE * 4, 2


class Layers(nn.Module):
    """Each layer saves one tensor of its own."""

    def __init__(self, storages: Gone | None = None) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))
        self.storages = storages

    def forward(self, x: Tensor) -> Tensor:
        h = x * self.scale
        for _ in range(LAYERS):
            h = h.sin()
            if self.storages is not None:
                self.storages.see(h)
        return h.sum()


def gradient(model: Layers) -> Tensor:
    assert model.scale.grad is not None
    return model.scale.grad


def expected() -> Tensor:
    model, x = Layers(), torch.ones(SIZE, SIZE)
    for _ in range(STEPS):
        model(x).backward()
    return gradient(model)


@pytest.mark.parametrize("plans", [True, False], ids=["with step plans", "without"])
@pytest.mark.parametrize("goes_backward", [True, False], ids=["trained", "dropped"])
def test_h69_sources_of_graphs_that_are_gone_do_not_pile_up(
    disk: DiskBackend, plans: bool, goes_backward: bool
) -> None:
    offload = disk.offload(step_plans=plans)
    x = torch.ones(SIZE, SIZE)
    with disk.gate() as gate:
        model = Layers(storages := Gone())
        for _ in range(STEPS):
            with offload:
                loss = model(x)
            if goes_backward:
                loss.backward()
            del loss
            stats = offload.stats()
            assert storages.alive <= GIVEN
            assert stats.inflight_bytes_peak <= (LAYERS + 2 + GIVEN) * NBYTES
            assert stats.device_bytes_peak <= stats.without_offload_bytes_peak + GIVEN * NBYTES
        gate.open()
        assert assert_settled(offload).bytes_out > 0
    if goes_backward:
        assert_identical(expected(), gradient(model))


def in_turn(model: Layers, around: Any) -> None:
    for rows in (SIZE, SIZE, SIZE // 2, SIZE):
        with around:
            loss = model(torch.ones(rows, SIZE))
        loss.backward()


def several_at_once(model: Layers, around: Any) -> None:
    with around:
        losses = [model(torch.ones(SIZE, SIZE)) for _ in range(3)]
    for loss in losses[1:]:
        loss.backward()


def again_and_again(model: Layers, around: Any) -> None:
    with around:
        loss = model(torch.ones(SIZE, SIZE))
    loss.backward(retain_graph=True)
    loss.backward()


def checkpointed(model: Layers, around: Any) -> None:
    for _ in range(3):
        with around:
            loss = checkpoint(model, torch.ones(SIZE, SIZE), use_reentrant=False)
        loss.backward()


def in_threads(model: Layers, around: Any) -> None:
    for _ in range(2):
        on_a_thread(lambda: in_turn(model, around))


@pytest.mark.parametrize("plans", [True, False], ids=["with step plans", "without"])
@pytest.mark.parametrize(
    "program",
    [in_turn, several_at_once, again_and_again, checkpointed, in_threads],
    ids=lambda it: it.__name__,
)
def test_h69_what_is_cancelled_or_not_gradients_are_exact(
    program: Callable[[Layers, Any], None], disk: DiskBackend, plans: bool
) -> None:
    model, offload, without = Layers(), disk.offload(step_plans=plans), Layers()
    program(without, nullcontext())
    for _ in range(2):
        model.zero_grad(set_to_none=True)
        program(model, offload)
        assert_identical(gradient(without), gradient(model))
    assert assert_settled(offload).bytes_out > 0


def test_h69_a_thread_that_has_carried_all_that_it_was_given_takes_the_rest(disk: DiskBackend) -> None:
    """No call of the library comes: what was held back leaves all the same, and its sources go."""
    offload, model = disk.offload(), Layers(storages := Gone())
    with offload:
        loss = model(torch.ones(SIZE, SIZE))
    storages.wait()
    loss.backward()
    assert assert_settled(offload).bytes_out >= LAYERS * NBYTES
