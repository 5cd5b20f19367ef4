"""The calculator of the site computes what the doctor and plans do."""

from __future__ import annotations

import json
import shutil
import subprocess
from typing import Any

import pytest

from eager_offload.observe.doctor import SelfTest, hidden_from_width, verdict
from eager_offload.planning.machine import Machine
from eager_offload.planning.program import floor_seconds
from tests.docs.pages import ROOT

pytestmark = pytest.mark.long

GIB = 1 << 30


def value(expression: str) -> Any:
    """Of JavaScript over the names that the script exports."""
    if (node := shutil.which("node")) is None:
        pytest.skip("node is not installed: nothing here runs JavaScript")
    script = json.dumps(str(ROOT / "docs" / "javascripts" / "roofline.js"))
    code = f"const r = require({script}); console.log(JSON.stringify({expression}))"
    return json.loads(subprocess.run([node, "-e", code], capture_output=True, timeout=60, check=True).stdout)


def test_its_step_is_the_floor_that_plans_have_and_its_width_the_doctors() -> None:
    rows = [(seconds, saved * GIB, itemsize) for seconds in (0.1, 10.0) for saved, itemsize in ((37.6, 2), (1.5, 4))]
    asked = """([forward, savedBytes, itemsize]) => {
        const perByte = r.flopPerByte(6e14, 52e9, 26e9), backward = 2.5 * forward, window = 2 ** 30;
        const found = r.roofline({ forward, backward, savedBytes, out: 52e9, back: 26e9, window, newest: window });
        const widths = [false, true].map(checkpointed => r.hiddenFromWidth(perByte, itemsize, checkpointed));
        return { ...found, perByte, widths };
    }"""
    device = Machine("xpu", flops=6e14, single_flops=1e14, memory=1e12, out=52e9, back=26e9)
    ratio = verdict({"xpu": device}, [SelfTest("xpu", equal=True, moved_bytes=1)], {}).flop_per_byte["xpu"]
    for (forward, saved, itemsize), found in zip(rows, value(f"{json.dumps(rows)}.map({asked})"), strict=True):
        moved = saved - GIB
        assert found["step"] == pytest.approx(floor_seconds(forward, 2.5 * forward, moved, 52e9, 26e9))
        assert found["hidden"] == (moved <= min(52e9 * forward, 26e9 * 2.5 * forward))
        assert found["left"] == min(saved, 2 * GIB)
        assert found["perByte"] == pytest.approx(ratio)
        widths = [hidden_from_width(ratio, itemsize, checkpointed=checkpointed) for checkpointed in (False, True)]
        assert found["widths"] == pytest.approx(widths, abs=1)
