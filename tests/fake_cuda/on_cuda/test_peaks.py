"""Peaks of device memory at full size are those that are recorded, to the byte."""

from __future__ import annotations

import pytest

from tests.fake_cuda.models import MODELS
from tests.fake_cuda.peaks import compared, measured, recorded

#: Bytes that torch's allocator on an H100 has counted of the 1B Llama: ``benchmarks/results/gpu``, ``docs/gpu.md``.
ON_AN_H100 = {
    "none": 64_608_901_632,
    "checkpointing": 15_011_240_448,
    "save_on_cpu": 12_594_141_696,
    "ours, windows 256MiB": 12_866_918_912,
    "ours, windows 2GiB": 14_611_749_376,
}


def test_peaks_are_those_of_an_h100_to_the_byte() -> None:
    later = {way: peaks[1] for way, peaks in recorded()["Llama 1B"].items()}
    assert {way: later[way] for way in ON_AN_H100} == ON_AN_H100


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
