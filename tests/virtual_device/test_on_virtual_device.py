"""Runs tests where the virtual device is the accelerator: in processes of their own, since that is for good."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.virtual_device import build

ROOT = Path(__file__).resolve().parents[2]
HERE = "tests/virtual_device/on_device"
#: Of hazards on any backend, those of streams, events, memory of a device, and interrupts of what serves them.
_HAZARDS = (
    "copies in_between interrupts interrupts_everywhere lifetime modes replaced_memory short_memory steady_state "
    "versions waits what_is_counted"
)
HAZARDS = [*(f"tests/hazards/test_{name}.py" for name in _HAZARDS.split()), "tests/test_contract.py"]
#: What runs together in one process: arguments for pytest. In the full suite each has its long form.
QUICK = {
    # Of the device's budget one test in two regimes, and nothing of what the device itself refuses, or draws.
    "device": [
        *("-m", "not long", "-k", "not test_device_budget or (below_the_budget and each)"),
        *(f"--ignore={HERE}/test_{name}.py" for name in ("beside_captures", "graphs", "random")),
        HERE,
    ],
    "matrix": ["-m", "not long", "tests/test_matrix.py"],
}
LONG = {
    "the whole device": ["-m", "not short", HERE],
    "the whole matrix": ["tests/test_matrix.py"],
    "hazards": ["-m", "not long", "-k", "virtual", *HAZARDS],
    # Of a model with dropout and one whose shapes depend on data, both of which a device runs in its own way.
    "levels": ["-k", "each_level and (shaky or experts)", "tests/planning/test_levels.py"],
    "scenarios": ["-m", "gpu", "tests/gpu", "tests/observe/test_doctor.py"],
}

pytestmark = pytest.mark.xdist_group("virtual_device")


@pytest.fixture(autouse=True)
def _can_be_built() -> None:
    reason = build.reason_not_to_build()
    if reason is not None:
        if os.environ.get("CI"):
            pytest.fail(reason)
        pytest.skip(reason)


def run(arguments: list[str], **environ: str) -> str:
    """What pytest prints, in a process whose accelerator is the virtual device; fails where a test there does."""
    command = [sys.executable, "-m", "pytest", "-p", "tests.virtual_device.plugin", "-p", "no:cacheprovider", "-q"]
    done = subprocess.run(
        [*command, *arguments], cwd=ROOT, env={**os.environ, **environ}, capture_output=True, text=True, check=False
    )
    if done.returncode:
        pytest.fail(f"{done.stdout[-20000:]}\n{done.stderr[-4000:]}", pytrace=False)
    return done.stdout


@pytest.mark.timeout(1800)  # many tests, each of which has a time limit of its own
@pytest.mark.parametrize(
    "group",
    [
        *(pytest.param(group, marks=pytest.mark.short) for group in QUICK),
        *(pytest.param(group, marks=pytest.mark.long) for group in LONG),
    ],
)
def test_on_the_virtual_device(group: str) -> None:
    assert " passed" in run({**QUICK, **LONG}[group])
