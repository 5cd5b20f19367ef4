"""The scenarios of ``tests/gpu`` over the stand-in: all but what they compare of values."""

from __future__ import annotations

import pytest

from tests.fake_cuda import run
from tests.gpu.scenarios import OF_DEVICES, SCENARIOS, Scenario
from tests.gpu.test_scenarios import run_on_the_device


@pytest.mark.timeout(240)  # of which compilers take the most
@pytest.mark.parametrize("scenario", [*SCENARIOS, *OF_DEVICES], ids=lambda one: one.__name__)
def test_over_the_stand_in(scenario: Scenario) -> None:
    run_on_the_device(scenario)


@pytest.mark.timeout(60)
def test_on_two_devices() -> None:
    assert "passed" in run(["-m", "tests.gpu", "two-devices"], FAKE_CUDA_DEVICES="2").stdout
