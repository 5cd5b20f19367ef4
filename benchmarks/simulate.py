"""How well transfers hide behind compute, on a virtual clock: 32 decoder blocks at the rates of an H200 and PCIe 5 x16.

    python -m benchmarks.simulate
    python -m benchmarks.simulate --tokens 32k --jitter 0

The library itself runs, through its own hooks, on a small model that stands for the large one (see
``simulation/device.py``). Every operator takes a time that differs by up to 30 percent from the one before. The step is
compared with its floor and with a schedule that knows all times in advance and has the same room on the device.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import torch

import eager_offload as eo
from benchmarks.common import Report, Spread, command_line, drive, named, parse, show
from benchmarks.models import Shape, Stack
from benchmarks.simulation.device import H200, Op, OperatorClock, Scale
from benchmarks.simulation.oracle import Program, best_step, watch
from benchmarks.training import hash_gradients
from eager_offload.config import parse_size
from eager_offload.plan.predict import floor_seconds
from eager_offload.simulation.simulated import SimulatedRuntime
from eager_offload.simulation.timeline import Timeline

#: What is simulated, and the tokens of the small model that stands for any of them.
LARGE = Shape(layers=32, width=4096, hidden=11008, heads=32)
SMALL_WIDTH, SMALL_TOKENS = 64, 128
LIMIT = 1.03
SEQUENCES = {"8k": 8 << 10, "32k": 32 << 10, "128k": 128 << 10}


@dataclass(frozen=True)
class Step:
    """One step. Seconds, and bytes of the large model."""

    number: int
    step_seconds: float
    forward_seconds: float
    backward_seconds: float
    floor_seconds: float
    best_seconds: float
    bytes_out: float
    bytes_in: float
    #: Bytes that left although they were asked for before their source was gone.
    wasted_bytes: float
    stall_seconds: float
    host_wait_seconds: float
    #: Most bytes of saved tensors that the library held on the device at one time.
    resident_bytes_peak: float
    gradients_hash: str

    @property
    def over_floor(self) -> float:
        return self.step_seconds / self.floor_seconds

    @property
    def over_best(self) -> float:
        return self.step_seconds / self.best_seconds


class Simulation:
    """One sequence length: the small model, its scale, and the program of a step.

    Args:
        tokens: of the large model's one sequence.
        options: the command line.
        link: how fast the link is, in multiples of PCIe 5 x16.
    """

    def __init__(self, tokens: int, options: argparse.Namespace, link: float = 1.0) -> None:
        self.tokens = tokens
        self.options = options
        self.machine = replace(H200, launch_seconds=options.launch_seconds, out=H200.out * link, back=H200.back * link)
        self.scale = Scale(tokens / SMALL_TOKENS, LARGE.width / SMALL_WIDTH)
        small = Shape(options.layers, SMALL_WIDTH, round(LARGE.hidden / self.scale.width), 1)
        self.model = Stack(small)
        self.data = torch.randn(SMALL_TOKENS, SMALL_WIDTH, generator=torch.Generator().manual_seed(1)).bfloat16()
        self.min_bytes = self.small(parse_size(options.min_bytes))
        self.program, self.forward_ops, self.expected_hash = self._look()
        largest = max(self.program.nbytes)
        self.window = int(window_of(options, largest, self.scale.nbytes))

    def small(self, nbytes: float) -> int:
        """Bytes of the tensors at hand that stand for ``nbytes``."""
        return int(nbytes / self.scale.nbytes)

    def large(self, nbytes: float) -> float:
        """Bytes that ``nbytes`` at hand stand for."""
        return nbytes * self.scale.nbytes

    def run(self, **fields: Any) -> Iterator[Step]:
        """Steps of one training, each with other operator times.

        Args:
            **fields: of the config, in place of those of the command line.
        """
        runtime = self._runtime()
        fields = {"keep_last_bytes": self.window if self.options.fixed else "auto", **fields}
        offload = eo.Offload(
            runtime=runtime,
            tier="host",
            min_bytes=self.min_bytes,
            max_inflight_bytes=self.window,
            prefetch_bytes=self.window,
            **fields,
        )
        for number in range(1, self.options.steps + 1):
            yield self._step(number, runtime, offload)
        offload.close()

    def _runtime(self) -> SimulatedRuntime:
        small = self._small_machine()
        return SimulatedRuntime(out_bandwidth=small.out, in_bandwidth=small.back, launch_seconds=small.launch_seconds)

    def _clock(self, runtime: SimulatedRuntime, seed: int) -> OperatorClock:
        return OperatorClock(runtime, self.machine, self.scale, self.options.jitter, seed)

    def _look(self) -> tuple[Program, int, str]:
        """What a step saves and asks for, how many operators its forward has, and what its gradients are."""
        clock = self._clock(self._runtime(), 0)
        with clock, watch(clock.ops, self.min_bytes) as program:
            forward_ops = self._train(clock.ops, None)
        return program, forward_ops, hash_gradients(self.model)

    def _train(self, ops: list[Op], offload: eo.Offload | None) -> int:
        """Forward and backward; returns how many operators forward has."""
        self.model.zero_grad(set_to_none=True)
        with offload or nullcontext():
            out = self.model(self.data)
        forward_ops = len(ops)
        out.backward(torch.ones_like(out))
        return forward_ops

    def _step(self, number: int, runtime: SimulatedRuntime, offload: eo.Offload) -> Step:
        runtime.synchronize_all()
        runtime.timeline = Timeline()
        offload.reset_stats()
        begun = runtime.now
        clock = self._clock(runtime, seed=1000 * number + self.options.seed)
        with clock:
            forward_ops = self._train(clock.ops, offload)
        seconds = [op.seconds for op in clock.ops]
        forward, backward = sum(seconds[:forward_ops]), sum(seconds[forward_ops:])
        moving = max(0.0, self.large(self.program.total_bytes - self.window))
        stats = offload.stats()
        return Step(
            number=number,
            step_seconds=runtime.default_stream.tail - begun,
            forward_seconds=forward,
            backward_seconds=backward,
            floor_seconds=floor_seconds(forward, backward, moving, self.machine.out, self.machine.back),
            best_seconds=best_step(
                self.program, seconds, forward_ops, self._small_machine(), stats.resident_bytes_peak
            ),
            bytes_out=self.large(stats.bytes_out),
            bytes_in=self.large(stats.bytes_in),
            wasted_bytes=self.large(stats.forwarded_bytes),
            stall_seconds=runtime.timeline.stall_seconds,
            host_wait_seconds=runtime.timeline.host_wait_seconds,
            resident_bytes_peak=self.large(stats.resident_bytes_peak),
            gradients_hash=hash_gradients(self.model),
        )

    def _small_machine(self) -> eo.Machine:
        """One whose link takes as long for the tensors at hand as the large one's for those that they stand for."""
        out, back = self.machine.out / self.scale.nbytes, self.machine.back / self.scale.nbytes
        return replace(self.machine, out=out, back=back)


