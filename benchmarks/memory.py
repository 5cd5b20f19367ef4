"""Whether offloaded bytes are really freed, and how much room they take where they rest.

    python -m benchmarks.memory

A forward of the demo's model, without offload and with each tier. A dispatch mode takes note of every storage that the
forward makes, by weak reference, so a reference that is kept anywhere shows as live bytes. The bytes that are live
after forward must have fallen by what was offloaded.
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import sys
import warnings
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import eager_offload as eo
from benchmarks.common import MIB, Report, add_common_options, console, disk, positive, table

from lm.data import batches, read_text
from lm.model import LanguageModel

#: The least part of the offloaded bytes that has to be freed, and the most room that they may take.
FREED, HELD = 0.99, 1.05


class StorageCensus(TorchDispatchMode):
    """Knows every storage that operators made while it was active, without keeping any."""

    sees_offloading = True

    def __init__(self) -> None:
        super().__init__()
        self._storages: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self._note(leaf.untyped_storage())
        return result

    def _note(self, storage: torch.UntypedStorage) -> None:
        known = self._storages.get(storage._cdata)
        if known is None or known[0].expired():
            self._storages[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())

    def forget(self, tensors: list[Tensor]) -> None:
        """Leaves storages out that were there before."""
        for tensor in tensors:
            self._storages.pop(tensor.untyped_storage()._cdata, None)

    def live_bytes(self) -> int:
        return sum(nbytes for reference, nbytes in self._storages.values() if not reference.expired())


@dataclass(frozen=True)
class Found:
    """One forward and its backward. All numbers but the hash are bytes."""

    tier: str
    #: Made by the forward and still there: right after it, and once every transfer is over.
    live_at_once: int
    live_settled: int
    #: At the same two moments: of tensors as saved, and of storages, which views of them share.
    offloaded_at_once: int = 0
    offloaded_settled: int = 0
    moved_at_once: int = 0
    moved_settled: int = 0
    inflight_at_once: int = 0
    #: Resident by the library's own count, the newest bytes: not counted as offloaded.
    resident_settled: int = 0
    used_by_tier: int = 0
    held_by_tier: int = 0
    #: After backward, when the graph is gone.
    live_at_end: int = 0
    used_at_end: int = 0
    gradients_hash: str = ""


def measure(tier: str | None, options: argparse.Namespace) -> Found:
    """One forward and backward of a new model."""
    torch.manual_seed(0)
    model = LanguageModel(options.layers, options.width, options.heads, options.sequence, checkpointing=False)
    data = batches(read_text(), count=1, batch=options.batch, sequence=options.sequence, seed=1)[0]
    offload = make_offload(tier, options) if tier is not None else None
    census = StorageCensus()
    with census, offload or nullcontext():
        loss = model(data.inputs, data.targets)
    census.forget([data.inputs, data.targets, *model.parameters()])
    before: dict[str, int] = {}
    if offload is not None:
        stats = offload.stats()  # this lets go of what has arrived, so the live bytes are counted after it
        (lane,) = offload._offloaders.all()
        before = {
            "offloaded_at_once": stats.offloaded_bytes,
            "moved_at_once": stats.bytes_out,
            "inflight_at_once": lane.inflight_bytes,
        }
    live_at_once = census.live_bytes()
    if offload is not None:
        stats = offload.stats(synchronize=True)
        (place,) = lane.tiers
        before |= {
            "offloaded_settled": stats.offloaded_bytes,
            "moved_settled": stats.bytes_out,
            "resident_settled": lane.resident_bytes,
            "used_by_tier": place.used_bytes,
            "held_by_tier": place.held_bytes,
        }
    live_settled = census.live_bytes()
    loss.backward()
    del loss
    gc.collect()
    used_at_end = 0
    if offload is not None:
        offload.stats(synchronize=True)
        used_at_end = place.used_bytes
        offload.close()
    gradients = hashlib.sha256()
    for parameter in model.parameters():
        assert parameter.grad is not None
        gradients.update(parameter.grad.numpy())
    return Found(
        tier=tier or "none",
        live_at_once=live_at_once,
        live_settled=live_settled,
        live_at_end=census.live_bytes(),
        used_at_end=used_at_end,
        gradients_hash=gradients.hexdigest(),
        **before,
    )


def make_offload(tier: str, options: argparse.Namespace) -> eo.Offload:
    return eo.Offload(
        tier=tier,
        disk_path=options.disk_path if tier == "disk" else None,
        min_bytes=options.min_bytes,
        max_inflight_bytes=options.window,
        prefetch_bytes=options.window,
    )


def judge(report: Report, none: Found, found: Found) -> dict[str, float]:
    if not found.offloaded_settled:
        raise SystemExit("benchmarks.memory: nothing was offloaded, so there is nothing to measure")
    at_once, settled = none.live_at_once - found.live_at_once, none.live_settled - found.live_settled
    parts = {
        "right after forward, of offloaded": at_once / max(found.offloaded_at_once - found.inflight_at_once, 1),
        "right after forward, of moved": at_once / max(found.moved_at_once - found.inflight_at_once, 1),
        "once transfers are over, of offloaded": settled / found.offloaded_settled,
        "once transfers are over, of moved": settled / found.moved_settled,
    }
    for what, part in parts.items():
        report.at_least(f"{found.tier}: freed {what} bytes", part, FREED)
    held = found.held_by_tier / found.moved_settled
    report.at_most(f"{found.tier}: held / moved bytes", held, HELD)
    report.at_most(f"{found.tier}: bytes in slots at the end", found.used_at_end, 0)
    report.at_most(f"{found.tier}: bytes live at the end above no offload", found.live_at_end - none.live_at_end, 0)
    report.at_most(f"{found.tier}: gradients that differ", float(found.gradients_hash != none.gradients_hash), 0)
    return {**parts, "held / moved": held}


def show(results: list[Found]) -> None:
    shown = table("MiB", *(found.tier for found in results))
    for name, title in (
        ("live_at_once", "live right after forward"),
        ("live_settled", "live once transfers are over"),
        ("offloaded_settled", "offloaded (of tensors as saved)"),
        ("moved_settled", "moved (of storages)"),
        ("inflight_at_once", "in flight right after forward"),
        ("resident_settled", "newest, resident"),
        ("used_by_tier", "in slots"),
        ("held_by_tier", "held by the tier"),
        ("live_at_end", "live after backward"),
    ):
        shown.add_row(title, *(f"{getattr(found, name) / MIB:,.1f}" for found in results))
    console.print(shown)


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    warnings.filterwarnings("ignore", message=".*copies within host memory.*")
    report = Report("memory", options)
    if "disk" in options.tiers:
        report.environment["disk"] = disk(options.disk_path)
    none, *results = [measure(tier, options) for tier in (None, *options.tiers)]
    summary = {found.tier: judge(report, none, found) for found in results}
    show([none, *results])
    return report.finish([asdict(found) for found in (none, *results)], summary)


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").partition("\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--tiers", type=partial(str.split, sep=","), default="host,disk")
    parser.add_argument("--layers", type=positive, default=8)
    parser.add_argument("--width", type=positive, default=768)
    parser.add_argument("--heads", type=positive, default=12)
    parser.add_argument("--sequence", type=positive, default=1024)
    parser.add_argument("--batch", type=positive, default=4)
    parser.add_argument("--window", default="64MiB", help="max_inflight_bytes and prefetch_bytes")
    parser.add_argument("--min-bytes", default="1MiB")
    add_common_options(parser)
    options = parser.parse_args(arguments)
    if options.quick:
        options.layers = min(options.layers, 2)
    return options


if __name__ == "__main__":
    sys.exit(main())
