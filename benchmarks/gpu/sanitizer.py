"""torch's stream sanitizer over training with offload. The stage runs with ``TORCH_CUDA_SANITIZER=1``."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

import eager_offload as eo
from benchmarks.gpu.results import Job

FIELDS = {
    "tier": "host",
    "min_bytes": "1MiB",
    "keep_last_bytes": 0,
    "max_inflight_bytes": "8MiB",
    "prefetch_bytes": "8MiB",
}
#: More fields, and how many side streams.
WAYS: dict[str, tuple[dict[str, str], int]] = {
    "one stream": ({}, 0),
    "two streams": ({}, 2),
}


def sanitizer(job: Job) -> None:
    """Trains in several ways; says of each whether it is clean, and how many copies the sanitizer has seen."""
    seen = _count_copies()
    wrong = []
    for name, (fields, count) in WAYS.items():
        seen.clear()
        offload = eo.Offload(**FIELDS, **fields)
        try:
            _train(offload, [torch.cuda.Stream() for _ in range(count)] or [torch.cuda.current_stream()])
            verdict = "clean"
        except Exception as error:  # the sanitizer's, which says what is not ordered
            verdict = f"{type(error).__name__}: {error}"[:1500]
        stats = offload.stats(synchronize=True)
        offload.close()
        job.add(
            what="sanitizer",
            name=name,
            verdict=verdict,
            copies_seen=len(seen),
            bytes_seen=sum(seen),
            bytes_moved=stats.bytes_out + stats.bytes_in,
        )
        wrong += [] if verdict == "clean" and sum(seen) >= stats.bytes_out + stats.bytes_in > 0 else [name]
    if wrong:
        raise SystemExit(f"not clean, or copies that the sanitizer did not see: {', '.join(wrong)}")


def _count_copies() -> list[int]:
    """Returns a list that the bytes of each copy between host and device which the sanitizer sees are added to."""
    from torch.cuda._sanitizer import CUDASanitizerDispatchMode  # here: it has torch trace the device from then on

    seen: list[int] = []
    dispatch = CUDASanitizerDispatchMode.__torch_dispatch__

    def counting(self: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.copy_.default and args[0].device != args[1].device:
            seen.append(args[0].nbytes)
        return dispatch(self, func, types, args, kwargs)

    CUDASanitizerDispatchMode.__torch_dispatch__ = counting
    return seen


def _train(offload: eo.Offload, streams: list[torch.cuda.Stream]) -> None:
    """Takes steps on one stream after the other, each of which waits for the one before."""
    weights = [torch.randn(512, 512, device="cuda").requires_grad_() for _ in range(6)]
    x, home = torch.randn(2048, 512, device="cuda"), torch.cuda.current_stream()
    for number in range(8):
        stream = streams[number % len(streams)]
        stream.wait_stream(home)
        with torch.cuda.stream(stream):
            with offload:
                h = x
                for weight in weights:
                    h = F.gelu(h @ weight)
                loss = h.square().mean()
            loss.backward()
            del h, loss
            for weight in weights:
                weight.grad = None
        home.wait_stream(stream)
