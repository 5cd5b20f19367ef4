"""What several parts take: models on meta, and windows."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from benchmarks.models import Shape, Stack
from eager_offload.machine import MACHINES

H200 = MACHINES["h200"]
#: Windows hold so many of the largest saved tensors.
WINDOW_TENSORS = 5


def large(shape: Shape, tokens: int) -> tuple[nn.Module, Tensor]:
    """A stack of blocks without bytes, and what it is given."""
    with torch.device("meta"):
        return Stack(shape), torch.empty(tokens, shape.width, dtype=torch.bfloat16)


def windows(tokens: int, hidden: int) -> dict[str, int]:
    size = WINDOW_TENSORS * 2 * tokens * hidden
    return {"max_inflight_bytes": size, "prefetch_bytes": size}
