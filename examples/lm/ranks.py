"""What examples of many ranks share: where a rank runs, what it is told, what it tells, and how runs are compared."""

from __future__ import annotations

import argparse
import dataclasses
import gc
import hashlib
import os
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

import eager_offload as eo

from lm.data import Batch, batches, read_text
from lm.meter import peak_resident_bytes

__all__ = ["Rank", "parse", "run", "train_ranks"]

MIB = 1 << 20


@dataclasses.dataclass(frozen=True)
class Rank:
    """One process of the run."""

    number: int
    #: How many there are.
    size: int
    #: The accelerator's own, or the CPU.
    device: torch.device
    options: argparse.Namespace
    offload: eo.Offload | None
    #: Of each step so far: the loss, where the rank knows it, and a digest of the bits of each gradient.
    steps: list[tuple[float | None, list[str]]] = dataclasses.field(default_factory=list)

    def forward(self) -> AbstractContextManager[Any]:
        """What stands around every forward: the offload's own context, or nothing with ``--no-offload``."""
        return self.offload or nullcontext()

    def data(self, seed: int) -> list[Batch]:
        """A batch for each step, the same for the same ``seed``."""
        options = self.options
        drawn = batches(read_text(), count=options.steps, batch=options.batch, sequence=options.sequence, seed=seed)
        return [Batch(batch.inputs.to(self.device), batch.targets.to(self.device)) for batch in drawn]

    def note(self, loss: Tensor | None, gradients: Iterable[Tensor | None], writer: int = 0) -> None:
        """Keeps what a step has come to, before the gradients change again; the rank ``writer`` prints its loss."""
        own = (one.to_local() if isinstance(one, DTensor) else one for one in gradients if one is not None)
        bits = [one.detach().cpu().contiguous().view(torch.uint8).numpy() for one in own]
        self.steps.append((None if loss is None else loss.item(), [hashlib.sha256(one).hexdigest() for one in bits]))
        if self.number == writer and loss is not None:
            print(f"step {len(self.steps)}: loss {loss.item():.6f}", flush=True)

    def used(self) -> str:
        """A line that says what the rank has used and learnt."""
        if self.device.type == "cpu":
            peak = peak_resident_bytes()
        else:
            peak = torch.accelerator.max_memory_allocated(self.device)
        line = f"rank {self.number} on {self.device}: peak {peak / MIB:,.0f} MiB"
        if self.offload is not None:
            stats = self.offload.stats(synchronize=True)
            line += f", {stats.bytes_out / MIB:,.1f} MiB moved out, {stats.stall_seconds:.2f} s stalled"
        if losses := [loss for loss, _ in self.steps if loss is not None]:
            line += ", losses " + " ".join(f"{loss:.6f}" for loss in losses)
        return line


def train_ranks(train: Callable[[Rank], None], options: argparse.Namespace) -> list[str]:
    """Trains on each rank of the process group that there is; with ``--compare`` without offload first.

    Returns:
        a line of each rank about the run.

    Raises:
        AssertionError: a loss or a gradient is another one with offload than without.
    """
    device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    if device.type != "cpu":
        device = torch.device(device.type, int(os.environ["LOCAL_RANK"]))
        torch.accelerator.set_device_index(device.index)
    windows = {"max_inflight_bytes": options.window, "prefetch_bytes": options.window}
    offload = eo.Offload(min_bytes=options.min_bytes, **windows) if options.offload else None
    rank = Rank(dist.get_rank(), dist.get_world_size(), device, options, offload)
    runs = [dataclasses.replace(rank, offload=None, steps=[])] * options.compare + [rank]
    for each in runs:
        torch.manual_seed(0)  # every rank begins with the same weights
        train(each)
    line = rank.used()
    if options.compare:
        if runs[0].steps != rank.steps:
            raise AssertionError(f"rank {rank.number}: with offload {rank.steps}, without {runs[0].steps}")
        count = sum(len(gradients) for _, gradients in rank.steps)
        line += f"; losses and {count} gradients are those without offload, bit for bit"
    if offload is not None:
        offload.close()
    lines: list[Any] = [None] * rank.size
    dist.all_gather_object(lines, line)
    return lines


def run(train: Callable[[Rank], None], options: argparse.Namespace) -> None:
    """Joins the ranks that torchrun has started, trains on each, and prints what it has used."""
    device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    dist.init_process_group(dist.get_default_backend_for_device(device))
    try:
        lines = train_ranks(train, options)
        if dist.get_rank() == 0:
            print(*lines, sep="\n")
        # A thread of gloo may hold tensors of the last exchange yet; should it let go of them while the interpreter
        # ends, it would abort the process. A group joins its threads once no mesh in a cycle refers to it.
        dist.barrier()
        gc.collect()
    finally:
        dist.destroy_process_group()


def parse(description: str | None, more: argparse.ArgumentParser | None = None) -> argparse.Namespace:
    """What the command line says.

    Args:
        description: of the program; its first line is shown.
        more: options of its own.
    """
    parser = argparse.ArgumentParser(
        description=(description or "").partition("\n")[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        parents=[] if more is None else [more],
    )
    parser.add_argument("--offload", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--compare", action="store_true", help="train without offload first; any other bit is an error")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--sequence", type=int, default=512)
    parser.add_argument("--batch", type=int, default=4, help="of each rank, or of all where they share a batch")
    parser.add_argument("--window", default="16MiB", help="what is on its way out, or brought back ahead, at one time")
    parser.add_argument("--min-bytes", default="256KiB", help="smaller tensors stay")
    return parser.parse_args()
