"""Whether a plan is quick, right and good: what it costs, what it predicts, and what other ways come to.

python -m benchmarks.planning
python -m benchmarks.planning --parts ways --tokens 32k

cost       seconds and memory to plan a large model on meta
training   peak and step of a plan against training that follows it on the simulated runtime, with operator times
           and links other than the plan believes, and against the schedule that knows all times, in the same room
ways       plans against fixed ways: nothing moves, all does, every second storage; checkpoints around all blocks
free       what the link hides of a Llama with 8 billion parameters, against a formula
cpu        the predicted peak and step against resident bytes and seconds of training on a CPU with the disk tier, for
           plans from two real steps
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator

import torch

from benchmarks.common import Report, command_line, drive, listed, named, parse
from benchmarks.planning.cost import Cost, cost, cost_of
from benchmarks.planning.cpu import OnCpu, cpu, on_cpu
from benchmarks.planning.free import free
from benchmarks.planning.training import training
from benchmarks.planning.ways import ways
from tests.simulation.large import LARGE, SEQUENCES

SHARES = "budgets, by the part of the way from the least one to the one for which nothing moves"
PARTS = {"cost": cost, "training": training, "ways": ways, "free": free, "cpu": cpu}


def work(name: str, options: argparse.Namespace) -> Iterator[Cost | OnCpu]:
    part, _, argument = name.partition("=")
    yield cost_of(float(argument), options) if part == "cost" else on_cpu(float(argument), options)


def run(report: Report, options: argparse.Namespace) -> tuple[object, object]:
    samples = {part: PARTS[part](options, report) for part in options.parts}
    return samples, {limit.what: limit.measured for limit in report.limits}


def options_of() -> argparse.Namespace:
    # Rounds are processes for each budget, budgets those at which ways are compared, and steps follow a plan.
    several = {"rounds": 3, "budgets": 8, "steps": 4, "cpu_layers": 8, "cpu_width": 512, "cpu_heads": 8}
    model = {"layers": LARGE.layers, "sequence": 512, "batch": 4, "window": "32MiB", "min_bytes": "256KiB"}
    parser = command_line(__doc__, workers=True, **several, **model)
    parser.add_argument("--parts", type=named(PARTS), default=",".join(PARTS), help="with commas between")
    parser.add_argument("--tokens", type=named(SEQUENCES), default=",".join(SEQUENCES), help="of a sequence")
    shares = listed(float, lambda one: 0 <= one <= 1)
    parser.add_argument("--shares", type=shares, default="0.25,0.5,0.75", help=SHARES)
    options = parse(parser, layers=4, rounds=1, budgets=2, steps=1)
    if options.quick:
        options.tokens, options.shares = options.tokens[:1], options.shares[:1]
    return options


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.exit(drive("planning", options_of(), run, work=work))
