"""A plan of what a codec cannot hold any more, on an accelerator, where its verdict arrives when the bytes do.

What is packed there, and when, is for ``tests/gpu/codec_scenarios.py`` to show, which run on this device too.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from tests.virtual_device import NAME

ROWS, WIDTH = 256, 128


def cast(around: AbstractContextManager[object], *, shift: float = 0.0) -> Tensor:
    """The gradient of what a cast of bfloat16 is made of; what is added to it changes no version."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(ROWS, WIDTH, generator=generator).bfloat16().to(NAME).requires_grad_()
    with around:
        h = x.float()
        h.data.add_(shift)
        loss = h.sin().exp().sum()
    del h
    torch.accelerator.synchronize()
    loss.backward()
    return x.grad.cpu()


def test_a_plan_of_what_a_codec_cannot_hold_any_more_is_followed_no_more(offloads: Any) -> None:
    offload = offloads(codec="lossless", step_plans=True)
    followed = []
    for shift in (0.0, 0.0, 1e-3, 1e-3, 1e-3):
        assert torch.equal(cast(nullcontext(), shift=shift), cast(offload, shift=shift))
        stats = offload.stats(synchronize=True)
        followed.append(stats.followed_forwards)
    assert followed[:4] == [0, 1, 2, 2], "the third follows, and finds out"
    assert stats.refused["narrow"] >= 2
    assert "write_failed" not in stats.demotions
