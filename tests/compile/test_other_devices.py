"""Graphs for a device that is not the CPU: what travels is on the host, and comes back to where it was."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.processes import printed_by

pytestmark = [pytest.mark.long, pytest.mark.xdist_group("other devices")]


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    """What a process found in which there is such a device, by name only."""
    return json.loads(printed_by("-m", "tests.compile.elsewhere").splitlines()[-1])


def test_halves_keep_their_devices(found: dict[str, Any]) -> None:
    assert len(found["pairs"]) == 4
    for name, one in found["pairs"].items():
        assert one["groups"] > 3, name
        assert one["devices"] == {"offload": ["cpu"], "reload": ["elsewhere"], "others": ["elsewhere"]}, name
        assert one["gradients"] == ["elsewhere"], name


def test_a_joint_graph_keeps_its_devices(found: dict[str, Any]) -> None:
    one = found["joint"]
    assert one["groups"] > 3
    assert one["wrong"] == []
    assert one["devices"]["offload"] == ["cpu"]
    assert one["devices"]["reload"] == ["elsewhere"]
    assert one["results"] == ["elsewhere", "elsewhere", "cpu", *["elsewhere"] * (len(one["results"]) - 3)]


def test_the_hosts_own_values_stay(found: dict[str, Any]) -> None:
    assert "device" in found["joint"]["kept"]
    assert set(found["joint"]["kept"]) <= {"device", "parameter", "alive"}
