"""The bandwidth that passes over graphs take a link to have."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import eager_offload as eo
from eager_offload.compile.decide import bandwidth_of
from eager_offload.planning.machine import UNKNOWN_BANDWIDTH
from eager_offload.runtime.base import Direction
from tests.simulation.simulated import SimulatedRuntime

CPU = torch.device("cpu")


def test_the_bandwidth_is_that_of_the_offload_that_is_active() -> None:
    runtime = SimulatedRuntime(out_bandwidth=7.0, in_bandwidth=9.0)
    offload = eo.Offload(runtime=runtime, tier="host")
    with offload:
        assert bandwidth_of(CPU, Direction.OUT, offload.config_key) == 7.0
        assert bandwidth_of(CPU, Direction.IN, offload.config_key) == 9.0
    offload.close()


def test_a_disk_is_measured_while_a_compiler_traces_and_counted_nowhere(tmp_path: Path) -> None:
    offload = eo.Offload(tier="disk", disk_path=tmp_path, min_bytes=5)
    with FakeTensorMode(), offload:
        assert bandwidth_of(CPU, Direction.OUT, offload.config_key) != UNKNOWN_BANDWIDTH
        back = bandwidth_of(CPU, Direction.IN, offload.config_key)
        assert back == bandwidth_of(CPU, Direction.IN, offload.config_key) > 1e4
    assert offload.stats().disk_bytes_peak == 0
    offload.close()


@pytest.mark.parametrize("direction", list(Direction))
def test_a_link_that_cannot_be_measured_has_a_bandwidth_all_the_same(
    direction: Direction, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*arguments: object) -> float:
        raise torch.OutOfMemoryError("no room")

    runtime = SimulatedRuntime()
    monkeypatch.setattr(runtime, "measure_link", full)
    offload = eo.Offload(runtime=runtime, tier="host", min_bytes=3)
    with offload:
        assert bandwidth_of(CPU, direction, offload.config_key) > 0
        assert bandwidth_of(torch.device("meta"), direction, "") > 0, "nothing serves it"
    offload.close()
