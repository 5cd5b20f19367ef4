"""What the examples of many ranks share: where a rank runs, what it is told, and what it tells."""

from __future__ import annotations

import argparse
import gc
import os
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

import eager_offload as eo

from lm.data import Batch, batches, read_text
from lm.meter import peak_resident_bytes

__all__ = ["Rank", "started"]

MIB = 1 << 20


@dataclass(frozen=True)
class Rank:
    """One process of the run."""

    number: int
    #: How many there are.
    size: int
    #: The accelerator's own, or the CPU.
    device: torch.device
    options: argparse.Namespace
    offload: eo.Offload | None

    def forward(self) -> AbstractContextManager[Any]:
        """What stands around every forward: the offload's own context, or nothing with ``--no-offload``."""
        return self.offload or nullcontext()

    def data(self, seed: int) -> list[Batch]:
        """A batch for each step, the same for the same ``seed``."""
        options = self.options
        drawn = batches(read_text(), count=options.steps, batch=options.batch, sequence=options.sequence, seed=seed)
        return [Batch(batch.inputs.to(self.device), batch.targets.to(self.device)) for batch in drawn]

    def print_step(self, losses: Sequence[float], writer: int = 0) -> None:
        """The rank ``writer`` prints a line for the step whose loss came last."""
        if self.number == writer:
            print(f"step {len(losses)}: loss {losses[-1]:.6f}", flush=True)

    def tell(self, losses: Sequence[float]) -> None:
        """The first rank prints what each has used, and the losses of those that know them."""
        if self.device.type == "cpu":
            peak = peak_resident_bytes()
        else:
            peak = torch.accelerator.max_memory_allocated(self.device)
        line = f"rank {self.number} on {self.device}: peak {peak / MIB:,.0f} MiB"
        if self.offload is not None:
            stats = self.offload.stats(synchronize=True)
            line += f", {stats.bytes_out / MIB:,.1f} MiB moved out, {stats.stall_seconds:.2f} s stalled"
        if losses:
            line += ", losses " + " ".join(f"{loss:.6f}" for loss in losses)
        lines: list[object] = [None] * self.size
        dist.all_gather_object(lines, line)
        if self.number == 0:
            print(*lines, sep="\n")


@contextmanager
def started(description: str | None, more: argparse.ArgumentParser | None = None) -> Iterator[Rank]:
    """Joins the ranks that torchrun has started, with what the command line says.

    Args:
        description: of the program; its first line is shown.
        more: options of its own.
    """
    options = parse(description, more)
    device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    if device.type != "cpu":
        device = torch.device(device.type, int(os.environ["LOCAL_RANK"]))
        torch.accelerator.set_device_index(device.index)
    dist.init_process_group(dist.get_default_backend_for_device(device))
    torch.manual_seed(0)  # every rank begins with the same weights
    windows = {"max_inflight_bytes": options.window, "prefetch_bytes": options.window}
    offload = eo.Offload(min_bytes=options.min_bytes, **windows) if options.offload else None
    try:
        yield Rank(dist.get_rank(), dist.get_world_size(), device, options, offload)
        # A thread of gloo may hold tensors of the last exchange yet; should it let go of them while the interpreter
        # ends, it would abort the process. A group joins its threads once no mesh in a cycle refers to it.
        dist.barrier()
        gc.collect()
    finally:
        dist.destroy_process_group()


def parse(description: str | None, more: argparse.ArgumentParser | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=(description or "").partition("\n")[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        parents=[] if more is None else [more],
    )
    parser.add_argument("--offload", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--sequence", type=int, default=512)
    parser.add_argument("--batch", type=int, default=4, help="of each rank, or of all where they share a batch")
    parser.add_argument("--window", default="16MiB", help="what is on its way out, or brought back ahead, at one time")
    parser.add_argument("--min-bytes", default="256KiB", help="smaller tensors stay")
    return parser.parse_args()
