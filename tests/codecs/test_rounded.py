"""Codecs that round stay within the bound that they state, and stochastic rounding has no bias."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from eager_offload import ConfigError
from eager_offload.codecs import BF16, BlockFP8, BlockInt, Codec, TensorMeta
from tests.codecs.tensors import FLOATS, coded, same_bits, special, strided

INTS = [BlockInt(bits, rounding=rounding) for bits in (8, 4) for rounding in ("rtn", "sr")]
BLOCKS: list[Codec] = [*INTS, BlockFP8(), BlockInt(8, block=6), BlockFP8(block=2)]
ALL: list[Codec] = [BF16(), *BLOCKS]
DRAWS = 1024


def name_of(codec: Any) -> str:
    return f"{codec.name}-{getattr(codec, 'block', 0)}"


def distance(one: Tensor, two: Tensor) -> float:
    return float((one.double() - two.double()).abs().max())


def fits(codec: Codec, dtype: torch.dtype) -> bool:
    return codec.layout(TensorMeta((4,), (1,), dtype)) is not None


@pytest.mark.parametrize("codec", ALL, ids=name_of)
@given(data=st.data())
def test_the_bound_holds(codec: Codec, data: Any) -> None:
    dtype = data.draw(st.sampled_from([one for one in FLOATS if fits(codec, one)]))
    x = data.draw(strided(dtype))
    x = torch.where(x.isfinite(), x, 0)
    if data.draw(st.booleans()):  # else the largest of them hides all others
        x = (x.double().sign() * 2.0 ** data.draw(st.integers(-130, 100)) * torch.rand(x.shape)).to(dtype)
        x = torch.where(x.isfinite(), x, 0)
    amax = float(x.abs().max())
    bound = codec.error_bound(TensorMeta.of(x), amax)
    assert distance(coded(codec, x, seed=7).back, x) <= bound


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("codec", ALL, ids=name_of)
def test_the_bound_holds_for_numbers_that_are_hard_to_round(codec: Codec, dtype: torch.dtype) -> None:
    if not fits(codec, dtype):
        return
    for number in special(dtype):
        x = torch.cat((number[None], number[None] * torch.linspace(-1, 1, 63).to(dtype)))
        amax = float(x.abs().max())
        bound = codec.error_bound(TensorMeta.of(x), amax)
        back = coded(codec, x, seed=3).back
        assert distance(back, x) <= bound, number
        if isinstance(codec, BF16) and amax > torch.finfo(torch.bfloat16).max:
            assert bound == float("inf")
            continue
        assert back.isfinite().all()
        assert bound <= amax or amax < (1e-4 if dtype is torch.float16 else 1e-30), "a bound that says something"


@pytest.mark.parametrize("codec", ALL, ids=name_of)
def test_beyond_the_largest_number_there_is_no_bound(codec: Codec) -> None:
    meta = TensorMeta.of(torch.empty(64))
    for amax in (1e39, 10.0**300, float("inf")):
        assert codec.error_bound(meta, amax) == float("inf")
    largest = torch.finfo(torch.bfloat16 if isinstance(codec, BF16) else torch.float32).max
    assert codec.error_bound(meta, largest) < largest


@pytest.mark.parametrize("codec", BLOCKS, ids=name_of)
@pytest.mark.parametrize("what", [float("nan"), float("inf"), float("-inf")])
def test_a_block_with_what_is_not_finite_comes_back_as_nan_and_no_other(codec: Codec, what: float) -> None:
    x = torch.randn(4, 192)
    x[1, 70] = what
    back = coded(codec, x, seed=1).back.view(-1)
    at, block = 192 + 70, codec.block  # type: ignore[attr-defined]
    lost = torch.zeros(4 * 192, dtype=torch.bool)
    lost[at // block * block : (at // block + 1) * block] = True
    assert torch.equal(back.isnan(), lost)


def test_bf16_keeps_what_is_not_finite_and_the_signs_of_zeros() -> None:
    x = torch.tensor([float("nan"), float("inf"), float("-inf"), -0.0, 0.0])
    assert same_bits(coded(BF16(), x).back[1:], x[1:])
    assert coded(BF16(), x).back[0].isnan()


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("codec", BLOCKS, ids=name_of)
def test_zeros_come_back_as_zeros(codec: Codec, dtype: torch.dtype) -> None:
    assert not coded(codec, torch.zeros(100, dtype=dtype), seed=5).back.any()


@pytest.mark.parametrize("codec", INTS, ids=name_of)
def test_integers_that_fit_come_back_exactly(codec: BlockInt) -> None:
    most = 127 if codec.bits == 8 else 7
    for scale in (1.0, 2.0**-20, 2.0**40):
        x = torch.arange(-most, most + 1).float() * scale
        codec = BlockInt(codec.bits, block=2 * most + 2, rounding=codec.rounding)
        assert torch.equal(coded(codec, x, seed=9).back, x)


def bias(codec: Codec, x: Tensor) -> Tensor:
    """How many standard deviations of a mean of draws that mean is from ``x``, in steps of 1, by element."""
    draws = torch.stack([coded(codec, x, seed=seed).back.double() for seed in range(DRAWS)])
    chance = x.double() - x.double().floor()
    deviation = (chance * (1 - chance)).sqrt() / DRAWS**0.5
    return (draws.mean(0) - x.double()).abs() / deviation


@pytest.mark.parametrize("bits", [8, 4])
def test_the_mean_of_stochastic_rounding_is_what_was_packed(bits: int) -> None:
    most, generator = (127, 7)[bits == 4], torch.Generator().manual_seed(bits)
    x = torch.randint(-most, most, (4, 64), generator=generator) + torch.rand(4, 64, generator=generator) * 0.8 + 0.1
    x[:, 0] = most - 0.5
    assert BlockInt(bits, rounding="sr").unbiased
    assert float(bias(BlockInt(bits, rounding="sr"), x).max()) < 5
    assert float(bias(BlockInt(bits), x).max()) > 5, "else the test says nothing"


@pytest.mark.parametrize("bits", [8, 4])
def test_the_variance_of_stochastic_rounding_is_a_quarter_of_a_step_squared_at_most(bits: int) -> None:
    codec, x = BlockInt(bits, rounding="sr"), torch.rand(1, 64)
    draws = torch.stack([coded(codec, x, seed=seed).back.double() for seed in range(DRAWS)])
    step = codec.error_bound(TensorMeta.of(x), float(x.max()))
    assert float(draws.var(0).max()) < step**2 / 4 * (1 + 5 / DRAWS**0.5)


def test_draws_follow_from_the_seed_alone() -> None:
    """The user's generator has no part in them."""
    codec, x = BlockInt(8, rounding="sr"), torch.randn(256)
    torch.manual_seed(1)
    state = torch.get_rng_state()
    first = coded(codec, x, seed=1 << 40).back
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(2)
    assert same_bits(coded(codec, x, seed=1 << 40).back, first)
    assert not same_bits(coded(codec, x, seed=1 << 41).back, first), "both halves of a seed count"
    assert not same_bits(coded(codec, x, seed=1).back, coded(codec, x, seed=2).back)


