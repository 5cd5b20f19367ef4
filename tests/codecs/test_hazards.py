"""Hazards of order, sharing, versions and lifetime with ``codec="lossless"``, on every backend, in their own process.

Those of steps that follow plans, of peaks and of a steady state are not among them: they count what does not travel.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
HAZARDS = [
    f"tests/hazards/test_{name}.py"
    for name in (
        *("streams", "copies", "interrupted_copies", "interrupts", "reentry", "in_between", "short_memory"),
        *("sharing", "views", "overlapping", "weights", "replaced_memory", "neighbours", "gradients_that_are_saved"),
        *("versions", "unseen_writes", "allowed_changes", "subclasses", "subclass_versions"),
        *("graphs", "lifetime", "copied_objects", "modes", "operators", "kinds"),
    )
]
#: They count bytes, or steps that follow a plan: see ``Backend.offload``.
OTHER_NUMBERS = "step_that_is_followed or every_layer_saves_without_grad"


@pytest.mark.long
@pytest.mark.timeout(900)
def test_hazards_with_what_is_packed_bit_for_bit() -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-m", "not long", "-k", f"not ({OTHER_NUMBERS})"]
    done = subprocess.run(
        [*command, "-p", "no:cacheprovider", *HAZARDS],
        cwd=ROOT,
        env={**os.environ, "TESTS_CODEC": "lossless"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-8000:]
