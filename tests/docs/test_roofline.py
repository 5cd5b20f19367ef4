"""The calculator's formulas, against the doctor's and against those of plans."""

from __future__ import annotations

import json
import shutil
import subprocess
from typing import Any

import pytest

from eager_offload.observe.doctor import Device, SelfTest, Speed, hidden_from_width, verdict
from eager_offload.planning.predict import floor_seconds
from tests.docs.pages import ROOT

pytestmark = [pytest.mark.long, pytest.mark.xdist_group("roofline")]

SCRIPT = ROOT / "docs" / "javascripts" / "roofline.js"
GIB = 1 << 30


def value(expression: str) -> Any:
    """Of JavaScript over the names that the script exports; ``test_site.py`` has the calculator in a browser."""
    if (node := shutil.which("node")) is None:
        pytest.skip("node is not installed: nothing here runs JavaScript")
    script = f"const r = require({json.dumps(str(SCRIPT))}); console.log(JSON.stringify({expression}))"
    ended = subprocess.run([node, "-e", script], capture_output=True, text=True, timeout=60)
    assert ended.returncode == 0, ended.stderr
    return json.loads(ended.stdout)


def test_it_is_the_floor_that_plans_have() -> None:
    """Of forward and backward times, and of the bytes without one window."""
    rows = [
        (forward, 2.5 * forward, saved * GIB, window * GIB)
        for forward in (0.1, 1.0, 10.0)
        for saved, window in ((37.6, 0.84), (150.2, 3.4), (1.5, 2.0))
    ]
    asked = """([forward, backward, savedBytes, window]) => r.roofline(
        { forward, backward, savedBytes, out: 52e9, back: 26e9, window, newest: window })"""
    found = value(f"{json.dumps(rows)}.map({asked})")
    for (forward, backward, saved, window), one in zip(rows, found, strict=True):
        moved = max(saved - window, 0)
        assert one["step"] == pytest.approx(floor_seconds(forward, backward, moved, 52e9, 26e9))
        assert one["hidden"] == (moved <= 52e9 * forward and moved <= 26e9 * backward)
        assert one["left"] == min(saved, 2 * window)


def test_it_agrees_with_the_doctor_on_the_width() -> None:
    rows = [
        (flops, out, back, itemsize, checkpointed)
        for flops in (3.1e10, 5.98e14)
        for out, back in ((52e9, 52e9), (3.7e9, 3.1e9), (4e9, 1e9))
        for itemsize in (2, 4)
        for checkpointed in (False, True)
    ]
    asked = """([flops, out, back, itemsize, checkpointed]) => {
        const perByte = r.flopPerByte(flops, out, back);
        return [perByte, r.hiddenFromWidth(perByte, itemsize, checkpointed)]
    }"""
    found = value(f"{json.dumps(rows)}.map({asked})")
    for (flops, out, back, itemsize, checkpointed), (per_byte, width) in zip(rows, found, strict=True):
        device = Device(name="xpu", model="", flops=flops, link=Speed(out=out, back=back))
        ratio = verdict([device], [], [SelfTest("xpu", equal=True, moved_bytes=1)], {}).flop_per_byte["xpu"]
        assert per_byte == pytest.approx(ratio, rel=1e-12)
        assert width == pytest.approx(hidden_from_width(ratio, itemsize, checkpointed=checkpointed), abs=1)


def test_a_block_at_that_width_is_just_hidden() -> None:
    """The shape's work and bytes, and the roofline over them, are of one piece with the width."""
    found = value("""[false, true].flatMap(checkpointed => [0.99, 1.01].map(share => {
        const flops = 598e12, width = share * r.flopPerByte(flops, 52e9, 52e9) * 2 / (checkpointed ? 24 : 1.5);
        const shape = r.transformer({layers: 32, width, tokens: 32768, sequence: 0, itemsize: 2}, checkpointed);
        const forward = shape.flop / flops;
        const given = {forward, backward: 2 * forward, savedBytes: shape.savedBytes, out: 52e9, back: 52e9};
        return r.roofline({...given, window: 0, newest: 0}).hidden
    }))""")
    assert found == [False, True, False, True]


def test_what_it_tells_in_words() -> None:
    given = {"forward": 2, "saved": 10, "window": 256, "newest": 0}
    links = [{"out": 100, "back": 100}, {"out": 4, "back": 100}, {"out": 4, "back": 1}]
    hidden, limited, hopeless = value(
        f"{json.dumps([given | link for link in links])}.map(one => r.report(one, false, false))"
    )
    share = 10 * GIB / 100e9 / 2
    assert hidden["verdict"] == f"Hidden: the link needs {share:.0%} of the time that there is.".replace("%", " %")
    longer = (10 * GIB / 4e9 + 4) / 6
    assert limited["verdict"].startswith(
        f"The link is the limit: a step takes at least {longer:.2f} times as long, which"
    )
    assert hopeless["verdict"].endswith("Full checkpointing takes less time; try both together.")
    rows = dict(hidden["rows"])
    assert rows["Saved on the device without offload"] == "10.0 GiB"
    assert rows["Saved on the device with it, at most about"] == "256 MiB"
    assert rows["A step with it, at best"] == "6.00 s"
    nothing = value(f"r.report({json.dumps(given | links[0] | {'newest': 20000})}, false, false)")
    assert nothing["verdict"].startswith("Nothing leaves")
