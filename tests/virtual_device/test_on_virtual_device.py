"""Runs tests where the virtual device is the accelerator: in processes of their own, since that is for good."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.sampling import one_in
from tests.virtual_device import build

ROOT = Path(__file__).resolve().parents[2]
HERE = "tests/virtual_device/on_device"
#: Hazards whose subject is order, memory or what another has changed meanwhile.
HAZARDS = (
    "streams",
    "copies",
    "versions",
    "replaced_memory",
    "what_is_counted",
    "neighbours",
    "reentry",
)

_HAZARDS = [f"tests/hazards/test_{name}.py" for name in HAZARDS]
_OTHERS = sorted({str(path.relative_to(ROOT)) for path in ROOT.glob("tests/hazards/test_*.py")}.difference(_HAZARDS))

#: What runs together in one process: arguments for pytest.
QUICK = {
    # Of the device's budget one test in several regimes.
    "device": ["-m", "not long", "-k", "not test_device_budget or below_the_budget", HERE],
}
LONG = {
    "hazards": ["-m", "not long", "-k", "virtual", *_HAZARDS, "tests/test_contract.py"],
    "scenarios": ["-m", "gpu", "tests/gpu"],
    "the whole device": ["-m", "not short", HERE],
    "gpu": ["-m", "gpu", "tests/runtime/test_accelerator_gpu.py", "tests/observe/test_doctor.py"],
    "codecs": ["-k", "virtual", "-m", "not long", "tests/codecs/test_rounding.py"],
    "other hazards": ["-k", "virtual", *one_in(2, _OTHERS)],
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
        [*command, *arguments],
        cwd=ROOT,
        env={**os.environ, **environ},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        pytest.fail(f"{done.stdout[-20000:]}\n{done.stderr[-4000:]}", pytrace=False)
    return done.stdout


@pytest.mark.timeout(1800)  # many tests, each of which has a time limit of its own
@pytest.mark.parametrize(
    "group",
    [
        pytest.param("device", marks=pytest.mark.short),
        *(pytest.param(group, marks=pytest.mark.long) for group in LONG),
    ],
)
def test_on_the_virtual_device(group: str) -> None:
    assert " passed" in run({**QUICK, **LONG}[group])
