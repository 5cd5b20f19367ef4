"""Memory and time of training on a CPU: without offload, with checkpointing, with the disk tier, and with both.

    python -m benchmarks.cpu_train
    python -m benchmarks.cpu_train --rounds 1 --variants "none;offload"

A decoder language model on real text, fp32, SGD; the same compiled by Inductor, against the same compiled without
offload. Every variant trains in a process of its own; the variants take turns,
round after round, and ratios are taken within a round. A step on a tiny batch loads code and makes gradients, which
stay allocated from then on (they are zeroed in place), so that what comes on top of the resident memory after it is
what training holds in between: mostly activations. A compiled variant takes one whole step first, which compiles. All
variants of eager code must end with the same losses and parameters, bit for bit, and so must all compiled ones.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
import time
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from statistics import median

import torch

import eager_offload as eo
from benchmarks.common import MIB, Report, Spread, console, drive, table
from benchmarks.options import MODEL, command_line, named, parse
from benchmarks.processes import release_or_refuse, reset_peak, run_worker, status_bytes, turns
from benchmarks.training import language_model

from lm.data import Batch, batches, read_text
from lm.result import hash_losses, hash_parameters


@dataclass(frozen=True)
class Variant:
    """One way to train."""

    checkpointing: bool = False
    offload: bool = False
    #: Whether Inductor compiles the model.
    compiled: bool = False
    #: The option that gives both windows; ``None`` stands for the library's defaults.
    window: str | None = "window"
    #: Whether ``eager_offload.release_freed_memory()`` is called first.
    release: bool = True
    #: Whether torch asks the kernel for transparent huge pages (``THP_MEM_ALLOC_ENABLE=1``): memory that comes anew
    #: from the system for every tensor costs far fewer page faults then.
    huge_pages: bool = False
    #: The most that memory, time, and time against glibc's default settings may be, as parts of those of no offload.
    memory_limit: float | None = None
    time_limit: float | None = None
    default_malloc_limit: float | None = None


DEFAULT_MALLOC, RELEASE, HUGE_PAGES = "none, default malloc", "none", "none, huge pages"
COMPILED, COMPILED_HUGE_PAGES = "compiled", "compiled, huge pages"
VARIANTS = {
    DEFAULT_MALLOC: Variant(release=False),
    RELEASE: Variant(),
    HUGE_PAGES: Variant(huge_pages=True),
    "checkpoint": Variant(checkpointing=True),
    "offload": Variant(offload=True, memory_limit=0.20, time_limit=1.10),
    "offload, huge pages": Variant(
        offload=True, huge_pages=True, memory_limit=0.20, time_limit=1.10, default_malloc_limit=1.15
    ),
    "offload, defaults": Variant(
        offload=True, window=None, huge_pages=True, memory_limit=0.30, time_limit=1.10, default_malloc_limit=1.15
    ),
    "checkpoint + offload": Variant(checkpointing=True, offload=True),
    # Recomputing a block takes long, so one block's input ahead is enough; each further one only takes room.
    "checkpoint + offload, small": Variant(checkpointing=True, offload=True, window="small_window", memory_limit=0.18),
    COMPILED: Variant(compiled=True),
    COMPILED_HUGE_PAGES: Variant(compiled=True, huge_pages=True),
    "compiled + offload": Variant(compiled=True, offload=True, memory_limit=0.20, time_limit=1.10),
    "compiled + offload, huge pages": Variant(
        compiled=True, offload=True, huge_pages=True, memory_limit=0.20, time_limit=1.10
    ),
}


@dataclass(frozen=True)
class Run:
    """What one process measured. Bytes and seconds."""

    variant: str
    round: int
    #: Resident after the tiny step, before the first real one.
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
    stats: dict[str, object]

    @property
    def above_bytes(self) -> int:
        return self.peak_bytes - self.base_bytes

    @property
    def seconds(self) -> float:
        """Of a step: the median."""
        return median(self.step_seconds)


def train(name: str, options: argparse.Namespace) -> Run:
    """Trains in this process."""
    variant = VARIANTS[name]
    if variant.release:
        release_or_refuse("cpu_train")
    torch.set_num_threads(options.threads)
    # What Inductor makes of an embedding's gradient adds up in the order of its threads, with or without offload.
    torch.use_deterministic_algorithms(variant.compiled)
    model = language_model(options, checkpointing=variant.checkpointing)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    offload = make_offload(variant, options) if variant.offload else None
    forward = torch.compile(model, dynamic=False) if variant.compiled else model

    def step(batch: Batch) -> float:
        optimizer.zero_grad(set_to_none=options.drop_gradients)
        with offload or nullcontext():
            loss = forward(batch.inputs, batch.targets)
        loss.backward()
        optimizer.step()
        return loss.item()

    text = read_text()
    data = batches(text, count=options.steps, batch=options.batch, sequence=options.sequence, seed=1)
    if variant.compiled:  # another shape would compile another graph
        step(batches(text, count=1, batch=options.batch, sequence=options.sequence, seed=0)[0])
    else:
        step(batches(text, count=1, batch=1, sequence=8, seed=0)[0])
    gc.collect()
    if offload is not None:
        offload.reset_stats()

    peak_method = reset_peak()
    base, losses, seconds, cpu_seconds = status_bytes("VmRSS"), [], [], []
    for batch in data:
        began, cpu_began = time.perf_counter(), time.process_time()
        losses.append(step(batch))
        seconds.append(time.perf_counter() - began)
        cpu_seconds.append(time.process_time() - cpu_began)
    return Run(
        variant=name,
        round=options.round,
        base_bytes=base,
        peak_bytes=status_bytes("VmHWM"),
        peak_method=peak_method,
        step_seconds=seconds,
        cpu_seconds=cpu_seconds,
        losses=losses,
        losses_hash=hash_losses(losses),
        parameters_hash=hash_parameters(model),
        load_average=os.getloadavg()[0],
        stats=asdict(offload.stats(synchronize=True)) if offload is not None else {},
    )


def make_offload(variant: Variant, options: argparse.Namespace) -> eo.Offload:
    size = None if variant.window is None else getattr(options, variant.window)
    windows = {} if size is None else {"max_inflight_bytes": size, "prefetch_bytes": size}
    return eo.Offload(tier="disk", disk_path=options.disk_path, min_bytes=options.min_bytes, **windows)


def run_in_process(name: str, number: int) -> Run:
    """Trains in a new process."""
    command = [sys.executable, "-m", "benchmarks.cpu_train", *sys.argv[1:], "--worker", name, "--round", str(number)]
    # torch reads it once, when it first allocates.
    pages = {"THP_MEM_ALLOC_ENABLE": "1"} if VARIANTS[name].huge_pages else {}
    return Run(**json.loads(run_worker("cpu_train", name, command, **pages).splitlines()[-1]))


def ratios(runs: list[Run], name: str, reference: str, what: str) -> list[float]:
    """Of each round: what ``name`` needed as a part of what ``reference`` needed."""
    by_round = {run.round: getattr(run, what) for run in runs if run.variant == reference}
    return [getattr(run, what) / by_round[run.round] for run in runs if run.variant == name and run.round in by_round]


def judge(report: Report, runs: list[Run], options: argparse.Namespace) -> dict[str, dict[str, Spread]]:
    """Ratios of every variant, and the limits among them."""
    summary: dict[str, dict[str, Spread]] = {}
    for name in options.variants:
        own = [run for run in runs if run.variant == name]
        variant = VARIANTS[name]
        found = {
            "above_bytes": Spread.of([run.above_bytes for run in own]),
            "peak_bytes": Spread.of([run.peak_bytes for run in own]),
            "step_seconds": Spread.of([run.seconds for run in own]),
        }
        plain, large = (COMPILED, COMPILED_HUGE_PAGES) if variant.compiled else (RELEASE, HUGE_PAGES)
        same = large if variant.huge_pages else plain  # the same settings of the allocator
        compared = (
            ("memory", plain if variant.release else DEFAULT_MALLOC, "above_bytes", variant.memory_limit),
            ("time", same, "seconds", variant.time_limit),
            ("time to default malloc", DEFAULT_MALLOC, "seconds", variant.default_malloc_limit),
        )
        for title, reference, what, limit in compared:
            values = ratios(runs, name, reference, what)
            if values:
                found[title] = Spread.of(values)
                if limit is not None:
                    report.at_most(f"{name}: {title}", found[title].median, limit)
        summary[name] = found
    for title, compiled in (("eager: different results", False), ("compiled: different results", True)):
        own = [run for run in runs if VARIANTS[run.variant].compiled is compiled]
        if own:
            report.at_most(title, len({(run.losses_hash, run.parameters_hash) for run in own}), 1)
    return summary


def show(runs: list[Run], summary: dict[str, dict[str, Spread]]) -> None:
    memory = table("variant", "MiB above the model", "of no offload", "peak MiB", "offloaded MiB")
    times = table("variant", "s a step", "of no offload", "of default malloc", "stall s")
    for name, found in summary.items():
        own = [run for run in runs if run.variant == name]
        steps = len(own[0].step_seconds)
        offloaded = median([float(str(run.stats.get("offloaded_bytes", 0))) for run in own]) / MIB / steps
        stall = median([float(str(run.stats.get("stall_seconds", 0))) for run in own]) / steps
        above = found["above_bytes"]
        memory.add_row(
            name,
            Spread(above.median / MIB, above.least / MIB, above.most / MIB).show(0),
            found["memory"].show() if "memory" in found else "-",
            f"{found['peak_bytes'].median / MIB:,.0f}",
            f"{offloaded:,.0f}",
        )
        times.add_row(
            name,
            found["step_seconds"].show(2),
            found["time"].show() if "time" in found else "-",
            found["time to default malloc"].show() if "time to default malloc" in found else "-",
            f"{stall:.2f}",
        )
    rounds = len({run.round for run in runs})
    console.print(f"Rounds: {rounds}; median (least .. most); offloaded bytes and stalled seconds are of one step")
    console.print(memory)
    console.print(times)


def run(report: Report, options: argparse.Namespace) -> tuple[object, object]:
    runs: list[Run] = []
    for number, name, shown in turns(options.rounds, options.variants):
        run = run_in_process(name, number)
        runs.append(run)
        console.print(
            f"{shown}  {name:<28} {run.above_bytes / MIB:>7,.0f} MiB above "
            f"{run.base_bytes / MIB:>5,.0f}  {run.seconds:>6.2f} s/step  load {run.load_average:.1f}"
        )
    summary = judge(report, runs, options)
    show(runs, summary)
    return [asdict(run) for run in runs], summary


def options_of() -> argparse.Namespace:
    parser = command_line(__doc__, workers=VARIANTS, rounds=5, steps=3, threads=2, **MODEL)
    known = named(VARIANTS, ";")
    parser.add_argument("--variants", type=known, default=";".join(VARIANTS), help="with semicolons between")
    parser.add_argument("--small-window", default="16MiB", help="of the variant with small windows")
    parser.add_argument("--drop-gradients", action="store_true", help="zero_grad(set_to_none=True) before each step")
    return parse(parser, rounds=1, steps=1)


if __name__ == "__main__":
    sys.exit(drive("cpu_train", options_of(), run, work=train, on_disk=True))
