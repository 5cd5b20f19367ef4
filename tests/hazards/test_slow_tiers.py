"""H69: a tier that is slower than the step costs no memory: copies of graphs that are gone are cancelled, and their
sources go. The tier here carries nothing at all until it is let, so that no time comes into it.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from tests.hazards.backends import DiskBackend, assert_settled
from tests.hazards.probes import Gone
from tests.hazards.programs import assert_identical

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


def test_h69_a_thread_that_has_carried_all_that_it_was_given_takes_the_rest(disk: DiskBackend) -> None:
    """No call of the library comes: what was held back leaves all the same, and its sources go."""
    offload, model = disk.offload(), Layers(storages := Gone())
    with offload:
        loss = model(torch.ones(SIZE, SIZE))
    storages.wait()
    loss.backward()
    assert assert_settled(offload).bytes_out >= LAYERS * NBYTES
