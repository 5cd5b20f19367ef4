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
import json
from dataclasses import asdict

import torch

from benchmarks.common import Report
from benchmarks.options import command_line, listed, named, parse, positive
from benchmarks.planning.cost import cost, cost_of
from benchmarks.planning.cpu import cpu, on_cpu
from benchmarks.planning.free import free
from benchmarks.planning.training import training
from benchmarks.planning.ways import ways
from benchmarks.simulate import LARGE, SEQUENCES

__all__ = ["main"]

PARTS = {"cost": cost, "training": training, "ways": ways, "free": free, "cpu": cpu}


def main(arguments: list[str] | None = None) -> int:
    options = options_of(arguments)
    torch.set_num_threads(1)
    if options.worker is not None:
        part, _, argument = options.worker.partition("=")
        found = cost_of(float(argument), options) if part == "cost" else on_cpu(float(argument), options)
        print(json.dumps(asdict(found)))
        return 0
    report = Report("planning", options)
    samples = {part: PARTS[part](options, report) for part in options.parts}
    return report.finish(samples, {limit.what: limit.measured for limit in report.limits})


def options_of(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = command_line(__doc__, layers=LARGE.layers, sequence=512, batch=4, window="32MiB", min_bytes="256KiB")
    parser.add_argument("--parts", type=named(PARTS), default=",".join(PARTS), help="with commas between")
    parser.add_argument("--tokens", type=named(SEQUENCES), default=",".join(SEQUENCES), help="of a sequence")
    parser.add_argument("--rounds", type=positive, default=3, help="processes for each budget")
    parser.add_argument("--budgets", type=positive, default=8, help="at which ways are compared")
    parser.add_argument("--steps", type=positive, default=4, help="that follow a plan")
    parser.add_argument("--shares", type=shares, default="0.25,0.5,0.75", help=SHARES)
    parser.add_argument("--cpu-layers", type=positive, default=8, help="of the model on the CPU")
    parser.add_argument("--cpu-width", type=positive, default=512)
    parser.add_argument("--cpu-heads", type=positive, default=8)
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parse(parser, arguments, layers=4, rounds=1, budgets=2, steps=1)
    if options.quick:
        options.tokens, options.shares = options.tokens[:1], options.shares[:1]
    return options


shares = listed(float, lambda one: 0 <= one <= 1, "a budget is a part of the way, from 0 to 1")
SHARES = "budgets, by the part of the way from the least one to the one for which nothing moves"
