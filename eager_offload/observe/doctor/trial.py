"""Whether offloading does its work here: a step with it, and the same step without."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from eager_offload.config import OffloadConfig
from eager_offload.observe.doctor.findings import SelfTest
from eager_offload.offload import Offload

__all__ = ["self_test"]

_LAYERS, _WIDTH, _ROWS = 4, 256, 4096
#: Sizes that have everything move.
_SMALL = {"max_inflight_bytes": 8 << 20, "prefetch_bytes": 8 << 20, "keep_last_bytes": 0, "min_bytes": 1 << 20}


def self_test(device_name: str, settings: Mapping[str, Any]) -> SelfTest:
    """Trains four layers for a step with everything offloaded, in small windows, and compares the gradients.

    Raises:
        OffloadError: offloading failed.
    """
    device = torch.device(device_name)
    generator = torch.Generator(device)  # not torch's own, whose numbers belong to whoever trains
    weights = [
        (torch.randn(_WIDTH, _WIDTH, device=device, generator=generator) / 16).requires_grad_() for _ in range(_LAYERS)
    ]
    rows = torch.randn(_ROWS, _WIDTH, device=device, generator=generator)
    offload = Offload(OffloadConfig.from_fields({**settings, **_SMALL}))
    try:
        with torch.inference_mode(False), torch.enable_grad():
            expected = torch.autograd.grad(_loss(rows, weights), weights)
            with offload:
                loss = _loss(rows, weights)
            given = torch.autograd.grad(loss, weights)
        equal = all(map(torch.equal, given, expected))
        return SelfTest(device_name, equal, offload.stats().bytes_out)
    finally:
        offload.close()


def _loss(rows: Tensor, weights: list[Tensor]) -> Tensor:
    for weight in weights:
        rows = F.gelu(rows @ weight)
    return rows.square().sum()
