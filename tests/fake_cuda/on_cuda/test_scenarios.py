"""The scenarios of ``tests/gpu`` over the stand-in: all but what they compare of values."""

from __future__ import annotations

import pytest

from tests.gpu.codec_scenarios import CODEC_SCENARIOS
from tests.gpu.graph_scenarios import GRAPH_SCENARIOS
from tests.gpu.machine import DeviceMachine
from tests.gpu.scenarios import SCENARIOS, Scenario
from tests.gpu.step_scenarios import STEP_SCENARIOS
from tests.gpu.test_scenarios import run


class StandInMachine(DeviceMachine):
    computes = False

    def __init__(self) -> None:
        super().__init__()
        self.width = 256


@pytest.mark.timeout(60)
@pytest.mark.parametrize("scenario", [*SCENARIOS, *CODEC_SCENARIOS, *GRAPH_SCENARIOS, *STEP_SCENARIOS])
def test_over_the_stand_in(scenario: Scenario) -> None:
    machine = StandInMachine()
    try:
        run(scenario, machine)
    finally:
        machine.finish()
        machine.close()
