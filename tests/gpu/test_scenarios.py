"""The scenarios on the accelerator of this machine; and, so that they themselves are right, on the recording double."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import pytest
import torch

from eager_offload import Offload
from tests.doubles.training_accelerator import TrainingAccelerator
from tests.gpu.codec_scenarios import CODEC_SCENARIOS
from tests.gpu.graph_scenarios import GRAPH_SCENARIOS
from tests.gpu.machine import DeviceMachine, Machine, Skipped
from tests.gpu.scenarios import SCENARIOS, Scenario
from tests.gpu.step_scenarios import STEP_SCENARIOS
from tests.simulation.checker import Checker

ON_THE_DOUBLE = [
    *(scenario for scenario in SCENARIOS if "two_devices" not in scenario.__name__),
    *(scenario for scenario in CODEC_SCENARIOS if "streams" in scenario.__name__ or "verdict" in scenario.__name__),
]


class DoubleMachine(Machine):
    """The recording double, under the checker."""

    width = 16

    def __init__(self, double: TrainingAccelerator) -> None:
        super().__init__(double.runtime, torch.device("cpu"))
        self.double = double

    def side_stream(self) -> torch.Stream:
        return self.double.side_stream()

    def watching(self) -> AbstractContextManager[object]:
        return self.double.watching()

    def backward_of(self, stream: torch.Stream) -> AbstractContextManager[None]:
        return self.computing_on(stream)  # on a CPU autograd stays on the stream that backward is called on

    def doze(self) -> None:
        """Nothing: whatever need not run is late."""

    def finish(self) -> None:
        home = self.current
        for key in [key for key in self.double._queues if key.stream_id != home.stream_id]:
            self.runtime.synchronize(self.runtime.record(self.double._stream(key)))
        self.runtime.synchronize(self.runtime.record(home))

    def allocated_bytes(self) -> int | None:
        return None

    def _make(self, fields: dict[str, Any]) -> Offload:
        return Offload(runtime=self.runtime, **fields)


@contextmanager
def on_the_double() -> Iterator[tuple[DoubleMachine, Checker]]:
    double = TrainingAccelerator()
    with double.checked() as checker:
        machine = DoubleMachine(double)
        yield machine, checker
        machine.close()


def run(scenario: Scenario, machine: Machine) -> None:
    try:
        scenario(machine)
    except Skipped as reason:
        pytest.skip(str(reason))


def run_on_the_device(scenario: Scenario) -> None:
    machine = DeviceMachine()
    try:
        run(scenario, machine)
    finally:
        machine.finish()
        machine.close()


@pytest.mark.parametrize("scenario", ON_THE_DOUBLE)
def test_on_the_double(scenario: Scenario) -> None:
    with on_the_double() as (machine, checker):
        run(scenario, machine)
    if "h01" not in scenario.__name__:  # there the program writes over what is being copied, which is the point
        checker.assert_clean()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.accelerator.is_available(), reason="torch finds no accelerator on this machine")
@pytest.mark.parametrize("scenario", [*SCENARIOS, *CODEC_SCENARIOS, *GRAPH_SCENARIOS, *STEP_SCENARIOS])
def test_on_the_device(scenario: Scenario) -> None:
    run_on_the_device(scenario)
