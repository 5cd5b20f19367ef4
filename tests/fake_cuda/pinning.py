"""Training where the machine pins 40 MiB; ``FAKE_CUDA_PINNED_GIB`` says so. Raises what is wrong."""

from __future__ import annotations

import warnings
from contextlib import closing
from typing import Any

import torch
from torch import Tensor

import eager_offload as eo

MIB = 1 << 20
#: Each has a slab of its own, of which two can be pinned.
VALUES = [torch.randn(4 * MIB, generator=torch.Generator().manual_seed(seed)) for seed in range(6)]


class Saving(torch.autograd.Function):
    """Saves a copy of ``values`` on the device, and tells what backward gets of it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, values: Tensor, given: list[Tensor]) -> Tensor:
        ctx.save_for_backward(values.to("cuda"))
        ctx.given = given
        return x * 1

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]  # torch declares *grads
        ctx.given.append(ctx.saved_tensors[0].cpu())
        return gradient, None, None


def two_steps() -> None:
    """A step goes on where its third slab cannot be pinned: with the same bytes, and no kernel is blamed for it."""
    with (
        closing(eo.Offload(min_bytes=0, keep_last_bytes=0, max_inflight_bytes="1MiB", prefetch_bytes=0)) as offload,
        warnings.catch_warnings(record=True) as caught,
    ):
        warnings.simplefilter("always")
        for _ in range(2):
            y, given = torch.ones(8, device="cuda", requires_grad=True), list[Tensor]()
            with offload:
                for one in VALUES:  # each launches a kernel behind what was saved before it
                    y = Saving.apply(y, one, given)
                loss = y.sum()
            loss.backward()
            assert all(map(torch.equal, given, VALUES[::-1]))
            assert len(given) == len(VALUES)
        stats = offload.stats(synchronize=True)
    assert stats.bytes_out == stats.bytes_in == 2 * sum(one.nbytes for one in VALUES), stats
    assert stats.fallbacks == {"pageable": 4}, stats
    assert "4 times host memory could not be pinned" in str(stats), stats
    (told,) = [str(one.message) for one in caught]
    assert "16777216 bytes of host memory could not be pinned (cudaHostRegister of 16777216 bytes failed" in told, told


def on_a_full_device() -> None:
    """No error stays behind where the device has no memory left for a kernel."""
    torch.cuda.empty_cache()
    blocks, (_, total) = list[Tensor](), torch.cuda.mem_get_info()
    with closing(eo.Offload(host_budget="1GiB")) as offload:
        torch.cuda.set_per_process_memory_fraction(torch.cuda.memory_reserved() / total)
        try:
            while True:
                blocks.append(torch.empty(1, device="cuda"))
        except torch.OutOfMemoryError:
            pass
        offload.reserve("64MiB")
        torch.cuda._sleep(0)


if __name__ == "__main__":
    two_steps()
    on_a_full_device()
