"""H12, H13, H21: every kind of tensor that autograd may save, ragged batches among them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.testing._internal.common_dtype import all_types_complex_float8_and

from tests.hazards.backends import Backend
from tests.hazards.functions import saving, watching
from tests.hazards.programs import Around, leaf, named, noise, one_step, same_gradients, trained


class Payload(NamedTuple):
    name: str
    make: Callable[[], Tensor]
    #: Why it stays; ``None`` for what moves.
    kept: str | None = None


_OTHERS = (torch.bool, torch.half, torch.bfloat16, torch.uint16, torch.uint32, torch.uint64, torch.float8_e8m0fnu)
DTYPES = all_types_complex_float8_and(torch.complex32, *_OTHERS)
PAYLOADS = [
    *(Payload(str(dtype)[6:], lambda dtype=dtype: noise(16, 16).mul(40).to(dtype)) for dtype in DTYPES),
    Payload("a view as float8", lambda: noise(16, 16).view(torch.float8_e5m2)),
    Payload("a slice of float8", lambda: noise(64, 64).to(torch.float8_e4m3fn)[3]),
    Payload("a column of bool", lambda: (noise(64, 64) > 0)[:, 5]),
    Payload("of no dimension", lambda: noise(4).sum()),
    Payload("of no dimension in a base", lambda: noise(64, 64)[3, 5]),
    Payload("of one element", lambda: noise(1, 1, 1)),
    Payload("NaN and infinity", lambda: torch.tensor([float("nan"), float("inf"), -0.0, 0.0, 1e-45] * 8)),
    Payload("a conjugate", lambda: noise(16, 16).to(torch.complex64).mul(1 + 2j).conj()),
    Payload("a conjugate of a slice", lambda: noise(64, 64).to(torch.complex64).mul(1 + 2j)[7].conj()),
    Payload("a conjugate transposed", lambda: noise(16, 32).to(torch.complex64).mul(1 + 2j).mH),
    Payload("a negative view", lambda: noise(16, 16).to(torch.complex64).mul(1 + 2j).conj().imag),
    Payload("a negative view of a slice", lambda: noise(64, 64).to(torch.complex64).mul(1 + 2j)[5].conj().imag),
    Payload("a real part", lambda: noise(16, 16).to(torch.complex64).mul(1 + 2j).real),
    Payload("an offset of one byte", lambda: torch.arange(255, dtype=torch.uint8)[1:]),
    Payload("an offset of two bytes", lambda: noise(16, 16).to(torch.bfloat16).view(-1)[1:]),
    Payload("of a longer storage", lambda: torch.empty(0).set_(noise(64).untyped_storage(), 3, (20,), (1,))),
    Payload("zero-size", lambda: noise(0), "small"),
    Payload("zero-size with a shape", lambda: noise(4, 0, 3), "small"),
    Payload("zero-size of a base", lambda: noise(16, 16)[3:3], "small"),
    Payload("sparse coo", lambda: noise(8, 8).relu().to_sparse(), "layout"),
    Payload("sparse csr", lambda: noise(8, 8).relu().to_sparse_csr(), "layout"),
    Payload("sparse csc", lambda: noise(8, 8).relu().to_sparse_csc(), "layout"),
    Payload("sparse bsr", lambda: noise(8, 8).relu().to_sparse_bsr((2, 2)), "layout"),
    Payload("nested jagged", lambda: torch.nested.nested_tensor([noise(3), noise(5)], layout=torch.jagged)),
    Payload("quantized", lambda: torch.quantize_per_tensor(noise(16, 16), 0.1, 3, torch.quint8), "layout"),
    Payload(
        "quantized by channel",
        lambda: torch.quantize_per_channel(noise(4, 16), torch.rand(4), torch.zeros(4), 0, torch.qint8),
        "layout",
    ),
    Payload("meta", lambda: torch.empty(16, 16, device="meta"), "layout"),
    Payload("a parameter", lambda: nn.Parameter(noise(16, 16)), "parameter"),
    Payload("a buffer", lambda: nn.Buffer(noise(16, 16))),
]


def values_of(tensor: Tensor) -> list[Tensor]:
    """Strided tensors that tell all that there is to tell of any tensor."""
    if tensor.is_quantized:
        return [tensor.int_repr(), tensor.dequantize()]
    if tensor.is_nested:
        return [part.clone() for part in tensor.unbind()]
    if tensor.layout is torch.sparse_coo:
        tensor = tensor.coalesce()
        return [tensor.indices(), tensor.values()]
    if tensor.layout is not torch.strided:
        return [tensor.to_dense()]
    return [] if tensor.is_meta else [tensor.clone()]


@pytest.mark.sampled(3, quick=True)
@pytest.mark.parametrize("case", PAYLOADS, ids=named)
def test_h12_every_kind_of_tensor_comes_back_or_stays_for_a_reason(case: Payload, backend: Backend) -> None:
    def look(seen: list[list[object]], payload: Tensor) -> None:
        strided = payload.layout is torch.strided and not payload.is_nested
        kind = [str(payload.dtype), str(payload.layout), str(payload.device), payload.is_conj(), payload.is_neg()]
        sizes = [*payload.size(), *payload.stride()] if strided else []
        seen.append([*values_of(payload.detach()), *kind, *sizes])

    @one_step
    def program() -> Sequence[object]:
        x, seen = leaf(32, 32), []
        # Something that moves stands beside it, so that moving nothing does not pass.
        return watching((x * 3).tanh(), partial(look, seen), case.make()), x, seen

    for stats in same_gradients(program, backend):
        if case.kept is not None:
            assert case.kept in stats.kept_bytes or case.name.startswith("zero"), stats
            assert stats.offloaded_tensors == 1
        else:
            assert stats.offloaded_tensors == 2


def test_h12_nested_tensors_in_the_operators_that_take_them(backend: Backend) -> None:
    @one_step
    def program() -> tuple[Tensor, ...]:
        x = leaf(8, 16)
        h = (x * 2).tanh()
        nested = torch.nested.as_nested_tensor([h[:3] * 2, h[3:] * 3])
        y = torch.nested.to_padded_tensor(F.gelu(nested.sin() * nested).relu().softmax(-1), 0.0)
        return y.square(), x

    for stats in same_gradients(program, backend):
        assert stats.kept_bytes["layout"] > 0


def test_h12_inference_tensors(backend: Backend) -> None:
    """Autograd refuses to save them, with offload as without; what it does not save stays out of the way."""

    def program(offload: Around) -> object:
        x, heard = leaf(16, 16), []
        with torch.inference_mode():
            constant = noise(16, 16) * 2
        with offload:
            y = (x * 3).tanh().exp()
            try:
                y * constant
            except RuntimeError as error:
                heard.append(str(error))
            z = y + constant
        del y
        z.sum().backward()
        return x.grad, heard

    same_gradients(program, backend)


def test_h12_empty_tensors_are_not_taken_for_each_other(backend: Backend) -> None:
    """They all have the address 0."""

    @one_step
    def program() -> Sequence[object]:
        x, seen = leaf(32, 32), []
        return saving((x * 2).tanh(), noise(0), noise(0, 7), noise(3, 0).t(), (x * 2)[:0], seen=seen), x, seen

    same_gradients(program, backend)


# -- ragged batches ---------------------------------------------------------------------------------------------------


WIDTH, HEADS = 16, 2


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)
        self.qkv = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        q, k, v = (part(h).unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in self.qkv)
        mixed = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(-2)
        x = x + self.out(mixed)
        return x + self.down(F.gelu(self.up(x)))


@pytest.mark.filterwarnings("ignore:.*nested tensors:UserWarning")
def test_h13_h21_a_transformer_of_ragged_batches(backend: Backend) -> None:
    """They are wrappers of their values and offsets."""

    def program(offload: Around) -> object:
        torch.manual_seed(0)
        model = nn.Sequential(Block(), Block())

        def loss(step: int) -> Tensor:
            lengths = ((3, 9, 5), (7, 2), (4, 4, 8, 1))[step]
            parts = [leaf(length, WIDTH, seed=10 * step + length, grad=False) for length in lengths]
            return model(torch.nested.nested_tensor(parts, layout=torch.jagged)).values().square().mean()

        return trained(model.parameters(), offload, loss, torch.optim.AdamW)

    for stats in same_gradients(program, backend):
        # Of each block and batch at least the input, the norm's result, and both sides of the activation.
        assert stats.bytes_out >= 0.9 * 2 * (17 + 9 + 17) * (2 + 2 * 2) * WIDTH * 4
