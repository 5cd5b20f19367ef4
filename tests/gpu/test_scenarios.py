"""The scenarios on the accelerator of this machine."""

from __future__ import annotations

import sys

import pytest
import torch

from tests.gpu.machine import Machine, Skipped
from tests.gpu.scenarios import PROGRAMS, SCENARIOS, Scenario
from tests.processes import printed_by


def run_on_the_device(scenario: Scenario) -> None:
    machine = Machine()
    try:
        scenario(machine)
    except Skipped as reason:
        pytest.skip(str(reason))
    finally:
        machine.close()


#: The virtual device has the programs of the corpus in the matrix.
_PROGRAMS = [] if "tests.virtual_device.plugin" in sys.modules else PROGRAMS


@pytest.mark.gpu
@pytest.mark.skipif(not torch.accelerator.is_available(), reason="torch finds no accelerator on this machine")
@pytest.mark.parametrize("scenario", [*_PROGRAMS, *SCENARIOS], ids=lambda one: one.__name__)
def test_on_the_device(scenario: Scenario) -> None:
    run_on_the_device(scenario)


def test_scenarios_are_imported_where_pytest_is_not_installed() -> None:
    """As ``python -m benchmarks.gpu`` does, on a machine that has torch alone."""
    printed_by("-c", "import sys; sys.modules['pytest'] = None; import tests.gpu.scenarios")
