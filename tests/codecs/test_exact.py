"""What is packed by a codec that changes no bit comes back to the last bit, or is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from eager_offload.codecs import BitMask, Codec, Gather, Identity, Narrow, TensorMeta
from tests.codecs.tensors import ALL_DTYPES, coded, same_bits, strided

MASKS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


@given(st.data(), st.sampled_from(ALL_DTYPES))
def test_gather_brings_back_any_view_and_identity_contiguous_ones(data: Any, dtype: torch.dtype) -> None:
    x = data.draw(strided(dtype))
    found = coded(Gather(), x)
    assert same_bits(found.back, x)
    assert found.nbytes == TensorMeta.of(x).distinct * x.itemsize
    assert (Identity().layout(TensorMeta.of(x)) is not None) == x.is_contiguous()
    found = coded(Identity(), x.contiguous())
    assert same_bits(found.back, x)
    assert found.nbytes == x.contiguous().nbytes


@given(st.data())
def test_narrow_holds_what_is_bfloat16_and_refuses_the_rest(data: Any) -> None:
    x = data.draw(strided(torch.float32))
    if data.draw(st.booleans()):
        x = (x.contiguous().view(torch.int32) & -(1 << 16)).view(torch.float32).view_as(x)
    found = coded(Narrow(), x)
    held = bool((x.contiguous().view(torch.int32) & 0xFFFF == 0).all())
    assert found.holds == held
    assert not held or same_bits(found.back, x)
    assert 2 * found.nbytes == TensorMeta.of(x).distinct * 4


def test_narrow_holds_every_bfloat16_and_no_other_bit() -> None:
    """Of NaN any payload, quiet and signalling."""
    x = (torch.arange(1 << 16, dtype=torch.int32) << 16).view(torch.float32)
    found = coded(Narrow(), x)
    assert found.holds
    assert same_bits(found.back, x)
    for bit in range(16):
        one = x.view(torch.int32).clone()
        one[12345] |= 1 << bit
        assert not coded(Narrow(), one.view(torch.float32)).holds


@given(st.data(), st.sampled_from(MASKS))
def test_bitmask_holds_two_values_and_no_third(data: Any, dtype: torch.dtype) -> None:
    """NaN with a payload, infinities and zeros of both signs are values like any."""
    words = {8: torch.int64, 4: torch.int32, 2: torch.int16}[dtype.itemsize]
    values = data.draw(st.lists(st.integers(-(1 << 15), (1 << 15) - 1), min_size=2, max_size=2))
    mask = data.draw(strided(torch.bool))
    x = torch.where(mask, *(torch.tensor(value << (8 * dtype.itemsize - 16), dtype=words) for value in values))
    found = coded(BitMask(), x.view(dtype))
    assert found.holds
    assert same_bits(found.back, x.view(dtype))
    if x.numel() > 2 and values[0] != values[1] and bool(mask.any()) and not bool(mask.all()):
        third = x.contiguous().view(-1).clone()
        third[data.draw(st.integers(0, x.numel() - 1))] ^= 1
        held = third.unique().numel() <= 2
        assert coded(BitMask(), third.view(dtype)).holds == held


@given(st.data())
def test_bitmask_takes_an_eighth_of_bool(data: Any) -> None:
    x = data.draw(strided(torch.bool))
    found = coded(BitMask(), x)
    assert found.holds
    assert same_bits(found.back, x)
    assert found.nbytes == -(-TensorMeta.of(x).distinct // 8)


@pytest.mark.parametrize("count", [1, 8, 9, 4096])
@pytest.mark.parametrize("byte", [2, 128, 255])
def test_bitmask_refuses_a_bool_that_is_neither(count: int, byte: int) -> None:
    """Torch takes any byte that is not 0 for true, and saves it as it is."""
    x = torch.ones(count, dtype=torch.uint8)
    x[-1] = byte
    assert not coded(BitMask(), x.view(torch.bool)).holds


def test_bitmask_looks_at_the_first_elements() -> None:
    x = torch.zeros(10_000)
    x[5000:] = torch.arange(5000)
    assert BitMask().may_hold(x), "what comes later is found when all of it is packed"
    assert not coded(BitMask(), x).holds
    x[7], x[9] = 1, 2
    assert not BitMask().may_hold(x)


@pytest.mark.parametrize(
    ("codec", "others"),
    [
        (Identity(), ()),
        (Gather(), ()),
        (Narrow(), (torch.float64, torch.bfloat16, torch.int32, torch.complex64, torch.bool)),
        (BitMask(), (torch.uint8, torch.int64, torch.complex64, torch.float8_e4m3fn)),
    ],
    ids=str,
)
def test_exact_codecs_say_so_and_what_they_are_not_for(codec: Codec, others: tuple[torch.dtype, ...]) -> None:
    assert codec.lossless
    assert codec.layout(TensorMeta((4, 0), (0, 1), torch.float32)) is None, "an empty tensor"
    assert [dtype for dtype in others if codec.layout(TensorMeta((4,), (1,), dtype)) is not None] == []
