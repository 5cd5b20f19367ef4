"""Training of a small model on the simulated runtime, whose clock goes by the numbers that the planner has."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from benchmarks.simulation.device import Clock
from eager_offload import Machine, Offload
from eager_offload._torch import storage_key, tree_iter
from eager_offload.simulation.checker import Checker
from eager_offload.simulation.observer import OperatorObserver
from eager_offload.simulation.simulated import SimulatedRuntime

__all__ = ["Stage", "Step"]


class Step(NamedTuple):
    """One step: seconds of the virtual clock, and the most bytes of the device."""

    seconds: float
    peak_bytes: int
    op_seconds: Sequence[float]
    """Of every operator."""
    forward_ops: int
    """How many of them are forward's."""


class Stage:
    """A simulated ``machine``.

    Args:
        jitter: operators take their times multiplied by a number from ``1 - jitter`` to ``1 + jitter``.
        link: by how much faster its links are.
    """

    def __init__(self, machine: Machine, jitter: float = 0.0, link: float = 1.0) -> None:
        self._machine, self._jitter = machine, jitter
        self.runtime = SimulatedRuntime(
            out_bandwidth=machine.out * link,
            in_bandwidth=machine.back * link,
            launch_seconds=machine.launch_seconds,
            host_waits=machine.launch_seconds == 0,
        )
        self._steps = 0

    def offload(self, **fields: Any) -> Offload:
        return Offload(runtime=self.runtime, tier="host", **fields)

    def step(self, offload: Offload, model: nn.Module, inputs: object, loss_of: Callable[[], Tensor]) -> Step:
        """Forward and backward."""
        model.zero_grad(set_to_none=True)
        self.runtime.synchronize_all()
        self._steps += 1
        observer = OperatorObserver(self.runtime, Checker(), torch.device("cpu"))
        self.runtime.attach(None, observer)
        began = self.runtime.default_stream.tail
        with observer, Clock(self.runtime, self._machine, self._jitter, self._steps) as clock:
            with offload:
                loss = loss_of()
            forward_ops = len(clock.ops)
            loss.backward()
            del loss
        there = _storages([*model.parameters(), *model.buffers(), inputs])
        peak = observer.peak_resident_bytes + sum(storage.nbytes() for storage in there.values())
        self.runtime.attach(None, None)
        return Step(self.runtime.default_stream.tail - began, peak, [op.seconds for op in clock.ops], forward_ops)


def _storages(values: object) -> dict[int, torch.UntypedStorage]:
    found = (one.untyped_storage() for one in tree_iter(values) if isinstance(one, Tensor))
    return {storage_key(storage): storage for storage in found}
