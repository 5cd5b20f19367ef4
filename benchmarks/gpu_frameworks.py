"""Memory and time of one decoder under three frameworks on an accelerator: ours, and what they bring themselves.

    python -m benchmarks.gpu_frameworks
    python -m benchmarks.gpu_frameworks --device cpu --quick      # does it run? The numbers mean nothing

bf16 by the framework's own mixed precision, AdamW, random tokens, one accelerator. Every row is a process of its own;
the losses of a row with ours must equal those of its base, bit for bit.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import psutil
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import eager_offload as eo
from benchmarks.common import ROOT, Report, Spread, console, table
from benchmarks.gpu_train import QUICK
from benchmarks.habits import LOOPS, Habit, Settings, Stamped, batches
from benchmarks.llama import Config
from benchmarks.options import accelerator_or_message, command_line, named, parse, positive

GIB = 1 << 30


@dataclass(frozen=True)
class Row:
    """A framework, how memory is saved in it, and the row that computes the same without."""

    framework: str
    habit: Habit = Habit.NONE
    base: str = ""
    #: Options of Accelerate's FSDP2 plugin; ``None`` without FSDP2.
    fsdp2: dict[str, Any] | None = None
    checkpointing: bool = False


ROWS = {
    "Accelerate": Row("Accelerate"),
    "Accelerate, ours": Row("Accelerate", Habit.INTEGRATION, "Accelerate"),
    "Accelerate FSDP2": Row("Accelerate", fsdp2={}),
    "Accelerate FSDP2, ours": Row("Accelerate", Habit.INTEGRATION, "Accelerate FSDP2", {}),
    "Accelerate FSDP2, its checkpointing": Row(
        "Accelerate", base="Accelerate FSDP2", fsdp2={"activation_checkpointing": True}
    ),
    "Accelerate FSDP2, its checkpointing and offload": Row(
        "Accelerate",
        base="Accelerate FSDP2",
        fsdp2={"activation_checkpointing": True, "activation_checkpointing_offload": True},
    ),
    "Lightning": Row("Lightning"),
    "Lightning, ours": Row("Lightning", Habit.INTEGRATION, "Lightning"),
    "Transformers": Row("Transformers"),
    "Transformers, ours": Row("Transformers", Habit.INTEGRATION, "Transformers"),
    "Transformers, checkpointing": Row("Transformers", base="Transformers", checkpointing=True),
    "Transformers, ours and checkpointing": Row(
        "Transformers", Habit.INTEGRATION, "Transformers, checkpointing", checkpointing=True
    ),
    "Transformers, TRL's OffloadActivations": Row("Transformers", Habit.TRL, "Transformers"),
}


@dataclass(frozen=True)
class Measured:
    """What one process measured; bytes and seconds. The first two steps are left out of the times."""

    row: str
    failure: str | None = None
    peak_bytes: int = 0
    host_bytes: int = 0
    seconds: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    stats: dict[str, Any] | None = None


# -- in a process of its own ------------------------------------------------------------------------------------------


def work(name: str, options: argparse.Namespace) -> Measured:
    """Trains by the row called ``name``."""
    row, device = ROWS[name], torch.device(options.device)
    if row.fsdp2 is not None:
        _be_the_only_rank()
    torch.manual_seed(0)
    config = QUICK if options.quick else Config()
    model = Stamped(config, _checkpointed if row.checkpointing else None)
    steps = options.steps + 3
    data = batches(steps, (options.batch, options.sequence + 1), config.vocabulary)
    offload = eo.Offload() if row.habit is Habit.INTEGRATION else None
    before = psutil.Process().memory_info().rss
    failure = None
    try:
        with tempfile.TemporaryDirectory() as folder:
            settings = Settings(steps, device, Path(folder), bf16=device.type != "cpu", fsdp2=row.fsdp2)
            LOOPS[row.framework](model, data, row.habit, offload, settings)
    except (ImportError, RuntimeError, AssertionError, ValueError) as error:  # a framework's own, or no memory
        failure = f"{type(error).__name__}: " + str(error).partition("\n")[0][:200]
    seconds, losses = model.take()
    stats = None if offload is None else asdict(offload.stats(synchronize=True))
    host = psutil.Process().memory_info().rss - before
    on_cpu = device.type == "cpu"
    peak = psutil.Process().memory_info().rss if on_cpu else torch.accelerator.max_memory_allocated(device)
    return Measured(name, failure, peak, host, seconds[2:], losses, stats)


def _checkpointed(block: nn.Module, x: Tensor) -> Tensor:
    return checkpoint(block, x, use_reentrant=False)


def _be_the_only_rank() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    ranks = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
    os.environ |= ranks | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.environ |= {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"}


# -- what it means ----------------------------------------------------------------------------------------------------


def summarize(measured: list[Measured], report: Report) -> list[dict[str, Any]]:
    """A row for each; a limit is missed where ours failed, moved nothing, or has other losses than its base."""
    by_name = {one.row: one for one in measured if one.failure is None and one.seconds}
    rows = []
    for one in measured:
        shown: dict[str, Any] = {"row": one.row, "failure": one.failure}
        if one.row in by_name:
            shown |= {
                "peak_bytes": one.peak_bytes,
                "host_bytes": one.host_bytes,
                "step_seconds": Spread.of(one.seconds),
            }
            base = by_name.get(ROWS[one.row].base)
            if base is not None:
                shown["of_base_memory"] = one.peak_bytes / base.peak_bytes
                shown["of_base_time"] = median(one.seconds) / median(base.seconds)
                shown["same_losses"] = one.losses == base.losses
        if ROWS[one.row].habit is Habit.INTEGRATION:
            moved = bool(one.stats and one.stats["bytes_out"])
            right = moved and shown.get("same_losses", False)
            report.at_least(f"{one.row}: bytes moved, losses are those of {ROWS[one.row].base}", float(right), 1)
        rows.append(shown)
    return rows


def show(rows: list[dict[str, Any]]) -> None:
    shown = table("row", "peak GiB", "of its base", "step s", "of its base", "host GiB", "same losses")
    for row in rows:
        if "step_seconds" not in row:
            shown.add_row(row["row"], (row["failure"] or "no steps")[:60])
            continue
        base = "of_base_memory" in row
        shown.add_row(
            row["row"],
            f"{row['peak_bytes'] / GIB:,.2f}",
            f"{row['of_base_memory']:.2f}" if base else "",
            row["step_seconds"].show(),
            f"{row['of_base_time']:.2f}" if base else "",
            f"{row['host_bytes'] / GIB:,.2f}",
            str(row["same_losses"]) if base else "",
        )
    console.print(shown)


def run(options: argparse.Namespace) -> list[Measured]:
    """Every row in a process of its own."""
    measured = []
    for name in options.rows:
        command = [sys.executable, "-m", "benchmarks.gpu_frameworks", *sys.argv[1:], "--worker", name]
        done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=False)
        lines = [line for line in done.stdout.splitlines() if line.startswith('{"row"')]
        found = Measured(**json.loads(lines[-1])) if lines else None
        measured.append(found or Measured(name, f"the process ended with status {done.returncode}"))
    return measured


def options_of(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = command_line(__doc__, batch=2, steps=5)
    parser.add_argument("--device", help="in place of the accelerator; cpu only tries the plumbing, with --quick")
    parser.add_argument("--sequence", type=positive, help="8192, but with --quick")
    parser.add_argument("--rows", type=named(ROWS, ";"), default=";".join(ROWS), help="with semicolons between")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parse(parser, arguments)
    options.sequence = options.sequence or (64 if options.quick else 8192)
    return options


def main() -> int:
    options = options_of()
    if options.device is None:
        options.device = accelerator_or_message("gpu_frameworks", "--device cpu --quick")
        if options.device is None:
            return 2
    if options.worker is not None:
        print(json.dumps(asdict(work(options.worker, options))), flush=True)
        return 0
    report = Report("gpu_frameworks", options)
    if options.device.startswith("cuda"):
        report.environment["device"] = torch.cuda.get_device_name(options.device)
    measured = run(options)
    rows = summarize(measured, report)
    show(rows)
    return report.finish(measured, rows)


if __name__ == "__main__":
    sys.exit(main())
