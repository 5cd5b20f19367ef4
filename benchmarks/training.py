"""What benchmarks share that train the demo's model: the model, its text, the offload, and what came out."""

from __future__ import annotations

import argparse
import hashlib
import os
from typing import Any

import torch
from torch import nn

import eager_offload as eo

from lm.data import Batch, batches, read_text
from lm.model import LanguageModel

__all__ = ["hash_gradients", "language_model", "on_a_quiet_cpu", "one_batch", "windows"]


def language_model(options: argparse.Namespace, *, checkpointing: bool = False) -> LanguageModel:
    """The model of ``--layers``, ``--width``, ``--heads`` and ``--sequence``, the same each time."""
    torch.manual_seed(0)
    return LanguageModel(options.layers, options.width, options.heads, options.sequence, checkpointing=checkpointing)


def one_batch(options: argparse.Namespace) -> Batch:
    """A batch of ``--batch`` and ``--sequence``, the same each time."""
    (batch,) = batches(read_text(), count=1, batch=options.batch, sequence=options.sequence, seed=1)
    return batch


def windows(options: argparse.Namespace, tier: str = "disk") -> dict[str, Any]:
    """Fields of a configuration as ``--window``, ``--min-bytes`` and ``--disk-path`` have them."""
    return {
        "tier": tier,
        "disk_path": options.disk_path if tier == "disk" else None,
        "min_bytes": options.min_bytes,
        "max_inflight_bytes": options.window,
        "prefetch_bytes": options.window,
    }


def on_a_quiet_cpu(options: argparse.Namespace) -> None:
    """Has this process train on ``--threads`` threads, in huge pages that go back to the system when they are freed."""
    os.environ["THP_MEM_ALLOC_ENABLE"] = "1"  # torch reads it when it first allocates; see the README on huge pages
    torch.set_num_threads(options.threads)
    eo.release_freed_memory()


def hash_gradients(model: nn.Module) -> str:
    """Of the bytes of every gradient."""
    digest = hashlib.sha256()
    for parameter in model.parameters():
        assert parameter.grad is not None
        digest.update(parameter.grad.view(torch.uint8).numpy(force=True).tobytes())
    return digest.hexdigest()[:16]
