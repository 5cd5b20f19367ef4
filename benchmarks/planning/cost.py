"""What planning costs."""

from __future__ import annotations

import argparse
import gc
import time
from dataclasses import dataclass, replace
from statistics import median

import torch

import eager_offload as eo
from benchmarks.common import GIB, Report, in_process, show
from benchmarks.training import reset_peak, status_bytes
from tests.simulation.large import H200, LARGE, SEQUENCES, large

#: Goals.
PLAN_SECONDS, PLAN_BYTES = 10.0, GIB


@dataclass(frozen=True)
class Cost:
    """One plan, in a process of its own. Bytes and seconds."""

    budget: int
    seconds: float
    #: Of all threads.
    cpu_seconds: float
    #: The most that was ever resident, over what was before.
    above_bytes: int
    peak_method: str


def cost_of(share: float, options: argparse.Namespace) -> Cost:
    """Plans in this process, for a part of the bytes that a step takes."""
    tokens = SEQUENCES["32k"]
    model, x = large(replace(LARGE, layers=options.layers), tokens)
    budget = sum(one.nbytes for one in model.parameters()) * 2
    budget += int(share * options.layers * tokens * 2 * (8 * LARGE.width + 4 * LARGE.hidden))
    gc.collect()
    method, base = reset_peak(), status_bytes("VmRSS")
    began, cpu_began = time.perf_counter(), time.process_time()
    eo.plan(model, x, loss=torch.sum, device=H200, device_budget=budget)
    seconds, cpu_seconds = time.perf_counter() - began, time.process_time() - cpu_began
    return Cost(budget, seconds, cpu_seconds, status_bytes("VmHWM") - base, method)


def cost(options: argparse.Namespace, report: Report) -> list[Cost]:
    shares = [f"cost={share}" for share in options.shares for _ in range(options.rounds)]
    found = [Cost(**one) for share in shares for one in in_process("planning", share)]
    show(f"A plan of {options.layers} blocks, 32k tokens, on meta", found)
    # One thread does it all; what else runs on the machine has no part in that.
    taken = [
        median(one.cpu_seconds for one in found if one.budget == budget) for budget in {one.budget for one in found}
    ]
    report.at_most("cost: seconds of the processor", max(taken), PLAN_SECONDS)
    report.at_most("cost: bytes", max(one.above_bytes for one in found), PLAN_BYTES)
    return found
