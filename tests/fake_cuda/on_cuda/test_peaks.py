"""Peaks of device memory at full size are those that are recorded, to the byte."""

from __future__ import annotations

import pytest

from tests.fake_cuda.models import MODELS
from tests.fake_cuda.peaks import compared, measured, recorded


@pytest.mark.timeout(180)
@pytest.mark.parametrize("name", MODELS)
def test_peaks_are_those_recorded(name: str) -> None:
    expected, found = recorded()[name], measured(name)
    assert found == expected, "\n".join(
        [
            "peaks in GiB, of the first step and of those behind it; if they are meant to be new,",
            ".venv-cuda/bin/python -m tests.fake_cuda -m tests.fake_cuda.peaks --record",
            *compared(expected, found),
        ]
    )
    none, ours = (max(found[way]) for way in ("none", "ours"))
    assert ours < none / 2
    for way, (_, later) in found.items():
        if "GiB" in way:
            assert later <= float(way.partition(", ")[2].removesuffix("GiB")) * 2**30
