"""Training of small models on the simulated runtime, whose clock goes by the numbers that the planner has."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from eager_offload import Machine, Offload
from eager_offload._torch import OpOverload, TorchDispatchMode
from eager_offload.compile.cost import Call, flops_of, is_single, traffic_of
from eager_offload.simulation.checker import Checker
from eager_offload.simulation.observer import Observer
from eager_offload.simulation.simulated import SimulatedRuntime
from tests.plan.test_peaks import storages

__all__ = ["Stage", "Step", "gradients"]


class Step(NamedTuple):
    """One step: seconds of the virtual clock, and the most bytes of the device."""

    seconds: float
    peak_bytes: int


class OperatorClock(TorchDispatchMode):
    """Each operator of the model takes as long as the planner believes, times a random number."""

    def __init__(self, runtime: SimulatedRuntime, machine: Machine, jitter: float, seed: int) -> None:
        super().__init__()
        self._runtime, self._machine, self._jitter = runtime, machine, jitter
        self._random = random.Random(seed)

    def __torch_dispatch__(
        self,
        func: OpOverload[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        named = dict(kwargs or {})
        result = func(*args, **named)
        call = Call(func, args, named, result)
        if nbytes := traffic_of(call):
            seconds = self._machine.seconds(flops_of(call), nbytes, single=is_single(call))
            seconds *= 1 + self._random.uniform(-self._jitter, self._jitter)
            self._runtime.advance(self._runtime.default_stream, seconds, str(func))
        return result


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
        observer = Observer(self.runtime, Checker(), torch.device("cpu"))
        self.runtime.attach(None, observer)
        began = self.runtime.default_stream.tail
        with observer, OperatorClock(self.runtime, self._machine, self._jitter, self._steps):
            with offload:
                loss = loss_of()
            loss.backward()
            del loss
        there = storages([*model.parameters(), *model.buffers(), inputs])
        peak = observer.peak_resident_bytes + sum(storage.nbytes() for storage in there.values())
        self.runtime.attach(None, None)
        return Step(self.runtime.default_stream.tail - began, peak)


def gradients(model: nn.Module, loss_of: Callable[[], Tensor], around: Any = None) -> list[Tensor]:
    """Of all parameters, and the loss; ``around``: the forward."""
    model.zero_grad(set_to_none=True)
    with around or nullcontext():
        loss = loss_of()
    loss.backward()
    return [loss.detach(), *(one.grad for one in model.parameters() if one.grad is not None)]
