"""The scenarios of ``tests/gpu`` over the stand-in: all but what they compare of values."""

from __future__ import annotations

import pytest

from tests.fake_cuda import run
from tests.gpu.codec_scenarios import CODEC_SCENARIOS
from tests.gpu.graph_scenarios import GRAPH_SCENARIOS
from tests.gpu.scenarios import SCENARIOS, Scenario
from tests.gpu.step_scenarios import STEP_SCENARIOS
from tests.gpu.test_scenarios import run_on_the_device

ON_ONE_DEVICE = [
    scenario
    for scenario in (*SCENARIOS, *CODEC_SCENARIOS, *GRAPH_SCENARIOS, *STEP_SCENARIOS)
    if "two_devices" not in scenario.__name__
]


@pytest.mark.timeout(60)
@pytest.mark.parametrize("scenario", ON_ONE_DEVICE)
def test_over_the_stand_in(scenario: Scenario) -> None:
    run_on_the_device(scenario)


@pytest.mark.timeout(60)
def test_on_two_devices() -> None:
    assert "passed" in run(["-m", "tests.gpu", "two_devices"], FAKE_CUDA_DEVICES="2").stdout
