"""What one run leaves behind, and the fingerprints by which runs are compared."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import nn

from lm.meter import Sample

__all__ = ["Result", "hash_losses", "hash_parameters"]


@dataclass(frozen=True)
class Result:
    """One mode's run."""

    mode: str
    losses: list[float]
    step_seconds: list[float]
    #: Bytes in use once model, gradients, optimizer and code are loaded, before the first step.
    model_bytes: int
    #: The most bytes ever in use.
    peak_bytes: int
    #: Sums over all steps.
    offloaded_bytes: int
    stall_seconds: float
    #: SHA-256 of all parameters after the last step, and of the losses of all steps.
    parameters_hash: str
    losses_hash: str
    samples: list[Sample]

    @property
    def activation_bytes(self) -> int:
        """What training itself adds at its peak."""
        return self.peak_bytes - self.model_bytes

    @property
    def step_time(self) -> float:
        """The median, in seconds."""
        return median(self.step_seconds)

    @property
    def steps(self) -> int:
        return len(self.losses)

    def as_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    def save(self, path: Path) -> None:
        path.write_text(json.dumps(self.as_dict()))

    @classmethod
    def load(cls, path: Path) -> Result:
        fields = json.loads(path.read_text())
        return cls(**{**fields, "samples": [Sample(**sample) for sample in fields["samples"]]})


def hash_parameters(model: nn.Module) -> str:
    """SHA-256 of every parameter's name and bytes."""
    digest = hashlib.sha256()
    for name, parameter in model.named_parameters():
        digest.update(name.encode())
        digest.update(parameter.detach().cpu().contiguous().view(torch.uint8).numpy())
    return digest.hexdigest()


def hash_losses(losses: list[float]) -> str:
    """SHA-256 of the losses, to the last bit."""
    return hashlib.sha256(" ".join(loss.hex() for loss in losses).encode()).hexdigest()
