"""Codecs that round stay within the bounds that their docstrings state, and do so to nearest."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from eager_offload.codecs import BF16, BlockFP8, BlockInt, Codec, TensorMeta
from eager_offload.codecs.names import ROUNDING
from tests.codecs.tensors import FLOATS, coded, same_bits, special, strided

BLOCKS: list[Codec] = [BlockInt(), BlockFP8()]
ALL = pytest.mark.parametrize("codec", ROUNDING.values(), ids=ROUNDING)
EACH_BLOCK = pytest.mark.parametrize("codec", BLOCKS, ids=[codec.name for codec in BLOCKS])
EACH_DTYPE = pytest.mark.parametrize("dtype", FLOATS, ids=str)


def distance(one: Tensor, two: Tensor) -> float:
    return float((one.double() - two.double()).abs().max())


def scale(amax: float, largest: int, dtype: torch.dtype, least: int) -> float:
    """The smallest power of two with which ``amax`` is at most ``largest``, but none below those of the dtype."""
    exponent = -math.inf if amax == 0 else math.ceil(math.log2(amax / largest))
    return float(2.0 ** max(exponent, (-24 if dtype is torch.float16 else -126) + least))


def bound(codec: Codec, x: Tensor) -> float:
    amax = float(x.abs().max())
    if isinstance(codec, BF16):
        return math.inf if amax > torch.finfo(torch.bfloat16).max else max(amax * 2.0**-8, 2.0**-134)
    if isinstance(codec, BlockInt):
        return scale(amax, 127, x.dtype, 0) / 2
    return max(amax / 16, scale(amax, 448, x.dtype, 9) * 2.0**-10)


def fits(codec: Codec, dtype: torch.dtype) -> bool:
    return codec.layout(TensorMeta((4,), (1,), dtype)) is not None


@ALL
@given(data=st.data())
def test_the_bound_holds(codec: Codec, data: Any) -> None:
    dtype = data.draw(st.sampled_from([one for one in FLOATS if fits(codec, one)]))
    x = data.draw(strided(dtype))
    x = torch.where(x.isfinite(), x, 0)
    if data.draw(st.booleans()):  # else the largest of them hides all others
        x = (x.double().sign() * 2.0 ** data.draw(st.integers(-130, 100)) * torch.rand(x.shape)).to(dtype)
        x = torch.where(x.isfinite(), x, 0)
    assert distance(coded(codec, x).back, x) <= bound(codec, x)


@EACH_DTYPE
@ALL
def test_the_bound_holds_for_numbers_that_are_hard_to_round(codec: Codec, dtype: torch.dtype) -> None:
    if not fits(codec, dtype):
        return
    numbers = special(dtype)[:, None]
    xs = torch.cat((numbers, numbers * torch.linspace(-1, 1, 63).to(dtype)), 1)  # a block each
    for x, back in zip(xs, coded(codec, xs).back, strict=True):
        assert distance(back, x) <= bound(codec, x), x[0]
        assert back.isfinite().all() or bound(codec, x) == math.inf


@EACH_BLOCK
@pytest.mark.parametrize("what", [float("nan"), float("inf"), float("-inf")])
def test_a_block_with_what_is_not_finite_comes_back_as_nan_and_no_other(codec: Codec, what: float) -> None:
    x = torch.randn(4, 192)
    x[1, 70] = what
    blocks = coded(codec, x).back.view(-1, 64).isnan()
    assert [number for number, block in enumerate(blocks) if bool(block.all())] == [(192 + 70) // 64]
    assert blocks.sum() == 64


def test_bf16_keeps_what_is_not_finite_and_the_signs_of_zeros() -> None:
    x = torch.tensor([float("nan"), float("inf"), float("-inf"), -0.0, 0.0])
    back = coded(BF16(), x).back
    assert same_bits(back[1:], x[1:])
    assert back[0].isnan()


@EACH_BLOCK
def test_numbers_of_the_format_come_back_exactly_and_others_as_the_nearest(codec: Codec) -> None:
    """Half to even: 0.5 and 2.5 go down, 1.5 goes up."""
    values = torch.arange(-127, 128).float()
    if isinstance(codec, BlockFP8):
        every = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
        values = every[every.isfinite()]
    most = values.max()
    for factor in (0.0, 1.0, 2.0**-20, 2.0**40):
        x = torch.cat([torch.cat((most[None], some)) for some in values.split(63)]) * factor
        assert torch.equal(coded(codec, x).back, x)
    if isinstance(codec, BlockInt):
        x = torch.tensor([127.0, 0.5, 1.5, 2.5, -0.5, 3.4])
        assert torch.equal(coded(codec, x).back, torch.tensor([127.0, 0.0, 2.0, 2.0, 0.0, 3.0]))


@ALL
def test_sizes_are_those_that_are_stated(codec: Codec) -> None:
    meta = TensorMeta((6400,), (1,), torch.float32)
    layout = codec.layout(meta)
    assert not codec.lossless
    assert sum(part.nbytes for part in layout.parts) == (12800 if isinstance(codec, BF16) else 6500)
    assert layout.nbytes == (12800 if isinstance(codec, BF16) else 6512), "see `parts_of`"
    assert all(part.start % 16 == 0 for part in layout.parts)
    assert codec.layout(TensorMeta((4, 0), (0, 1), torch.float32)) is None
    assert codec.layout(meta._replace(dtype=torch.float64)) is None
    assert codec.layout(meta._replace(dtype=torch.int32)) is None
