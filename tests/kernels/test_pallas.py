"""Bodies of JAX's Pallas compute what the reference does, bit for bit; ``make pallas`` installs what they need."""

from __future__ import annotations

import gc

import pytest
import torch

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
from eager_offload.kernels.compiled import kept_count
from tests.kernels.int8 import int8_blocks
from tests.kernels.test_kernels import BLOCKS

jax = pytest.importorskip("jax", reason="the pallas extra is not installed: make pallas")

SPEC = LaunchSpec((1, 1, 1), (32, 1, 1))


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
    gc.collect()
    assert kept_count() == 0


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
