"""Steps on a stand-in whose copies and kernels take their time: what the host has waited, and what compute has.

    python -m tests.fake_cuda.on_cuda.stalling PROGRAM

Prints a line of JSON. A product of matrices takes FAKE_CUDA_GEMM_US, a copy of a tensor here 8 MiB / FAKE_CUDA_GBPS.
"""

from __future__ import annotations

import gc
import json
import sys

import torch
from torch import Tensor

import eager_offload as eo
from eager_offload.runtime.accelerator_events import AcceleratorEvent

N = 1448  # 8 MiB
FIELDS = {"tier": "host", "min_bytes": 1 << 20, "keep_last_bytes": 0}


def forward(x: Tensor, products: int) -> Tensor:
    """Saves six tensors, with ``products`` of compute behind each."""
    other, h = x.detach(), x
    for _ in range(6):
        h = h.sin()
        for _ in range(products):
            torch.mm(other, other)
    return h.sum()


def step(offload: eo.Offload, products: int) -> None:
    x = torch.randn(N, N, device="cuda").requires_grad_()
    with offload:
        loss = forward(x, products)
    loss.backward()


def host_waits() -> dict[str, float]:
    """For room in the window, while compute has products to do."""
    offload = eo.Offload(**FIELDS, max_inflight_bytes=N * N * 4, prefetch_bytes="1GiB")
    step(offload, 0)  # host memory is pinned
    offload.stats(synchronize=True)
    offload.reset_stats()
    x = torch.randn(N, N, device="cuda").requires_grad_()
    with offload:
        loss = forward(x, 1)
    stats = offload.stats(synchronize=True)
    del loss
    return {"stall": stats.stall_seconds, "host": stats.host_wait_seconds, "moved": stats.bytes_out}


def compute_waits() -> dict[str, float]:
    """For one reload after the other, none of which comes early."""
    offload = eo.Offload(**FIELDS, max_inflight_bytes="1GiB", prefetch_bytes=1)
    x = torch.randn(N, N, device="cuda").requires_grad_()
    with offload:
        loss = forward(x, 0)
    offload.stats(synchronize=True)
    offload.reset_stats()
    loss.backward()
    before = offload.stats()
    stats = offload.stats(synchronize=True)
    return {
        "early": before.stall_seconds,
        "stall": stats.stall_seconds,
        "host": stats.host_wait_seconds,
        "moved": stats.bytes_in,
    }


def many_steps() -> dict[str, float]:
    """In each compute waits for reloads; nobody asks for the stats."""
    offload, found = eo.Offload(**FIELDS, max_inflight_bytes="1GiB", prefetch_bytes=1), []
    for _ in range(2):
        for _ in range(60):
            step(offload, 0)
        gc.collect()
        found.append(sum(type(one) is AcceleratorEvent for one in gc.get_objects()))
    stats = offload.stats(synchronize=True)
    return {"first": found[0], "last": found[1], "stall": stats.stall_seconds, "moved": stats.bytes_in}


if __name__ == "__main__":
    print(json.dumps({"host": host_waits, "compute": compute_waits, "many": many_steps}[sys.argv[1]]()))
