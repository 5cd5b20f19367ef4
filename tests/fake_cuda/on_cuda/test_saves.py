"""A plan that is made where there is no GPU has the saves that torch's own kernels have on one."""

from __future__ import annotations

import pytest

from tests.fake_cuda.saves import recorded, saved_bytes


@pytest.mark.timeout(120)
def test_saves_of_a_plan_are_those_of_cudas_kernels() -> None:
    """``planning/test_trace.py`` has the plan of a process without CUDA save what is recorded."""
    assert saved_bytes() == recorded()
    assert len(recorded()) > 150
