"""Memory and time of training on a CPU: without offload, with checkpointing, with the disk tier, with both, by a plan.

    python -m benchmarks.cpu_train
    python -m benchmarks.cpu_train --rounds 1 --variants "none;offload"
    python -m benchmarks.cpu_train --ranks 2        # FSDP2 on two ranks, beside one process

A decoder language model on real text, fp32, SGD; the same compiled by Inductor, against the same compiled without
offload. Every variant trains in a process of its own; the variants take turns, round after round, and ratios are taken
within a round. Steps on tiny batches load code and make gradients, which stay allocated from then on (they are zeroed
in place), so that what comes on top of the resident memory after them is what training holds in between: mostly
activations. A compiled variant takes one whole step first, which compiles. All variants of eager code must end with the
same losses and parameters, bit for bit, and so must all compiled ones. A plan is for processor and disk as it measures
them, and for a twentieth less than it predicts for checkpointing.

On ranks each process has one thread and a batch as large as that of the single process. What a step's peak has on top
of that of a step on a tiny batch is activations: what FSDP2 gathers and reduces is in both.
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import eager_offload as eo
from benchmarks.common import (
    MIB,
    MODEL,
    Report,
    Spread,
    command_line,
    drive,
    in_process,
    parse,
    ratios,
    show,
    turns,
)
from benchmarks.training import language_model, release_or_refuse, reset_peak, status_bytes, text, tiny_text, windows

from lm.data import Batch
from lm.result import hash_losses, hash_parameters


@dataclass(frozen=True)
class Variant:
    """One way to train."""

    checkpointing: bool = False
    offload: bool = False
    #: Whether a plan with recompute, at the memory of checkpointing, says what moves and what is computed again.
    planned: bool = False
    #: Whether Inductor compiles the model.
    compiled: bool = False
    #: The option that gives both windows; ``None`` stands for the library's defaults.
    window: str | None = "window"
    #: Whether ``eager_offload.release_freed_memory()`` is called first.
    release: bool = True
    #: Whether torch asks the kernel for transparent huge pages (``THP_MEM_ALLOC_ENABLE=1``): memory that comes anew
    #: from the system for every tensor costs far fewer page faults then.
    huge_pages: bool = False
    #: Whether it trains on ``--ranks`` ranks under FSDP2.
    sharded: bool = False
    #: The most that memory, time, and time against glibc's default settings may be, as parts of those of no offload.
    memory_limit: float | None = None
    time_limit: float | None = None
    default_malloc_limit: float | None = None
    #: The same of memory and time of checkpointing.
    checkpoint_limits: tuple[float, float] | None = None

    @property
    def base(self) -> str:
        """What it is compared with: no offload with the same settings."""
        return "compiled" if self.compiled else "none" if self.release else DEFAULT_MALLOC

    @property
    def same_pages(self) -> str:
        return f"{self.base}, huge pages" if self.huge_pages else "none" if not self.compiled else self.base


DEFAULT_MALLOC = "none, default malloc"
VARIANTS = {
    DEFAULT_MALLOC: Variant(release=False),
    "none": Variant(),
    "none, huge pages": Variant(huge_pages=True),
    "checkpoint": Variant(checkpointing=True),
    "offload": Variant(offload=True, memory_limit=0.20, time_limit=1.10),
    "offload, huge pages": Variant(
        offload=True, huge_pages=True, memory_limit=0.20, time_limit=1.10, default_malloc_limit=1.15
    ),
    "offload, defaults": Variant(
        offload=True, window=None, huge_pages=True, memory_limit=0.30, time_limit=1.10, default_malloc_limit=1.15
    ),
    "plan": Variant(offload=True, planned=True, checkpoint_limits=(1.0, 0.95)),
    "checkpoint + offload": Variant(checkpointing=True, offload=True),
    # Recomputing a block takes long, so one block's input ahead is enough; each further one only takes room.
    "checkpoint + offload, small": Variant(checkpointing=True, offload=True, window="small_window", memory_limit=0.18),
    "compiled": Variant(compiled=True),
    "compiled, huge pages": Variant(compiled=True, huge_pages=True),
    "compiled + offload": Variant(compiled=True, offload=True, memory_limit=0.20, time_limit=1.10),
    "compiled + offload, huge pages": Variant(
        compiled=True, offload=True, huge_pages=True, memory_limit=0.20, time_limit=1.10
    ),
}
#: What ``--ranks`` compares, and the most that is left of memory under FSDP2, to what is left of it in one process.
ON_RANKS = {
    "one": Variant(),
    "one, offload": Variant(offload=True),
    "fsdp": Variant(sharded=True),
    "fsdp, offload": Variant(offload=True, sharded=True),
}
MOST = 1.05
#: Of the peak that is predicted for checkpointing, what a plan is given: training is within a twentieth of a plan's.
PREDICTED = 0.95


@dataclass(frozen=True)
class Run:
    """What one process measured. Bytes and seconds."""

    variant: str
    round: int
    rank: int
    #: The most in a step on a tiny batch, and resident after it, before the first real one.
    tiny_peak_bytes: int
    base_bytes: int
    #: The most that was ever resident after that.
    peak_bytes: int
    #: How the peak was found; see ``reset_peak``.
    peak_method: str
    step_seconds: list[float]
    #: Of all threads, transfers included.
    cpu_seconds: list[float]
    losses: list[float]
    losses_hash: str
    parameters_hash: str
    load_average: float
    #: Of a step.
    offloaded_bytes: float
    stall_seconds: float

    @property
    def above_bytes(self) -> int:
        return self.peak_bytes - self.base_bytes

    @property
    def activation_bytes(self) -> int:
        return self.peak_bytes - self.tiny_peak_bytes

    @property
    def seconds(self) -> float:
        """Of a step: the median."""
        return median(self.step_seconds)

    @property
    def processor_seconds(self) -> float:
        return median(self.cpu_seconds)

    @property
    def result(self) -> tuple[int, str, str]:
        return self.rank, self.losses_hash, self.parameters_hash


def train(name: str, options: argparse.Namespace) -> Sequence[Run]:
    """Trains in this process, with the others of its run."""
    variant = (ON_RANKS | VARIANTS)[name]
    if variant.release:
        release_or_refuse()
    torch.set_num_threads(1 if options.ranks else options.threads)
    # What Inductor makes of an embedding's gradient adds up in the order of its threads, with or without offload.
    torch.use_deterministic_algorithms(variant.compiled)
    model = language_model(options, checkpointing=variant.checkpointing)
    if variant.sharded:
        dist.init_process_group("gloo")
        for block in (*model.blocks, model):
            fully_shard(block)
    rank = dist.get_rank() if variant.sharded else 0
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    fields = windows(options)
    for field in ("max_inflight_bytes", "prefetch_bytes"):
        fields[field] = "auto" if variant.window is None or variant.planned else getattr(options, variant.window)
    fields = {what: value for what, value in fields.items() if value != "auto"}
    if variant.planned:
        plan = plan_like_checkpointing(model, optimizer, options, fields)
        # Checks are for the first steps of a training, and there are no others here.
        plan.apply(model, verify=False).__enter__()
    offload = eo.Offload(plan=plan) if variant.planned else eo.Offload(fields)
    forward = torch.compile(model, dynamic=False) if variant.compiled else model

    def step(batch: Batch) -> float:
        optimizer.zero_grad(set_to_none=options.drop_gradients)
        with offload if variant.offload else nullcontext():
            loss = forward(batch.inputs, batch.targets)
        loss.backward()
        optimizer.step()
        return float(loss.item())

    # Another shape would compile another graph.
    first = text(options, seed=0) * 2 if variant.compiled else tiny_text(2)
    step(first[0])
    gc.collect()
    reset_peak()
    step(first[1])
    tiny_peak = status_bytes("VmHWM")
    gc.collect()
    offload.reset_stats()
    peak_method = reset_peak()
    base, losses, seconds, cpu_seconds = status_bytes("VmRSS"), [], [], []
    for batch in text(options, options.steps, seed=1 + rank):
        began, cpu_began = time.perf_counter(), time.process_time()
        losses.append(step(batch))
        seconds.append(time.perf_counter() - began)
        cpu_seconds.append(time.process_time() - cpu_began)
    peak, stats = status_bytes("VmHWM"), offload.stats(synchronize=True)
    own = nn.ParameterList(nn.Parameter(p.to_local() if isinstance(p, DTensor) else p) for p in model.parameters())
    run = Run(
        variant=name,
        round=options.round,
        rank=rank,
        tiny_peak_bytes=tiny_peak,
        base_bytes=base,
        peak_bytes=peak,
        peak_method=peak_method,
        step_seconds=seconds,
        cpu_seconds=cpu_seconds,
        losses=losses,
        losses_hash=hash_losses(losses),
        parameters_hash=hash_parameters(own),
        load_average=os.getloadavg()[0],
        offloaded_bytes=stats.offloaded_bytes / options.steps,
        stall_seconds=stats.stall_seconds / options.steps,
    )
    if variant.sharded:
        dist.barrier()  # a rank that goes while another one still communicates may abort that
        dist.destroy_process_group()
    return [run]


def plan_like_checkpointing(
    model: nn.Module, optimizer: torch.optim.Optimizer, options: argparse.Namespace, fields: dict[str, Any]
) -> eo.Plan:
    """A plan for this machine and the memory of checkpointing; gradients are there from the first step on."""
    (batch,) = text(options)
    inputs, accumulation = (batch.inputs, batch.targets), 1 if options.drop_gradients else 2
    made = partial(
        eo.plan, model, inputs, optimizer=optimizer, accumulation=accumulation, recompute=True, config=fields
    )
    whole = made(device_budget=1 << 50).checkpointing
    assert whole is not None, "blocks of it repeat"
    plan = made(device_budget=int(PREDICTED * whole.peak_bytes))
    print(plan, file=sys.stderr)
    return plan


def run(report: Report, options: argparse.Namespace) -> tuple[object, object]:
    runs: list[Run] = []
    for number, name, shown in turns(options.rounds, list(ON_RANKS) if options.ranks else options.variants):
        variant = (ON_RANKS | VARIANTS)[name]
        # torch reads it once, when it first allocates.
        environment = {"THP_MEM_ALLOC_ENABLE": "1"} if variant.huge_pages else {}
        environment |= {"OMP_NUM_THREADS": "1"} if options.ranks else {}
        ranks = ("-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={options.ranks}")
        launch = ranks if variant.sharded else ()
        found = in_process("cpu_train", name, "--round", str(number), launch=launch, **environment)
        runs += [Run(**one) for one in found]
        last = runs[-1]
        print(
            f"{shown}  {name:<28} {last.above_bytes / MIB:>7,.0f} MiB above {last.base_bytes / MIB:>5,.0f}  "
            f"{last.seconds:>6.2f} s/step  load {last.load_average:.1f}"
        )
    rows = {
        name: {
            "MiB above the model": Spread.of((one.above_bytes for one in own), MIB),
            "peak": median(one.peak_bytes for one in own) / MIB,
            "tiny step": median(one.tiny_peak_bytes for one in own) / MIB,
            "offloaded": median(one.offloaded_bytes for one in own) / MIB,
            "s a step": Spread.of(one.seconds for one in own),
            "stall s": median(one.stall_seconds for one in own),
        }
        for name in dict.fromkeys(one.variant for one in runs)
        if (own := [one for one in runs if one.variant == name])
    }
    show(
        "Median (least .. most); bytes and seconds of one step",
        ({"variant": name, **row} for name, row in rows.items()),
    )
    return runs, rows | (on_ranks if options.ranks else judge)(report, runs)


def judge(report: Report, runs: list[Run]) -> dict[str, object]:
    """Ratios of every variant, and the limits among them."""
    rows = []
    for name in dict.fromkeys(one.variant for one in runs):
        variant, row = VARIANTS[name], dict[str, object](variant=name)
        compared = (
            ("memory", variant.base, "above_bytes", variant.memory_limit),
            ("time", variant.same_pages, "seconds", variant.time_limit),
            ("time to default malloc", DEFAULT_MALLOC, "seconds", variant.default_malloc_limit),
        )
        if (limits := variant.checkpoint_limits) is not None:
            compared += (
                ("memory to checkpoint", "checkpoint", "above_bytes", limits[0]),
                ("time to checkpoint", "checkpoint", "seconds", limits[1]),
                ("processor's time to checkpoint", "checkpoint", "processor_seconds", None),
            )
        for title, reference, what, limit in compared:
            if values := ratios(runs, what, name, reference):
                row[title] = found = Spread.of(values)
                if limit is not None:
                    report.at_most(f"{name}: {title}", found.median, limit)
        rows.append(row)
    show("Of no offload", rows)
    for title, compiled in (("eager: different results", False), ("compiled: different results", True)):
        if own := [one.result for one in runs if VARIANTS[one.variant].compiled is compiled]:
            report.at_most(title, len(set(own)), 1)
    return {"ratios": rows}


def on_ranks(report: Report, runs: list[Run]) -> dict[str, object]:
    """The part of memory that is left with offload on the worst rank, by how it is counted, and the limits."""
    rows = []
    for what in ("activation_bytes", "above_bytes", "peak_bytes"):
        left = {kind: Spread.of(ratios(runs, what, f"{kind}, offload", kind)) for kind in ("one", "fsdp")}
        rows.append({"with offload, of without": what.removesuffix("_bytes"), **left})
        if what != "above_bytes":
            shared = left["fsdp"].median / left["one"].median
            report.at_most(f"{what.removesuffix('_bytes')}, of no offload: FSDP2 to one process", shared, MOST)
    show("What is left of memory", rows)
    for kind in ("one", "fsdp"):
        results = {one.result for one in runs if one.variant in (kind, f"{kind}, offload")}
        report.at_most(f"{kind}: different results of a rank", len(results) / len({rank for rank, *_ in results}), 1)
    return {"ratios": rows}


def options_of() -> argparse.Namespace:
    parser = command_line(__doc__, workers=True, variants=VARIANTS, rounds=5, steps=3, threads=2, **MODEL)
    parser.add_argument("--small-window", default="16MiB", help="of the variant with small windows")
    parser.add_argument("--drop-gradients", action="store_true", help="zero_grad(set_to_none=True) before each step")
    parser.add_argument("--ranks", type=int, default=0, help="compares FSDP2 on so many with one process")
    return parse(parser, rounds=1, steps=1)


if __name__ == "__main__":
    sys.exit(drive("cpu_train", options_of(), run, work=train, on_disk=True))
