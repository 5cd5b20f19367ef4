"""Memory of training under FSDP2 on two CPU ranks, with the disk tier and without, beside one process that has it all.

    python -m benchmarks.fsdp_memory
    python -m benchmarks.fsdp_memory --rounds 1 --ranks 4

Offload should save under FSDP2 what it saves in one process. A decoder language model on real text, fp32, SGD, one
thread a process; each rank has a batch as large as that of the single process. The variants take turns, each in
processes of its own. Two steps on a tiny batch come first: the first loads code and makes gradients, the second shows
how much a step needs that has hardly any activations: under FSDP2 the weights of one layer gathered ahead of another,
and their gradients on the way to their owners. What a real step's peak has on top of that peak is activations.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import tempfile
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import eager_offload as eo
from benchmarks.common import MIB, Report, Spread, console, drive, table
from benchmarks.options import command_line, parse, positive
from benchmarks.processes import release_or_refuse, reset_peak, run_worker, status_bytes, turns
from benchmarks.training import language_model, windows

from lm.data import Batch, batches, read_text
from lm.model import LanguageModel
from lm.result import hash_losses, hash_parameters

#: Of how a model is trained, and whether it offloads.
VARIANTS = {"one": (False, False), "one, offload": (False, True), "fsdp": (True, False), "fsdp, offload": (True, True)}
#: What is left of memory under FSDP2, to what is left of it in one process.
MOST = 1.05


@dataclass(frozen=True)
class Run:
    """What one process measured, in bytes."""

    variant: str
    round: int
    rank: int
    #: Resident between two steps: the model, its gradients, loaded code.
    base_bytes: int
    #: The most in a step on a tiny batch.
    tiny_peak_bytes: int
    #: The most in a real step.
    peak_bytes: int
    losses: list[float]
    losses_hash: str
    parameters_hash: str
    bytes_out: int

    @property
    def activation_bytes(self) -> int:
        """What the real steps have needed on top of the tiny one."""
        return self.peak_bytes - self.tiny_peak_bytes

    @property
    def above_bytes(self) -> int:
        """What the real steps have needed on top of the model."""
        return self.peak_bytes - self.base_bytes


def sharded(model: LanguageModel) -> nn.Module:
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    return model


def train(name: str, options: argparse.Namespace) -> Run:
    """Trains in this process, with the others of its run."""
    by_ranks, offloads = VARIANTS[name]
    release_or_refuse("fsdp_memory")
    torch.set_num_threads(1)
    rank = dist.get_rank() if by_ranks else 0
    model: nn.Module = language_model(options)
    if by_ranks:
        model = sharded(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    offload = eo.Offload(**windows(options)) if offloads else None

    def step(batch: Batch) -> float:
        optimizer.zero_grad(set_to_none=False)
        with offload or nullcontext():
            loss = model(batch.inputs, batch.targets)
        loss.backward()
        optimizer.step()
        return float(loss.item())

    text = read_text()
    data = batches(text, count=options.steps, batch=options.batch, sequence=options.sequence, seed=1 + rank)
    tiny = batches(text, count=2, batch=1, sequence=8, seed=0)
    step(tiny[0])
    gc.collect()
    reset_peak()
    step(tiny[1])
    tiny_peak = status_bytes("VmHWM")
    gc.collect()
    if offload is not None:
        offload.reset_stats()
    reset_peak()
    base = status_bytes("VmRSS")
    losses = [step(batch) for batch in data]
    peak = status_bytes("VmHWM")
    own = nn.ParameterList(nn.Parameter(p.to_local() if isinstance(p, DTensor) else p) for p in model.parameters())
    return Run(
        variant=name,
        round=options.round,
        rank=rank,
        base_bytes=base,
        tiny_peak_bytes=tiny_peak,
        peak_bytes=peak,
        losses=losses,
        losses_hash=hash_losses(losses),
        parameters_hash=hash_parameters(own),
        bytes_out=0 if offload is None else offload.stats(synchronize=True).bytes_out,
    )


def work(name: str, options: argparse.Namespace) -> None:
    """What a process of a variant does; it leaves what it measured in the directory that it was given."""
    if VARIANTS[name][0]:
        dist.init_process_group("gloo")
    run = train(name, options)
    (options.into / f"{run.rank}.json").write_text(json.dumps(asdict(run)))
    if dist.is_initialized():
        dist.destroy_process_group()


def run_in_processes(name: str, number: int, options: argparse.Namespace) -> list[Run]:
    """Trains in new processes."""
    start = [sys.executable]
    if VARIANTS[name][0]:
        start += ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={options.ranks}"]
    with tempfile.TemporaryDirectory() as into:
        own = ["--worker", name, "--round", str(number), "--into", into]
        command = [*start, "-m", "benchmarks.fsdp_memory", *sys.argv[1:], *own]
        run_worker("fsdp_memory", name, command, OMP_NUM_THREADS="1")
        return [Run(**json.loads(path.read_text())) for path in sorted(Path(into).glob("*.json"))]


def ratios(runs: list[Run], kind: str, what: str) -> list[float]:
    """Of each round: what the worst rank needed with offload, as a part of what it needed without."""
    found = []
    for number in sorted({run.round for run in runs}):
        with_offload, without = (
            max(getattr(run, what) for run in runs if (run.variant, run.round) == (name, number))
            for name in (f"{kind}, offload", kind)
        )
        found.append(with_offload / without)
    return found


def judge(report: Report, runs: list[Run]) -> dict[str, dict[str, Spread]]:
    """The part of memory that is left with offload, by how it is counted, and the limits."""
    summary = {
        what: {kind: Spread.of(ratios(runs, kind, what)) for kind in ("one", "fsdp")}
        for what in ("activation_bytes", "above_bytes", "peak_bytes")
    }
    alone, shared = summary["peak_bytes"]["one"].median, summary["peak_bytes"]["fsdp"].median
    report.at_most("peak, of no offload: FSDP2 to one process", shared / alone, MOST)
    alone, shared = summary["activation_bytes"]["one"].median, summary["activation_bytes"]["fsdp"].median
    report.at_most("activations, of no offload: FSDP2 to one process", shared / alone, MOST)
    for kind in ("one", "fsdp"):
        names = (kind, f"{kind}, offload")
        bits = {(run.rank, run.losses_hash, run.parameters_hash) for run in runs if run.variant in names}
        report.at_most(f"{kind}: different results of a rank", len(bits) / len({rank for rank, *_ in bits}), 1)
    return summary


def show(runs: list[Run], summary: dict[str, dict[str, Spread]]) -> None:
    memory = table("variant", "model MiB", "tiny step", "activations", "peak", "moved out")
    for name in VARIANTS:
        own = [run for run in runs if run.variant == name]
        fields = ("base_bytes", "tiny_peak_bytes", "activation_bytes", "peak_bytes", "bytes_out")
        memory.add_row(name, *(f"{median([getattr(run, field) for run in own]) / MIB:,.0f}" for field in fields))
    console.print(memory)
    parts = table("with offload, of without", "one process", "FSDP2")
    for what, found in summary.items():
        parts.add_row(what.removesuffix("_bytes"), found["one"].show(), found["fsdp"].show())
    console.print(parts)


def run(report: Report, options: argparse.Namespace) -> tuple[object, object]:
    runs: list[Run] = []
    for number, name, shown in turns(options.rounds, list(VARIANTS)):
        runs += run_in_processes(name, number, options)
        console.print(
            f"{shown}  {name:<14} {runs[-1].activation_bytes / MIB:>7,.0f} MiB of "
            f"activations, peak {runs[-1].peak_bytes / MIB:>7,.0f} MiB"
        )
    summary = judge(report, runs)
    show(runs, summary)
    return [asdict(run) for run in runs], summary


def options_of() -> argparse.Namespace:
    parser = command_line(
        __doc__,
        workers=VARIANTS,
        rounds=3,
        steps=2,
        layers=8,
        width=384,
        heads=6,
        sequence=512,
        batch=4,
        window="16MiB",
        min_bytes="1MiB",
    )
    parser.add_argument("--ranks", type=positive, default=2)
    parser.add_argument("--into", type=Path, help=argparse.SUPPRESS)
    return parse(parser, rounds=1, steps=1)


if __name__ == "__main__":
    sys.exit(drive("fsdp_memory", options_of(), run, work=work, on_disk=True))
