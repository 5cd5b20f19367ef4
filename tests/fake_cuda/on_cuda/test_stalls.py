"""On an accelerator a stall is what the stream that computes has waited, by its events, and not what the host has."""

from __future__ import annotations

import json

from tests.processes import printed_by


def run(program: str, **knobs: str) -> dict[str, float]:
    printed = printed_by("-m", "tests.fake_cuda.on_cuda.stalling", program, **knobs)
    return dict(json.loads(printed.splitlines()[-1]))


def test_what_the_host_waits_while_compute_has_work_is_no_stall() -> None:
    """Copies of 8 ms, and 200 ms of compute behind each save."""
    found = run("host", FAKE_CUDA_GEMM_US="200000", FAKE_CUDA_GBPS="1")
    assert found["moved"] > 32 << 20
    assert found["host"] > 4e-3
    assert found["stall"] < found["host"] / 4


def test_what_compute_waits_while_the_host_goes_on_is_counted_once_it_is_over() -> None:
    found = run("compute", FAKE_CUDA_GBPS="1")
    assert found["moved"] > 32 << 20
    assert found["host"] == 0
    assert found["stall"] > found["early"]
    assert found["stall"] > 8e-3


def test_waits_that_nobody_asks_for_hold_no_events() -> None:
    found = run("many")
    assert found["stall"] > 0
    assert found["moved"] > 100 << 20
    assert found["last"] <= found["first"] + 64
