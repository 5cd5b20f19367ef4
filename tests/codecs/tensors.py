"""Tensors of every shape, stride and dtype, with every kind of value, and what comes back of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from torch import Tensor

from eager_offload.codecs import Codec, TensorMeta

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
ALL_DTYPES = (*FLOATS, torch.float64, torch.bool, torch.uint8, torch.int16, torch.int64, torch.complex64)


class Coded(NamedTuple):
    """A tensor there and back."""

    nbytes: int
    holds: bool
    back: Tensor


def coded(codec: Codec, x: Tensor) -> Coded:
    """``x`` packed and unpacked, with bytes around both ends that nothing may touch."""
    meta = TensorMeta.of(x)
    layout = codec.layout(meta)
    around = torch.full((layout.nbytes + 32,), 0xA5, dtype=torch.uint8)
    packed = around[16 : 16 + layout.nbytes]
    before = words(x)
    holds = codec.pack(x, packed)
    assert torch.equal(before, words(x)), "what is packed changes"
    assert bool((around[:16] == 0xA5).all())
    assert bool((around[16 + layout.nbytes :] == 0xA5).all())
    out = torch.empty_strided(meta.size, meta.stride, dtype=x.dtype)
    out.untyped_storage().copy_(
        torch.full((out.untyped_storage().nbytes(),), 0x5A, dtype=torch.uint8).untyped_storage()
    )
    codec.unpack(packed, out)
    assert out.stride() == meta.stride
    return Coded(layout.nbytes, holds is None or bool(holds), out)


def words(x: Tensor) -> Tensor:
    """The bytes of the elements, in order."""
    plain = x.view(torch.uint8) if x.dtype is torch.bool else x  # a copy of bool may have other bytes
    return torch.cat((plain.flatten(), plain.flatten()[:0])).view(torch.uint8)


def same_bits(one: Tensor, two: Tensor) -> bool:
    """Whether each element has the same bytes: NaN and zeros too."""
    return torch.equal(words(one), words(two))


@st.composite
def strided(draw: st.DrawFn, dtype: torch.dtype) -> Tensor:
    """A view with any of: fewer dimensions, holes, an order of its own, broadcast dimensions, an offset."""
    size = draw(st.lists(st.integers(1, 9), min_size=0, max_size=3))
    base = filled(draw, [3 * length + 1 for length in size], dtype)
    view = base
    for dim, length in enumerate(size):
        step, start = draw(st.integers(1, 3)), draw(st.integers(0, 1))
        view = view[(slice(None),) * dim + (slice(start, start + step * length, step),)][
            (slice(None),) * dim + (slice(0, length),)
        ]
    if view.dim() > 1:
        view = view.permute(draw(st.permutations(range(view.dim()))))
    if view.dim() and draw(st.booleans()):
        dim = draw(st.integers(0, view.dim() - 1))
        view = view.narrow(dim, 0, 1).expand(*view.shape)
    return view if draw(st.booleans()) else view.contiguous()


def filled(draw: Any, size: list[int], dtype: torch.dtype) -> Tensor:
    """Random bytes, so that for floats NaN payloads, infinities, denormals and both zeros are among them."""
    generator = torch.Generator().manual_seed(draw(st.integers(0, 1 << 32)))
    if dtype is torch.bool:
        return torch.rand(size, generator=generator) < draw(st.sampled_from((0.0, 0.1, 0.5, 1.0)))
    count = torch.Size(size).numel() * dtype.itemsize
    return torch.randint(256, (count,), dtype=torch.uint8, generator=generator).view(dtype).view(size)


def special(dtype: torch.dtype) -> Tensor:
    """Finite numbers that are hard to round: the largest, the smallest, powers of two and their neighbours."""
    found = torch.finfo(dtype)
    powers = torch.tensor(2.0, dtype=torch.float64) ** torch.arange(-149, 128, 3)
    near = torch.cat((powers, powers * (1 + found.eps), powers * (1 - found.eps / 2)))
    numbers = torch.cat((near, torch.tensor([found.max, found.max / 2, found.tiny, found.smallest_normal, 0.0])))
    typed = torch.cat((numbers, -numbers)).to(dtype)
    return typed[typed.isfinite()]


class Summed(torch.autograd.Function):
    """A product with sums of the first factor, which its forward makes and saves, as it does what it returns."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        sums = x.cumsum(-1)
        found = sums * weight
        ctx.save_for_backward(sums, weight, found)
        return found

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        sums, weight, found = ctx.saved_tensors
        return (gradient * weight).flip(-1).cumsum(-1).flip(-1), gradient * sums + 0 * found


#: What a product may save of a weight.
COPIES: dict[str, Callable[[Tensor], Tensor]] = {
    "a cast": lambda w: w.bfloat16(),
    "a cast and back": lambda w: w.bfloat16().float(),
    "a cast of a view": lambda w: w.t()[:, 8:].bfloat16(),
    "a part of a cast": lambda w: w.bfloat16().chunk(2, 1)[1].contiguous(),
    "a copy": lambda w: w.t().clone(memory_format=torch.contiguous_format),
    "padded": lambda w: F.pad(w, (0, 4)),
}
