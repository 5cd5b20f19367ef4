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
from benchmarks.common import MODEL, Report, command_line, drive, listed, parse, show
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
class Moment:
    """What there is right after forward, once every transfer is over, or at the end, when the graph is gone."""

    tier: str
    when: str
    #: Made by the forward and still there.
    live_bytes: int
    #: Of tensors as saved, and of storages, which views of them share.
    offloaded_bytes: int = 0
    moved_bytes: int = 0
    inflight_bytes: int = 0
    #: Resident by the library's own count, the newest bytes: not counted as offloaded.
    resident_bytes: int = 0
    #: In slots, and all that the tier holds.
    used_bytes: int = 0
    held_bytes: int = 0


def measure(tier: str, options: argparse.Namespace) -> tuple[list[Moment], str]:
    """One forward and backward of a new model: its moments, and a hash of the gradients."""
    model = language_model(options)
    (data,) = text(options)
    offload = None if tier == "none" else eo.Offload(**windows(options, tier))
    census = StorageCensus()

    def moment(when: str, *, synchronize: bool = True) -> Moment:
        if offload is None:
            return Moment(tier, when, census.live_bytes())
        # This lets go of what has arrived, so the live bytes are counted after it.
        stats = offload.stats(synchronize=synchronize)
        (offloader,) = offload._offloaders.all()
        (place,) = offloader.tiers
        return Moment(
            tier,
            when,
            census.live_bytes(),
            stats.offloaded_bytes,
            stats.bytes_out,
            offloader.inflight_bytes,
            offloader.resident_bytes,
            place.used_bytes,
            place.held_bytes,
        )

    with census, offload or nullcontext():
        loss = model(data.inputs, data.targets)
    census.forget([data.inputs, data.targets, *model.parameters()])
    moments = [moment("right after forward", synchronize=False), moment("once transfers are over")]
    loss.backward()
    del loss
    gc.collect()
    moments.append(moment("at the end"))
    if offload is not None:
        offload.close()
    return moments, hash_gradients(model)


def judge(report: Report, none: list[Moment], found: list[Moment]) -> dict[str, float]:
    settled, end = found[1], found[2]
    if not settled.offloaded_bytes:
        raise SystemExit("benchmarks.memory: nothing was offloaded, so there is nothing to measure")
    parts = {}
    for plain, ours in zip(none[:2], found, strict=False):
        freed = plain.live_bytes - ours.live_bytes
        for what, nbytes in (("offloaded", ours.offloaded_bytes), ("moved", ours.moved_bytes)):
            parts[f"{ours.when}, of {what}"] = freed / max(nbytes - ours.inflight_bytes, 1)
    for what, part in parts.items():
        report.at_least(f"{settled.tier}: freed {what} bytes", part, FREED)
    held, live = settled.held_bytes / settled.moved_bytes, end.live_bytes - none[2].live_bytes
    report.at_most(f"{settled.tier}: held / moved bytes", held, HELD)
    report.at_most(f"{settled.tier}: bytes in slots at the end", end.used_bytes, 0)
    report.at_most(f"{settled.tier}: bytes live at the end above no offload", live, 0)
    return {**parts, "held / moved": held}


def run(report: Report, options: argparse.Namespace) -> tuple[object, object]:
    warnings.filterwarnings("ignore", message=".*copies within host memory.*")
    found = {tier: measure(tier, options) for tier in ("none", *options.tiers)}
    none, exact = found["none"]
    summary = {}
    for tier in options.tiers:
        moments, gradients = found[tier]
        summary[tier] = judge(report, none, moments)
        report.at_most(f"{tier}: gradients that differ", float(gradients != exact), 0)
    show("Where the bytes are", (moment for moments, _ in found.values() for moment in moments))
    return found, summary


def options_of() -> argparse.Namespace:
    parser = command_line(__doc__, **MODEL)
    parser.add_argument("--tiers", type=listed(str), default="host,disk")
    return parse(parser, layers=2)


if __name__ == "__main__":
    sys.exit(drive("memory", options_of(), run, on_disk=True))
