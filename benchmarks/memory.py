"""Whether offloaded bytes are really freed, and how much room they take where they rest.

    python -m benchmarks.memory

A forward of the demo's model, without offload and with each tier. A dispatch mode takes note of every storage that the
forward makes, by weak reference, so a reference that is kept anywhere shows as live bytes. The bytes that are live
after forward must have fallen by what was offloaded.
"""

from __future__ import annotations

import argparse
import gc
import sys
import warnings
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import eager_offload as eo
from benchmarks.common import MIB, MODEL, Report, command_line, drive, listed, parse, show
from benchmarks.training import hash_gradients, language_model, text, windows

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
    model = language_model(options)
    (data,) = text(options)
    offload = eo.Offload(**windows(options, tier)) if tier is not None else None
    census = StorageCensus()
    with census, offload or nullcontext():
        loss = model(data.inputs, data.targets)
    census.forget([data.inputs, data.targets, *model.parameters()])
    before: dict[str, int] = {}
    if offload is not None:
        stats = offload.stats()  # this lets go of what has arrived, so the live bytes are counted after it
        (offloader,) = offload._offloaders.all()
        before = {
            "offloaded_at_once": stats.offloaded_bytes,
            "moved_at_once": stats.bytes_out,
            "inflight_at_once": offloader.inflight_bytes,
        }
    live_at_once = census.live_bytes()
    if offload is not None:
        stats = offload.stats(synchronize=True)
        (place,) = offloader.tiers
        before |= {
            "offloaded_settled": stats.offloaded_bytes,
            "moved_settled": stats.bytes_out,
            "resident_settled": offloader.resident_bytes,
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
    return Found(
        tier=tier or "none",
        live_at_once=live_at_once,
        live_settled=live_settled,
        live_at_end=census.live_bytes(),
        used_at_end=used_at_end,
        gradients_hash=hash_gradients(model),
        **before,
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


def run(report: Report, options: argparse.Namespace) -> tuple[object, object]:
    warnings.filterwarnings("ignore", message=".*copies within host memory.*")
    none, *results = [measure(tier, options) for tier in (None, *options.tiers)]
    summary = {found.tier: judge(report, none, found) for found in results}
    titles = {
        "live_at_once": "live right after forward",
        "live_settled": "live once transfers are over",
        "offloaded_settled": "offloaded (of tensors as saved)",
        "moved_settled": "moved (of storages)",
        "inflight_at_once": "in flight right after forward",
        "resident_settled": "newest, resident",
        "used_by_tier": "in slots",
        "held_by_tier": "held by the tier",
        "live_at_end": "live after backward",
    }
    columns = (none, *results)
    rows = (
        {"MiB": title, **{found.tier: getattr(found, name) / MIB for found in columns}}
        for name, title in titles.items()
    )
    show("Where the bytes are", rows)
    return columns, summary


def options_of() -> argparse.Namespace:
    parser = command_line(__doc__, **MODEL)
    parser.add_argument("--tiers", type=listed(str), default="host,disk")
    return parse(parser, layers=2)


if __name__ == "__main__":
    sys.exit(drive("memory", options_of(), run, on_disk=True))