def run(report: Report, options: argparse.Namespace) -> tuple[object, object]:
    torch.set_num_threads(1)
    found: dict[str, list[Step]] = {}
    summary: dict[str, dict[str, Any]] = {}
    for name in options.tokens:
        simulation = Simulation(SEQUENCES[name], options)
        expected, steps = simulation.expected_hash, list(simulation.run())
        learnt = steps[1:] or steps
        found[name], over_floor = steps, Spread.of(step.over_floor for step in learnt)
        report.at_most(f"{name}: step over floor", over_floor.median, LIMIT)
        report.at_most(f"{name}: different gradients", len({expected, *(step.gradients_hash for step in steps)}), 1)
        summary[name] = {
            "window_bytes": simulation.large(simulation.window),
            "largest_saved_bytes": simulation.large(max(simulation.program.nbytes)),
            "saved_bytes": simulation.large(simulation.program.total_bytes),
            "compute s": median(step.forward_seconds + step.backward_seconds for step in learnt),
            "floor s": median(step.floor_seconds for step in learnt),
            "step s": median(step.step_seconds for step in learnt),
            "step over floor": over_floor,
            "first step": steps[0].over_floor,
            "step over best": Spread.of(step.over_best for step in learnt),
        }
    rows = ({"tokens": name, **figures} for name, figures in summary.items())
    show("Medians of all steps but the first; times of the virtual clock", rows)
    return found, summary


def window_of(options: argparse.Namespace, largest: float, scale: float = 1.0) -> float:
    """Both windows, in bytes of tensors that are smaller than the model's by ``scale``."""
    return options.window_tensors * largest if options.window is None else parse_size(options.window) / scale


def parser_of(doc: str | None, **more: Any) -> argparse.ArgumentParser:
    """What all simulations of the large model take."""
    parser = command_line(doc, layers=LARGE.layers, steps=5, jitter=0.3, window_tensors=5.0, **more)
    parser.add_argument("--tokens", type=named(SEQUENCES), default=",".join(SEQUENCES))
    parser.add_argument("--seed", type=int, default=0, help="of the jitter")
    parser.add_argument("--window", help="both windows, in bytes in place of largest saved tensors")
    return parser


def options_of(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = parser_of(__doc__, min_bytes="1MiB", launch_seconds=5e-6)
    parser.add_argument("--fixed", action="store_true", help="keep_last_bytes is a window too, and nothing is learnt")
    return parse(parser, arguments, steps=2, layers=4)


if __name__ == "__main__":
    sys.exit(drive("simulate", options_of(), run))
