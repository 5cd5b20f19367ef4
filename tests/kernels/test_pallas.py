"""Bodies of JAX's Pallas compute what the reference does, bit for bit; ``make pallas`` installs what they need."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor

from eager_offload.codecs import BlockInt, TensorMeta
from eager_offload.kernels import (
    CapabilityError,
    Kernel,
    LaunchSpec,
    Signature,
    TensorSpec,
    as_torch_kernel,
)
from tests.kernels.test_kernels import BLOCKS, SPEC, kernel_of

jax = pytest.importorskip("jax", reason="the pallas extra is not installed: make pallas")

pallas_kernel = partial(kernel_of, impl="pallas")
# Bodies have no types here: their arguments are tensors, or references of JAX, which is optional.


def test_a_codec_in_pallas_has_the_bits_of_the_codec() -> None:
    """``BlockInt()``: its arithmetic is of a kind that no backend can round otherwise."""
    from jax import lax, numpy

    codec = BlockInt()

    def pack(x: Tensor, scales: Tensor, values: Tensor) -> None:
        layout = codec.layout(TensorMeta.of(x.view(-1)))
        codec.pack(x.view(-1), packed := x.new_empty(layout.nbytes, dtype=torch.uint8))
        for part, out in zip(layout.split(packed), (scales, values), strict=True):
            out.copy_(part.view(out.dtype).view(out.shape))

    def pack_in_pallas(x, scales, values):  # type: ignore[no-untyped-def]
        words = lax.bitcast_convert_type(numpy.max(numpy.abs(x[...]), axis=1), numpy.int32)
        exponent = words >> 23 & 255
        codes = numpy.maximum(exponent - 6 + ((words & 0x7FFFFF) > 0x7E0000), 1)
        codes = numpy.where(exponent == 255, 255, codes)
        inverse = lax.bitcast_convert_type((254 - numpy.minimum(codes, 253)) << 23, numpy.float32)
        scaled = numpy.where((codes == 255)[:, None], 0.0, x[...] * inverse[:, None])
        scales[...] = codes.astype(numpy.uint8)
        values[...] = numpy.round(scaled).astype(numpy.int8)

    blocks = BLOCKS[BLOCKS.abs().amax(1) > 1e-30].clone()
    blocks = torch.cat([blocks, -blocks.flip(1), torch.zeros(1, 64), torch.full((1, 64), torch.inf)])
    count = len(blocks)
    outputs = (TensorSpec((count,), torch.uint8), TensorSpec((count, 64), torch.int8))
    signature = Signature((TensorSpec((count, 64), torch.float32),), outputs)
    kernel = Kernel("packs_int8", signature, SPEC, {"torch": pack, "pallas": pack_in_pallas})
    expected = as_torch_kernel(kernel, "torch")(blocks)
    assert expected[0].unique().numel() > 3
    for impl in ("inductor", "pallas"):
        assert all(map(torch.equal, as_torch_kernel(kernel, impl)(blocks), expected)), impl


def test_a_grid_runs_a_program_for_each_of_its_blocks() -> None:
    from jax.experimental import pallas

    def count(x, y):  # type: ignore[no-untyped-def]
        place = pallas.program_id(0)
        y[place] = x[place] + place

    spec = TensorSpec((4,), torch.int32)
    body = {"torch": lambda x, y: y.copy_(x + torch.arange(4, dtype=torch.int32)), "pallas": count}
    kernel = Kernel("count", Signature((spec,), (spec,)), LaunchSpec((4, 1, 1), (1, 1, 1)), body)
    x = torch.tensor([5, 5, 5, 5], dtype=torch.int32)
    assert torch.equal(as_torch_kernel(kernel, "pallas")(x), as_torch_kernel(kernel, "torch")(x))


def copy(x, y):  # type: ignore[no-untyped-def]
    y[...] = x[...]


@pytest.mark.parametrize(
    ("dtype", "says"),
    [
        (torch.int64, r"JAX makes int32 of torch\.int64, silently: set jax_enable_x64"),
        (torch.complex32, r"takes no torch\.complex32: what is accepted are torch\.bool, whole"),
        (torch.bits8, r"takes no torch\.bits8: what is accepted are torch\.bool, whole"),
    ],
)
def test_numbers_that_jax_does_not_have_are_an_error(dtype: torch.dtype, says: str) -> None:
    with pytest.raises(CapabilityError, match=says):
        pallas_kernel(copy, TensorSpec((4,), dtype))(torch.empty(4, dtype=dtype))


def test_complex_numbers_are_computed() -> None:
    x = torch.tensor([1, 1j, -2, 0])
    assert torch.equal(pallas_kernel(copy, TensorSpec((4,), torch.complex64))(x), x)


def test_nothing_is_launched_where_no_element_is_written() -> None:
    empty, two = (TensorSpec((count,), torch.float32) for count in (0, 2))
    assert pallas_kernel(copy, empty)(torch.empty(0)).shape == (0,)
    assert pallas_kernel(copy, two, outputs=(empty,))(torch.empty(2)).shape == (0,)
    with pytest.raises(CapabilityError, match="takes no empty tensor"):
        pallas_kernel(copy, empty, outputs=(two,))(torch.empty(0))


def test_what_a_body_does_not_write_stays_and_an_alias_is_read_as_it_was_written() -> None:
    def first(x, y):  # type: ignore[no-untyped-def]
        y[0] = x[0]

    def twice(x, y):  # type: ignore[no-untyped-def]
        y[0] = x[1]
        y[1] = x[0]

    spec = TensorSpec((3,), torch.float32)
    for impl in ("torch", "pallas"):
        part, out = kernel_of(first, spec, impl=impl), torch.full((3,), 7.0)
        for number in (1.0, 2.0):
            assert part(torch.full((3,), number), out=out).tolist() == [number, 7, 7], impl
        alias = kernel_of(twice, spec, aliases=((0, 0),), impl=impl)
        assert alias(torch.tensor([1.0, 2, 3])).tolist() == [2, 2, 3], impl
