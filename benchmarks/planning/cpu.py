"""Training on a CPU that follows plans: resident bytes and seconds beside what was predicted."""

from __future__ import annotations

import argparse
import gc
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import torch
from torch import Tensor

import eager_offload as eo
from benchmarks.common import Report, in_process, show
from benchmarks.training import release_or_refuse, reset_peak, status_bytes, text, tiny_text, windows

from lm.model import LanguageModel

#: Goals.
CPU_PEAK, CPU_STEP = 0.05, 0.10


@dataclass(frozen=True)
class OnCpu:
    """Steps that follow a plan, in a process of their own. Bytes over parameters and loaded code."""

    part: float
    predicted_bytes: int
    real_bytes: int
    #: Forward and backward; the median of the steps.
    predicted_seconds: float
    real_seconds: float
    moved_bytes: int
    bytes_out: int
    followed: int
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
    plain = eo.plan(model, inputs, device_budget=1 << 50, config=config)
    budget = plain.least_budget + int((plain.peak_bytes - plain.least_budget) * part)
    plan = eo.plan(model, inputs, steps=2, device_budget=budget, config=config)
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
    return OnCpu(part, predicted, real, plan.step_seconds, seconds, moved, bytes_out, stats.followed_forwards, method)


def cpu(options: argparse.Namespace, report: Report) -> list[OnCpu]:
    parts = [f"cpu={part}" for part in options.shares for _ in range(options.rounds)]
    found = [OnCpu(**one) for part in parts for one in in_process("planning", part)]
    show("Training on this CPU with the disk tier, following plans: bytes over the model", found)
    # A budget's plans differ between rounds, since measured times decide: each run is compared with its own.
    report.at_most("cpu: peak off", _off(found, lambda one: one.real_bytes / one.predicted_bytes), CPU_PEAK)
    report.at_most("cpu: step off", _off(found, lambda one: one.real_seconds / one.predicted_seconds), CPU_STEP)
    report.at_least("cpu: steps that follow", min(one.followed for one in found), options.steps)
    return found


def _off(found: Sequence[OnCpu], ratio: Callable[[OnCpu], float]) -> float:
    """By how much the median of what was measured, of what was predicted, is off; of the worst budget."""
    parts = {one.part for one in found}
    return max(abs(median(ratio(one) for one in found if one.part == part) - 1) for part in parts)
