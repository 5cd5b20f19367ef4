"""The scenarios on the accelerator of this machine."""

from __future__ import annotations

import pytest
import torch

from tests.gpu.codec_scenarios import CODEC_SCENARIOS
from tests.gpu.graph_scenarios import GRAPH_SCENARIOS
from tests.gpu.machine import Machine, Skipped
from tests.gpu.scenarios import SCENARIOS, Scenario
from tests.gpu.step_scenarios import STEP_SCENARIOS


def run(scenario: Scenario, machine: Machine) -> None:
    try:
        scenario(machine)
    except Skipped as reason:
        pytest.skip(str(reason))


def run_on_the_device(scenario: Scenario) -> None:
    machine = Machine()
    try:
        run(scenario, machine)
    finally:
        machine.finish()
        machine.close()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.accelerator.is_available(), reason="torch finds no accelerator on this machine")
@pytest.mark.parametrize("scenario", [*SCENARIOS, *CODEC_SCENARIOS, *GRAPH_SCENARIOS, *STEP_SCENARIOS])
def test_on_the_device(scenario: Scenario) -> None:
    run_on_the_device(scenario)
