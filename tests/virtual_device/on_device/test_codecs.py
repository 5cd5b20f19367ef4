"""Packing on an accelerator: on the stream of the pack, with a verdict that arrives when the bytes do."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import pytest
import torch
from torch import Tensor

from eager_offload import CodecPolicy, Offload
from eager_offload.codecs import TensorMeta
from tests.virtual_device import NAME, VirtualDevice

ROWS, WIDTH, LAYERS = 256, 128, 3


def gradients(around: AbstractContextManager[object], *, shift: float = 0.0) -> list[Tensor]:
    """Casts of bfloat16, masks of bool, and views that are gathered.

    Args:
        shift: is added to a cast in a way that changes no version.
    """
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(ROWS, WIDTH, generator=generator).to(torch.bfloat16).to(NAME)
    weights = [torch.randn(WIDTH, generator=generator).bfloat16().to(NAME).requires_grad_() for _ in range(LAYERS)]
    with around:
        for weight in weights:
            h = (x * weight).float()
            if shift:
                h.data.add_(shift)
            y = torch.where(h > 0, h * h, h.sin()) + (h[:, ::8] * h[:, ::8]).repeat(1, 8)
            x = y.to(torch.bfloat16)
        loss = x.float().square().mean()
    del h, y
    torch.accelerator.synchronize()
    return [one.cpu() for one in torch.autograd.grad(loss, weights)]


def lossless() -> Offload:
    return Offload(tier="host", keep_last_bytes=0, min_bytes=0, codec="lossless", step_plans=False)


def test_gradients_have_the_same_bits_and_fewer_bytes_travel(virtual: VirtualDevice) -> None:
    expected = gradients(nullcontext())
    assert all(one.isfinite().all() for one in expected)
    for regime in (nullcontext(), virtual.slow_links(latency=2e-3), virtual.slow_compute(1e-3)):
        offload = lossless()
        with regime:
            for _ in range(3):
                for one, two in zip(expected, gradients(offload), strict=True):
                    assert torch.equal(one, two)
        stats = offload.stats(synchronize=True)
        assert 2 * stats.packed_bytes["narrow"] == stats.coded_bytes["narrow"] > 0
        assert stats.packed_bytes["bitmask"] > 0
        assert stats.refused == {}
        assert stats.bytes_out < stats.offloaded_bytes
        offload.close()


def test_what_a_codec_cannot_hold_stays_once_its_bytes_have_arrived(virtual: VirtualDevice) -> None:
    expected = gradients(nullcontext(), shift=1e-3)
    offload = lossless()
    for one, two in zip(expected, gradients(offload, shift=1e-3), strict=True):
        assert torch.equal(one, two)
    stats = offload.stats(synchronize=True)
    assert stats.refused["narrow"] >= 1
    assert stats.kept_bytes["failed"] > 0
    assert "write_failed" not in stats.demotions, "nothing has failed"
    assert stats.saved_bytes == stats.offloaded_bytes + stats.shared_bytes + sum(stats.kept_bytes.values())
    offload.close()


def cast(around: AbstractContextManager[object], *, shift: float = 0.0) -> Tensor:
    """The gradient of what a cast of bfloat16 is made of; ``shift`` as above."""
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


def test_a_plan_of_what_a_codec_cannot_hold_any_more_is_followed_no_more(virtual: VirtualDevice) -> None:
    offload = Offload(tier="host", keep_last_bytes=0, min_bytes=0, codec="lossless", step_plans=True)
    followed = []
    for shift in (0.0, 0.0, 1e-3, 1e-3, 1e-3):
        assert torch.equal(cast(nullcontext(), shift=shift), cast(offload, shift=shift))
        stats = offload.stats(synchronize=True)
        followed.append(stats.followed_forwards)
    assert followed[:4] == [0, 1, 2, 2], "the third follows, and finds out"
    assert stats.refused["narrow"] >= 2
    assert "write_failed" not in stats.demotions
    offload.close()


def product(around: AbstractContextManager[object]) -> list[Tensor]:
    """The gradients of the weights are what backward was given of each layer's input."""
    generator = torch.Generator().manual_seed(0)
    x, *weights = (torch.randn(ROWS, WIDTH, generator=generator).to(NAME).requires_grad_() for _ in range(1 + LAYERS))
    with around:
        loss = sum((torch.sin(x + weight.detach()) * weight).sum() for weight in weights)
    torch.accelerator.synchronize()
    return [one.cpu() for one in torch.autograd.grad(loss, weights)]  # type: ignore[arg-type]


@pytest.mark.parametrize("codec", ["bf16", "int8", "fp8"])
@pytest.mark.parametrize("plans", [False, True])
def test_what_is_rounded_is_what_was_packed_in_order(virtual: VirtualDevice, codec: str, plans: bool) -> None:
    expected = product(nullcontext())
    rule = CodecPolicy.named(codec).rules["MulBackward0"]
    for regime in (nullcontext(), virtual.slow_links(latency=2e-3), virtual.slow_compute(1e-3)):
        offload = Offload(tier="host", keep_last_bytes=0, min_bytes=0, codec=codec, step_plans=plans)
        with regime:
            for step in range(5):
                for one, two in zip(expected, product(offload), strict=True):
                    bound = rule.error_bound(TensorMeta.of(one), float(one.abs().max())) if step else 0
                    assert float((one - two).abs().max()) <= bound
                offload.stats(synchronize=True)
        stats = offload.stats(synchronize=True)
        assert 0 < stats.packed_bytes[rule.name] <= stats.coded_bytes[rule.name] / 2
        assert stats.bytes_out < stats.offloaded_bytes
        assert stats.followed_forwards == 0 or plans
        offload.close()
