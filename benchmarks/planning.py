"""What a plan costs, and whether training on a CPU comes to what it predicts.

    python -m benchmarks.planning
    python -m benchmarks.planning --parts cost

``cost`` plans a large model on meta in processes of their own: seconds of the processor, since one thread does it all,
and resident bytes. ``cpu`` trains with the disk tier and the settings of plans: the predicted peak
and step beside resident bytes and seconds.
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import torch
from torch import Tensor

import eager_offload as eo
from benchmarks.common import Report, command_line, drive, in_process, listed, named, parse, show
from benchmarks.models import Shape, Stack
from benchmarks.training import release_or_refuse, reset_peak, status_bytes, text, tiny_text, windows

from lm.model import LanguageModel

#: Goals: seconds and bytes of a plan; by how much peak and step of training are off what was predicted.
PLAN_SECONDS, PLAN_BYTES = 4.0, 300 << 20
CPU_PEAK, CPU_STEP = 0.05, 0.10
#: Of the model that is planned.
TOKENS, WIDTH, HIDDEN, HEADS = 32 << 10, 4096, 11_008, 32
SHARES = "budgets, by the part of the way from the least one to the one for which nothing moves"


@dataclass(frozen=True)
class Cost:
    """One plan, in a process of its own. Bytes and seconds."""

    budget: int
    #: Of all threads.
    cpu_seconds: float
    #: The most that was ever resident, over what was before.
    above_bytes: int
    peak_method: str


def cost_of(share: float, options: argparse.Namespace) -> Cost:
    """Plans in this process, for a part of the bytes that a step takes."""
    with torch.device("meta"):
        model = Stack(Shape(options.layers, WIDTH, HIDDEN, HEADS))
        x = torch.empty(TOKENS, WIDTH, dtype=torch.bfloat16)
    budget = sum(one.nbytes for one in model.parameters()) * 2
    budget += int(share * options.layers * TOKENS * 2 * (8 * WIDTH + 4 * HIDDEN))
    gc.collect()
    method, base = reset_peak(), status_bytes("VmRSS")
    began = time.process_time()
    eo.plan(model, x, loss=torch.sum, optimizer=None, device="h200", device_budget=budget)
    cpu_seconds = time.process_time() - began
    return Cost(budget, cpu_seconds, status_bytes("VmHWM") - base, method)


def cost(options: argparse.Namespace, report: Report) -> list[Cost]:
    shares = [f"cost={share}" for share in options.shares for _ in range(options.rounds)]
    found = [Cost(**one) for share in shares for one in in_process("planning", share)]
    show(f"A plan of {options.layers} blocks, {TOKENS >> 10}k tokens, on meta", found)
    taken = [
        median(one.cpu_seconds for one in found if one.budget == budget) for budget in {one.budget for one in found}
    ]
    report.at_most("cost: seconds of the processor", max(taken), PLAN_SECONDS)
    report.at_most("cost: bytes", max(one.above_bytes for one in found), PLAN_BYTES)
    return found


@dataclass(frozen=True)
class OnCpu:
    """Steps with the settings of a plan, in a process of their own. Bytes over parameters and loaded code."""

    part: float
    predicted_bytes: int
    real_bytes: int
    #: Forward and backward; the median of the steps.
    predicted_seconds: float
    real_seconds: float
    moved_bytes: int
    bytes_out: int
    peak_method: str


def on_cpu(part: float, options: argparse.Namespace) -> OnCpu:
    """Trains in this process."""
    release_or_refuse()
    torch.manual_seed(0)
    model = LanguageModel(
        options.cpu_layers, options.cpu_width, options.cpu_heads, options.sequence, checkpointing=False
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = text(options, options.steps)
    inputs = data[0].inputs, data[0].targets
    config = windows(options)
    plain = eo.plan(model, inputs, optimizer=None, device_budget=1 << 50, config=config)
    budget = plain.least_budget + int((plain.peak_bytes - plain.least_budget) * part)
    plan = eo.plan(model, inputs, optimizer=None, device_budget=budget, config=config)
    there = sum(one.nbytes for one in [*model.parameters(), *inputs])
    predicted, moved = plan.peak_bytes - there, plan.moved_bytes
    with TemporaryDirectory(dir=options.disk_path) as directory:
        offload = eo.Offload(plan=plan, tier="disk", disk_path=Path(directory))

        def step(inputs: Tensor, targets: Tensor, offload: eo.Offload | None) -> float:
            optimizer.zero_grad(set_to_none=True)
            began = time.perf_counter()
            with offload or nullcontext():
                loss = model(inputs, targets)
            loss.backward()
            seconds = time.perf_counter() - began
            optimizer.step()
            return seconds

        (tiny,) = tiny_text()
        step(tiny.inputs, tiny.targets, None)  # loads code
        optimizer.zero_grad(set_to_none=True)
        gc.collect()
        method, base = reset_peak(), status_bytes("VmRSS")
        seconds = median([step(batch.inputs, batch.targets, offload) for batch in data])
        real = status_bytes("VmHWM") - base
        stats = offload.stats(synchronize=True)
        offload.close()
    bytes_out = stats.bytes_out // options.steps
    return OnCpu(part, predicted, real, plan.step_seconds, seconds, moved, bytes_out, method)


def cpu(options: argparse.Namespace, report: Report) -> list[OnCpu]:
    parts = [f"cpu={part}" for part in options.shares for _ in range(options.rounds)]
    found = [OnCpu(**one) for part in parts for one in in_process("planning", part)]
    show("Training on this CPU with the disk tier, by plans: bytes over the model", found)
    # A budget's plans differ between rounds, since measured times decide: each run is compared with its own.
    report.at_most("cpu: peak off", _off(found, lambda one: one.real_bytes / one.predicted_bytes), CPU_PEAK)
    report.at_most("cpu: step off", _off(found, lambda one: one.real_seconds / one.predicted_seconds), CPU_STEP)
    return found


def _off(found: Sequence[OnCpu], ratio: Callable[[OnCpu], float]) -> float:
    """By how much the median of what was measured, of what was predicted, is off; of the worst budget."""
    parts = {one.part for one in found}
    return max(abs(median(ratio(one) for one in found if one.part == part) - 1) for part in parts)


PARTS = {"cost": cost, "cpu": cpu}


def work(name: str, options: argparse.Namespace) -> Iterator[Cost | OnCpu]:
    part, _, argument = name.partition("=")
    yield (cost_of if part == "cost" else on_cpu)(float(argument), options)


def run(report: Report, options: argparse.Namespace) -> tuple[object, object]:
    samples = {part: PARTS[part](options, report) for part in options.parts}
    return samples, {limit.what: limit.measured for limit in report.limits}


def options_of() -> argparse.Namespace:
    # Rounds are processes for each budget, and steps are trained in each.
    several = {"rounds": 3, "steps": 4, "cpu_layers": 8, "cpu_width": 512, "cpu_heads": 8}
    model = {"layers": 32, "sequence": 512, "batch": 4, "window": "32MiB", "min_bytes": "256KiB"}
    parser = command_line(__doc__, workers=True, **several, **model)
    parser.add_argument("--parts", type=named(PARTS), default=",".join(PARTS), help="with commas between")
    shares = listed(float, lambda one: 0 <= one <= 1)
    parser.add_argument("--shares", type=shares, default="0.25,0.5,0.75", help=SHARES)
    options = parse(parser, layers=4, rounds=1, steps=1)
    if options.quick:
        options.shares = options.shares[:1]
    return options


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.exit(drive("planning", options_of(), run, work=work))
