"""Training of a small model on the simulated runtime, whose clock goes by the numbers that the planner has."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from eager_offload import Machine, Offload
from eager_offload.compile.decide import OperatorCall, flops_of, is_single, traffic_of
from eager_offload.torch_private.calls import OpOverload, TorchDispatchMode
from eager_offload.torch_private.memory import storage_key, tree_iter
from tests.simulation.checker import Checker
from tests.simulation.observer import OperatorObserver
from tests.simulation.simulated import SimulatedRuntime


class Step(NamedTuple):
    """One step: seconds of the virtual clock, and the most bytes of the device."""

    seconds: float
    peak_bytes: int
    op_seconds: Sequence[float]
    """Of every operator."""
    forward_ops: int
    """How many of them are forward's."""


class Clock(TorchDispatchMode):
    """Gives each operator the time that the planner believes in, perturbed, on a simulated runtime's compute stream.

    Args:
        jitter: an operator takes its time multiplied by a number from ``1 - jitter`` to ``1 + jitter``.
        seed: of that number.
    """

    def __init__(self, runtime: SimulatedRuntime, machine: Machine, jitter: float, seed: int) -> None:
        super().__init__()
        #: Of all operators that have run, in order.
        self.seconds: list[float] = []
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
        call = OperatorCall(func, args, named, result)
        if nbytes := traffic_of(call):
            seconds = self._machine.seconds(flops_of(call), nbytes, single=is_single(call))
            seconds *= 1 + self._random.uniform(-self._jitter, self._jitter)
            self.seconds.append(seconds)
            self._runtime.advance(self._runtime.default_stream, seconds, func._schema.name.removeprefix("aten::"))
        return result


class Stage:
    """A simulated ``machine``.

    Args:
        jitter: operators take their times multiplied by a number from ``1 - jitter`` to ``1 + jitter``.
    """

    def __init__(self, machine: Machine, jitter: float = 0.0) -> None:
        self._machine, self._jitter = machine, jitter
        self.runtime = SimulatedRuntime(
            out_bandwidth=machine.out,
            in_bandwidth=machine.back,
            launch_seconds=machine.launch_seconds,
            host_waits=machine.launch_seconds == 0,
        )
        # As on an accelerator. A host that waits polls too late for one copy to follow another at once, where the CPU's
        # own runtime has a thread for that.
        self.runtime.holds_copies_back = machine.launch_seconds > 0  # type: ignore[misc]  # of a class elsewhere
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
            forward_ops = len(clock.seconds)
            loss.backward()
            del loss
        there = {
            storage_key(one.untyped_storage()): one.untyped_storage().nbytes()
            for one in tree_iter([*model.parameters(), *model.buffers(), inputs])
            if isinstance(one, Tensor)
        }
        peak = observer.peak_resident_bytes + sum(there.values())
        self.runtime.attach(None, None)
        return Step(self.runtime.default_stream.tail - began, peak, clock.seconds, forward_ops)
