"""Bodies of JAX's Pallas compute what the reference does, bit for bit; ``make pallas`` installs what they need."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from eager_offload.codecs import BlockInt, TensorMeta
from eager_offload.kernels import (
    CapabilityError,
    Kernel,
    LaunchSpec,
    Scalar,
    Signature,
    TensorSpec,
    as_torch_kernel,
    compiled,
)
from tests.kernels.int8 import int8_blocks
from tests.kernels.test_kernels import BLOCKS, kept_count
from tests.threads import collect

jax = pytest.importorskip("jax", reason="the pallas extra is not installed: make pallas")

SPEC = LaunchSpec((1, 1, 1), (32, 1, 1))
# Bodies have no types here: their arguments are tensors, or references of JAX, which is optional.


def test_all_implementations_agree_bit_for_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled, "_kept", {})
    normal = BLOCKS[BLOCKS.abs().amax(1) > 1e-30]  # XLA takes denormals for zeros on a CPU
    kernel = int8_blocks(len(normal))
    expected = as_torch_kernel(kernel, "torch")(normal)
    for impl in ("inductor", "pallas"):
        assert all(map(torch.equal, as_torch_kernel(kernel, impl)(normal), expected)), impl
    launch = as_torch_kernel(kernel, "pallas")
    launch(normal)
    assert kept_count() == 1
    del launch
    collect()
    assert kept_count() == 0


def test_a_codec_in_pallas_has_the_bits_of_the_codec() -> None:
    """``BlockInt(8)``: its arithmetic is of a kind that no backend can round otherwise."""
    from jax import lax, numpy

    codec = BlockInt(8)

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


def test_inputs_at_any_address_and_outputs_of_the_caller() -> None:
    count = 8
    kernel = int8_blocks(count)
    memory = torch.randn(count * 64 + 1)
    for x in (memory[1:].view(count, 64), memory[:-1].view(count, 64)):
        codes, exponents = torch.empty(count, 64, dtype=torch.int8), torch.empty(count, 1, dtype=torch.int8)
        assert as_torch_kernel(kernel, "pallas")(x, out=(codes, exponents))[0] is codes
        assert torch.equal(codes, as_torch_kernel(kernel, "torch")(x)[0])


def test_what_is_read_and_written_and_what_is_an_alias() -> None:
    spec = TensorSpec((8,), torch.float32)

    def add(x, factor, y):  # type: ignore[no-untyped-def]
        y[...] = y[...] + x[...] * factor[...]

    def negate(x, y):  # type: ignore[no-untyped-def]
        y[...] = -x[...]

    adds = Kernel("adds", Signature((spec, Scalar(torch.float32)), (), (spec,)), SPEC, {"torch": add, "pallas": add})
    negates = Kernel("n", Signature((spec,), (spec,), aliases=((0, 0),)), SPEC, {"torch": negate, "pallas": negate})
    y = torch.ones(8)
    for number in (1, 2.5):
        assert as_torch_kernel(adds, "pallas")(torch.ones(8), number, y) is y
    assert torch.equal(y, torch.full((8,), 4.5))
    assert as_torch_kernel(negates, "pallas")(y) is y
    assert torch.equal(y, torch.full((8,), -4.5))


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


def test_numbers_that_jax_would_change_in_silence_are_an_error() -> None:
    spec = TensorSpec((4,), torch.int64)
    kernel = Kernel("k", Signature((spec,), (spec,)), SPEC, {"torch": print, "pallas": print})
    with pytest.raises(CapabilityError, match=r"JAX makes int32 of torch\.int64, silently: set jax_enable_x64"):
        as_torch_kernel(kernel, "pallas")(torch.arange(4))


def test_numbers_that_jax_does_not_have_are_an_error_and_complex_ones_are_computed() -> None:
    def copy(x, y):  # type: ignore[no-untyped-def]
        y[...] = x[...]

    def copying(dtype: torch.dtype) -> Any:
        spec = TensorSpec((4,), dtype)
        return as_torch_kernel(
            Kernel("k", Signature((spec,), (spec,)), SPEC, {"torch": copy, "pallas": copy}), "pallas"
        )

    for dtype in (torch.complex32, torch.bits8):
        with pytest.raises(CapabilityError, match=rf"takes no {dtype}: what is accepted are torch\.bool, whole"):
            copying(dtype)(torch.empty(4, dtype=dtype))
    x = torch.tensor([1, 1j, -2, 0])
    assert torch.equal(copying(torch.complex64)(x), x)


def test_a_parameter_is_taken_under_no_grad() -> None:
    def add(x, y):  # type: ignore[no-untyped-def]
        y[...] = y[...] + x[...]

    spec = TensorSpec((8,), torch.float32)
    adds = as_torch_kernel(Kernel("k", Signature((spec,), (), (spec,)), SPEC, {"torch": add, "pallas": add}), "pallas")
    x, y = (torch.nn.Parameter(torch.ones(8)) for _ in range(2))
    with torch.no_grad():
        assert adds(x, y) is y
    assert y.tolist() == [2.0] * 8


def test_nothing_is_launched_where_no_element_is_written() -> None:
    def copy(x, y):  # type: ignore[no-untyped-def]
        y[...] = x[...]

    def copying(given: int, written: int) -> Any:
        specs = [TensorSpec((count,), torch.float32) for count in (given, written)]
        bodies = {"torch": copy, "pallas": copy}
        return as_torch_kernel(Kernel("k", Signature(specs[:1], specs[1:]), SPEC, bodies), "pallas")

    assert copying(0, 0)(torch.empty(0)).shape == (0,)
    assert copying(2, 0)(torch.empty(2)).shape == (0,)
    with pytest.raises(CapabilityError, match="takes no empty tensor"):
        copying(0, 2)(torch.empty(0))


def test_what_a_body_does_not_write_stays_and_an_alias_is_read_as_it_was_written() -> None:
    def first(x, y):  # type: ignore[no-untyped-def]
        y[0] = x[0]

    def twice(x, y):  # type: ignore[no-untyped-def]
        y[0] = x[1]
        y[1] = x[0]

    spec = TensorSpec((3,), torch.float32)
    bodies = [{"torch": body, "pallas": body} for body in (first, twice)]
    part = Kernel("part", Signature((spec,), (spec,)), SPEC, bodies[0])
    alias = Kernel("alias", Signature((spec,), (spec,), aliases=((0, 0),)), SPEC, bodies[1])
    for impl in ("torch", "pallas"):
        out = torch.full((3,), 7.0)
        for number in (1.0, 2.0):
            assert as_torch_kernel(part, impl)(torch.full((3,), number), out=out).tolist() == [number, 7, 7], impl
        assert as_torch_kernel(alias, impl)(torch.tensor([1.0, 2, 3])).tolist() == [2, 2, 3], impl
