"""The scenarios on the accelerator of this machine."""

from __future__ import annotations

import pytest
import torch

from tests.gpu.machine import Machine, Skipped
from tests.gpu.scenarios import PROGRAMS, SCENARIOS, Scenario


def run_on_the_device(scenario: Scenario) -> None:
    machine = Machine()
    try:
        scenario(machine)
    except Skipped as reason:
        pytest.skip(str(reason))
    finally:
        machine.close()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.accelerator.is_available(), reason="torch finds no accelerator on this machine")
@pytest.mark.parametrize("scenario", [*PROGRAMS, *SCENARIOS], ids=lambda one: one.__name__)
def test_on_the_device(scenario: Scenario) -> None:
    run_on_the_device(scenario)
