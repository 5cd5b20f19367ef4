"""Hazards of order, sharing and versions with ``codec="lossless"``, on every backend, in a process of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
HAZARDS = [f"tests/hazards/test_{name}.py" for name in ("streams", "versions", "graphs", "sharing")]
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
