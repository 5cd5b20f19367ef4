"""What benchmarks share that train the demo's model: the model, its text, the offload, memory, and what came out."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch

import eager_offload as eo

from lm.data import Batch, batches, read_text
from lm.model import LanguageModel


def language_model(options: argparse.Namespace, *, checkpointing: bool = False) -> LanguageModel:
    """The model of ``--layers``, ``--width``, ``--heads`` and ``--sequence``, the same each time."""
    torch.manual_seed(0)
    return LanguageModel(options.layers, options.width, options.heads, options.sequence, checkpointing=checkpointing)


def text(options: argparse.Namespace, count: int = 1, seed: int = 1) -> list[Batch]:
    """Batches of ``--batch`` and ``--sequence``, the same each time."""
    return batches(read_text(), count=count, batch=options.batch, sequence=options.sequence, seed=seed)


def tiny_text(count: int = 1) -> list[Batch]:
    """Batches that hardly have activations: a step on them loads code and makes gradients."""
    return batches(read_text(), count=count, batch=1, sequence=8, seed=0)


def windows(options: argparse.Namespace, tier: str = "disk") -> dict[str, Any]:
    """Fields of a configuration as ``--window``, ``--min-bytes`` and ``--disk-path`` have them."""
    return {
        "tier": tier,
        "disk_path": options.disk_path if tier == "disk" else None,
        "min_bytes": options.min_bytes,
        "max_inflight_bytes": options.window,
        "prefetch_bytes": options.window,
    }


def release_or_refuse() -> None:
    """Has freed memory go back to the system, without which peaks say nothing."""
    if not eo.release_freed_memory():
        raise SystemExit("this C library has no mallopt, so its memory cannot be compared")


def status_bytes(field: str) -> int:
    """A figure of this process by the kernel's own account, such as ``VmRSS`` or its peak, ``VmHWM``."""
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) << 10 for line in status if line.startswith(field + ":"))


def reset_peak() -> str:
    """Makes the kernel's peak start anew at what is resident now; how it was done, or that it could not be."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return "VmHWM since the process began"
    return "VmHWM, reset after the tiny step"
