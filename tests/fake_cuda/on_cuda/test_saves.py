"""A plan that is made where there is no GPU has the saves that torch's own kernels have on one."""

from __future__ import annotations

import json

import pytest

from tests.fake_cuda.saves import saved_bytes
from tests.processes import printed_by


@pytest.mark.timeout(120)
def test_saves_of_a_plan_are_those_of_cudas_kernels() -> None:
    elsewhere = json.loads(printed_by("-m", "tests.fake_cuda.saves", LD_PRELOAD=""))
    here = saved_bytes()
    assert {name: (found, elsewhere[name]) for name, found in here.items() if found != elsewhere[name]} == {}
    assert len(here) > 150
