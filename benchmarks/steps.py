"""Whether anything grows over a thousand steps: events, handles, slots, threads, files, memory.

    python -m benchmarks.steps
    python -m benchmarks.steps --steps 10000 --tiers disk

A small model trains with windows small enough to be full all the time. After every tenth of the steps the library's
objects are counted, with the garbage collector switched off: nothing may wait for it.
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
import warnings
from collections import Counter
from dataclasses import dataclass
from statistics import linear_regression

import torch

import eager_offload as eo
from benchmarks.common import MIB, Report, command_line, drive, listed, parse, show
from benchmarks.training import language_model, text, windows
from eager_offload.runtime.host import host_runtime
from eager_offload.tiers.base import release_idle_slots
from eager_offload.tiers.disk import DiskTier
from eager_offload.tiers.host import HostTier
from tools.soak.census import counted

#: Bytes that the process may grow by from the first sample to the last, in the straight line through all samples.
MOST_GROWTH = 4 << 20
#: Types of the library by what they are counted as.
TYPES = {
    "events": ("HostEvent",),
    "handles": ("SavedStorage", "SavedView", "KeptTensor", "Transfer"),
    "slots": ("HostSlot", "DiskSlot"),
}


@dataclass(frozen=True)
class Sample:
    """What there is after so many steps, once transfers are over."""

    step: int
    seconds: float
    #: Objects of the library: alive, wherever they are.
    events: int
    handles: int
    slots: int
    threads: int
    descriptors: int
    #: All objects that Python's collector follows.
    objects: int
    #: Bytes: of slots, of the tier's slabs or file, of the arena for reloads, and of the process.
    used_bytes: int
    held_bytes: int
    arena_bytes: int
    resident_bytes: int


#: What has to be the same in every sample.
CONSTANT = ("events", "handles", "slots", "threads", "descriptors", "used_bytes", "held_bytes", "arena_bytes")


def sample(step: int, began: float, offload: eo.Offload) -> Sample:
    offload.stats(synchronize=True)
    release_idle_slots()  # of the step plan that is followed, ready for the next step
    (offloader,) = offload._offloaders.all()
    (tier,) = offloader.tiers
    assert isinstance(tier, HostTier | DiskTier)
    _ = tier.used_bytes  # what dead slots leave behind is taken up at the next call, which is this one
    found, kinds = counted(), Counter[str]()
    for what, number in found.items():
        kinds[what.rpartition(".")[2] if what.startswith("objects: eager_offload.") else ""] += number
    return Sample(
        step=step,
        seconds=time.perf_counter() - began,
        **{what: sum(kinds[name] for name in names) for what, names in TYPES.items()},
        threads=found["threads"],
        descriptors=found["descriptors"],
        objects=len(gc.get_objects()),
        used_bytes=tier.used_bytes,
        held_bytes=tier.held_bytes,
        arena_bytes=host_runtime().arena.held_bytes,
        resident_bytes=found["resident memory"],
    )


def train(tier: str, options: argparse.Namespace) -> list[Sample]:
    """Trains and samples."""
    model = language_model(options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    offload = eo.Offload(**windows(options, tier))
    data = text(options, 16)
    samples: list[Sample] = []
    began = time.perf_counter()
    gc.collect()
    gc.disable()
    try:
        for step in range(1, options.steps + 1):
            batch = data[step % len(data)]
            optimizer.zero_grad()
            with offload:
                loss = model(batch.inputs, batch.targets)
            loss.backward()
            optimizer.step()
            del loss
            if step % max(options.steps // 10, 1) == 0:
                samples.append(sample(step, began, offload))
    finally:
        gc.enable()
    stats = offload.stats(synchronize=True)
    if not stats.reloaded_bytes or stats.demotions:
        raise SystemExit(
            f"benchmarks.steps: nothing came back from the {tier} tier, or not all could go there\n{stats}"
        )
    offload.close()
    return samples


def judge(report: Report, tier: str, samples: list[Sample]) -> dict[str, float]:
    growth: dict[str, float] = {}
    for name in CONSTANT:
        values = [getattr(one, name) for one in samples]
        growth[name] = max(values) - min(values)
        report.at_most(f"{tier}: change of {name}", growth[name], 0)
    slope = slope_of(samples, "resident_bytes")
    growth["resident_bytes"] = slope * (samples[-1].step - samples[0].step)
    growth["resident_bytes_per_step"] = slope
    growth["objects_per_step"] = slope_of(samples, "objects")
    report.at_most(f"{tier}: growth of resident MiB", growth["resident_bytes"] / MIB, MOST_GROWTH / MIB)
    report.at_most(f"{tier}: growth of Python objects a step", growth["objects_per_step"], 0.5)
    return growth


def slope_of(samples: list[Sample], name: str) -> float:
    """By how much it grows with each step, in the straight line through all samples."""
    if len(samples) < 2:
        return 0.0
    return linear_regression([one.step for one in samples], [getattr(one, name) for one in samples]).slope


def run(report: Report, options: argparse.Namespace) -> tuple[object, object]:
    warnings.filterwarnings("ignore", message=".*copies within host memory.*")
    samples = {tier: train(tier, options) for tier in options.tiers}
    for tier, found in samples.items():
        show(tier, found)
    return samples, {tier: judge(report, tier, found) for tier, found in samples.items()}


def options_of() -> argparse.Namespace:
    parser = command_line(
        __doc__, steps=1000, layers=2, width=64, heads=2, sequence=128, batch=4, window="256KiB", min_bytes="4KiB"
    )
    parser.add_argument("--tiers", type=listed(str), default="disk,host")
    return parse(parser, steps=100)


if __name__ == "__main__":
    sys.exit(drive("steps", options_of(), run, on_disk=True))
