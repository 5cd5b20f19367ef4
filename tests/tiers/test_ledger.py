"""H26: the processes of a node share its memory: each takes what it needs, and none what another lacks."""

from __future__ import annotations

import json
import sys
from functools import cache

import pytest

from tests.processes import printed_by
from tests.tiers.machines import SCENARIOS

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the ledger is a file of Linux")


@cache
def complaints() -> dict[str, str]:
    """What each scenario has complained of: the processes of all of them are forked off a single one."""
    found: dict[str, str] = json.loads(printed_by("-m", "tests.tiers.machines"))
    return found


@pytest.mark.parametrize("name", SCENARIOS)
def test_h26_processes_of_a_node_share_its_memory(name: str) -> None:
    assert complaints()[name] == ""