def test_draws_of_different_elements_and_seeds_have_nothing_in_common() -> None:
    codec = BlockInt(8, rounding="sr")
    x = torch.full((1 << 14,), 0.5)
    x[::64] = 127.0  # a step of 1: every other element goes up or down
    draws = torch.stack([coded(codec, x, seed=seed).back for seed in range(8)])
    up = (draws[:, x == 0.5] > 0.5).double() * 2 - 1
    count = up.shape[1]
    for one in range(8):
        for shift in (0, 1, 7):
            for two in range(one if shift else one + 1, 8):
                together = float((up[one] * up[two].roll(shift)).mean())
                assert abs(together) < 5 / count**0.5, (one, two, shift)


def test_stochastic_rounding_asks_for_a_seed() -> None:
    with pytest.raises(ValueError, match="takes a seed"):
        coded(BlockInt(8, rounding="sr"), torch.ones(4))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: BlockInt(2), "bits=2 is not accepted"),
        (lambda: BlockInt(True), "bits=True is not accepted"),
        (lambda: BlockInt(8.0), "bits=8.0 is not accepted"),
        (lambda: BlockInt(8, block=64.0), "block=64.0 is not accepted"),
        (lambda: BlockInt(8, block=0), "block=0 is not accepted"),
        (lambda: BlockInt(8, block=7), "block=7 is not accepted"),
        (lambda: BlockInt(8, block=True), "block=True is not accepted"),
        (lambda: BlockFP8(block="64"), "block='64' is not accepted"),
        (lambda: BlockInt(8, rounding="up"), "rounding='up' is not accepted"),
    ],
)
def test_what_a_codec_cannot_be_made_of_is_an_error(make: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make()


@pytest.mark.parametrize("codec", ALL, ids=name_of)
def test_sizes_are_those_that_are_stated(codec: Codec) -> None:
    meta = TensorMeta((1000,), (1,), torch.float32)
    layout = codec.layout(meta)
    assert not codec.lossless
    ends = [part.start + part.nbytes for part in layout.parts]
    padded = -(-ends[-1] // 16) * 16  # what has several parts: see `parts_of`
    assert layout.nbytes == (ends[-1] if len(ends) == 1 else padded)
    assert all(part.start % 16 == 0 for part in layout.parts)
    assert codec.layout(TensorMeta((4, 0), (0, 1), torch.float32)) is None
    assert codec.layout(meta._replace(dtype=torch.float64)) is None
    assert codec.layout(meta._replace(dtype=torch.int32)) is None


def test_an_int8_block_of_64_takes_65_bytes() -> None:
    layout = BlockInt(8).layout(TensorMeta((6400,), (1,), torch.bfloat16))
    assert sum(part.nbytes for part in layout.parts) == 6500
