"""How well transfers hide behind compute, on a virtual clock: 32 decoder blocks at the rates of an H200 and PCIe 5 x16.

    python -m benchmarks.simulate
    python -m benchmarks.simulate --tokens 32k --jitter 0

The library itself runs, through its own hooks, on a small model that stands for the large one (see
``simulation/large.py``). Every operator takes a time that differs by up to 30 percent from the one before. The step is
compared with its floor and with a schedule that knows all times in advance and has the same room on the device.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch

from benchmarks.common import Report, Spread, command_line, drive, named, parse, show
from eager_offload.planning.predict import floor_seconds
from tests.simulation.large import LARGE, SEQUENCES, SQUARE, WINDOW_TENSORS, Small
from tests.simulation.stage import Stage

LIMIT = 1.03


@dataclass(frozen=True)
class Step:
    """One step. Seconds, and bytes, of the large model."""

    number: int
    step_seconds: float
    forward_seconds: float
    backward_seconds: float
    floor_seconds: float
    best_seconds: float
    bytes_out: int
    bytes_in: int
    #: Bytes that left although they were asked for before their source was gone.
    wasted_bytes: int
    stall_seconds: float
    #: Most bytes of saved tensors that the library held on the device at one time.
    resident_bytes_peak: int
    #: Whether the gradients are those without offload.
    same_bits: bool

    @property
    def compute_seconds(self) -> float:
        return self.forward_seconds + self.backward_seconds

    @property
    def over_floor(self) -> float:
        return self.step_seconds / self.floor_seconds

    @property
    def over_best(self) -> float:
        return self.step_seconds / self.best_seconds


def train(small: Small, options: argparse.Namespace, link: float = 1.0, **fields: Any) -> Iterator[Step]:
    """Steps of one training, each with other operator times.

    Args:
        link: how fast the link is, in multiples of PCIe 5 x16.
        **fields: of the configuration, besides windows.
    """
    machine = small.linked(link)
    stage = Stage(machine, options.jitter)
    offload = stage.offload(**small.config, **fields)
    moving = max(0, sum(small.program.nbytes) - small.config["prefetch_bytes"])
    for number in range(1, options.steps + 1):
        offload.reset_stats()
        one, stats = stage.step(offload, small.model, small.x, small.loss), offload.stats()
        forward, backward = sum(one.op_seconds[: one.forward_ops]), sum(one.op_seconds[one.forward_ops :])
        yield Step(
            number=number,
            step_seconds=SQUARE * one.seconds,
            forward_seconds=SQUARE * forward,
            backward_seconds=SQUARE * backward,
            floor_seconds=SQUARE * floor_seconds(forward, backward, moving, machine.out, machine.back),
            best_seconds=SQUARE * small.best(one, machine, stats.resident_bytes_peak),
            bytes_out=SQUARE * stats.bytes_out,
            bytes_in=SQUARE * stats.bytes_in,
            wasted_bytes=SQUARE * stats.forwarded_bytes,
            stall_seconds=SQUARE * one.stall_seconds,
            resident_bytes_peak=SQUARE * stats.resident_bytes_peak,
            same_bits=small.has_same_bits(),
        )
    offload.close()


def run(report: Report, options: argparse.Namespace) -> tuple[object, object]:
    torch.set_num_threads(1)
    found: dict[str, list[Step]] = {}
    summary: dict[str, dict[str, Any]] = {}
    for name in options.tokens:
        small = Small(SEQUENCES[name], options.layers, options.window_tensors)
        steps = list(train(small, options))
        learnt = steps[1:] or steps
        found[name], over_floor = steps, Spread.of(step.over_floor for step in learnt)
        report.at_most(f"{name}: step over floor", over_floor.median, LIMIT)
        report.at_least(f"{name}: same bits", min(step.same_bits for step in steps), 1)
        summary[name] = {
            "window_bytes": SQUARE * small.config["prefetch_bytes"],
            "largest_saved_bytes": SQUARE * max(small.program.nbytes),
            "saved_bytes": SQUARE * sum(small.program.nbytes),
            "compute s": median(step.compute_seconds for step in learnt),
            "floor s": median(step.floor_seconds for step in learnt),
            "step s": median(step.step_seconds for step in learnt),
            "step over floor": over_floor,
            "first step": steps[0].over_floor,
            "step over best": Spread.of(step.over_best for step in learnt),
        }
    rows = ({"tokens": name, **figures} for name, figures in summary.items())
    show("Medians of all steps but the first; times of the virtual clock", rows)
    return found, summary


def options_of(doc: str | None = __doc__, **more: Any) -> argparse.Namespace:
    """What all simulations of the large model take."""
    parser = command_line(doc, layers=LARGE.layers, steps=5, jitter=0.3, window_tensors=float(WINDOW_TENSORS), **more)
    parser.add_argument("--tokens", type=named(SEQUENCES), default=",".join(SEQUENCES))
    return parse(parser, steps=2, layers=4)


if __name__ == "__main__":
    sys.exit(drive("simulate", options_of(), run))
