"""Codecs are torch arithmetic that compilers trace, and what is compiled has the same bits."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from eager_offload.codecs import BF16, BitMask, BlockFP8, BlockInt, Codec, Gather, Identity, Narrow, TensorMeta

NUMBERS = torch.randn(24, 100, generator=torch.Generator().manual_seed(0))
MASK = NUMBERS > 0.3
CASES: list[tuple[Codec, Tensor]] = [
    (Identity(), NUMBERS),
    (Gather(), NUMBERS[:, ::3]),
    (Narrow(), NUMBERS.bfloat16().float()),
    (Narrow(), NUMBERS),
    (BitMask(), MASK),
    (BitMask(), torch.where(MASK, 1.25, 0.0)[:, 1:]),
    (BF16(), NUMBERS),
    *((BlockInt(bits, rounding=rounding), NUMBERS) for bits in (8, 4) for rounding in ("rtn", "sr")),
    (BlockInt(8), NUMBERS.bfloat16()),
    (BlockFP8(), NUMBERS),
]


EVERY_CODEC = pytest.mark.parametrize(
    ("codec", "x"), CASES, ids=lambda one: getattr(one, "name", str(getattr(one, "dtype", one)))
)


@EVERY_CODEC
def test_traced_codecs_have_the_bits_of_eager_ones(codec: Codec, x: Tensor) -> None:
    check(codec, x, "aot_eager")


@pytest.mark.timeout(600)
@pytest.mark.sampled(5, quick=True)
@EVERY_CODEC
def test_compiled_codecs_have_the_bits_of_eager_ones(codec: Codec, x: Tensor) -> None:
    check(codec, x, "inductor")


def check(codec: Codec, x: Tensor, backend: str) -> None:
    torch.compiler.reset()
    layout = codec.layout(TensorMeta.of(x))
    assert layout is not None

    # In graphs of their own: what is rounded in one, and widened again in the same, Inductor need not round.
    def pack(x: Tensor, seed: Tensor) -> tuple[Tensor, Tensor | None]:
        packed = torch.zeros(layout.nbytes, dtype=torch.uint8)
        return packed, codec.pack(x, packed, seed)

    def unpack(packed: Tensor) -> Tensor:
        out = torch.empty_strided(x.size(), x.stride(), dtype=x.dtype)
        codec.unpack(packed, out)
        return out

    seed = torch.tensor([123456789012345])
    packed, holds = pack(x, seed)
    expected = (packed, holds, unpack(packed))
    compiled_pack, compiled_unpack = (torch.compile(one, backend=backend, fullgraph=True) for one in (pack, unpack))
    actual = (*compiled_pack(x, seed), compiled_unpack(packed))
    for one, two in zip(expected, actual, strict=True):
        assert (one is None) == (two is None)
        if one is not None and two is not None:
            assert torch.equal(one, two)
            assert one.stride() == two.stride()
