"""Codecs are torch arithmetic that compilers trace, and what is compiled has the same bits."""

from __future__ import annotations

import pkgutil

import pytest
import torch
from torch import Tensor

from eager_offload import codecs
from eager_offload.codecs import BF16, BitMask, BlockFP8, BlockInt, Codec, Gather, Identity, Narrow, TensorMeta
from eager_offload.compile.cache_key import _sources

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
    (BlockInt(), NUMBERS),
    (BlockInt(), NUMBERS.bfloat16()),
    (BlockFP8(), NUMBERS),
]
#: Of each.
LAYOUTS = [layout for codec, x in CASES if (layout := codec.layout(TensorMeta.of(x))) is not None]


# In one graph each: a compiler takes as long for the first kernel as for a dozen. But packing and unpacking are apart:
# what is rounded in one graph, and widened again in the same, Inductor need not round.
def pack_all(xs: list[Tensor]) -> list[tuple[Tensor, Tensor | None]]:
    found = []
    for (codec, _), x, layout in zip(CASES, xs, LAYOUTS, strict=True):
        packed = torch.zeros(layout.nbytes, dtype=torch.uint8)
        found.append((packed, codec.pack(x, packed)))
    return found


def unpack_all(packed: list[Tensor]) -> list[Tensor]:
    found = []
    for (codec, x), one in zip(CASES, packed, strict=True):
        out = torch.empty_strided(x.size(), x.stride(), dtype=x.dtype)
        codec.unpack(one, out)
        found.append(out)
    return found


@pytest.mark.timeout(600)
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.long)])
def test_traced_codecs_have_the_bits_of_eager_ones(backend: str) -> None:
    torch.compiler.reset()
    xs = [x for _, x in CASES]
    expected = pack_all(xs)
    packed = [one for one, _ in expected]
    compiled_pack, compiled_unpack = (
        torch.compile(one, backend=backend, fullgraph=True) for one in (pack_all, unpack_all)
    )
    for (codec, x), *pair in zip(CASES, expected, compiled_pack(xs), strict=True):
        for one, two in zip(*pair, strict=True):
            assert (one is None) == (two is None), codec
            assert one is None or torch.equal(one, two), (codec, x.dtype)
    for (codec, x), one, two in zip(CASES, unpack_all(packed), compiled_unpack(packed), strict=True):
        assert torch.equal(one, two), (codec, x.dtype)
        assert one.stride() == two.stride() == x.stride(), codec


def test_every_source_of_codecs_is_part_of_what_compilers_key_on() -> None:
    names = {f"codecs/{one.name}.py" for one in pkgutil.iter_modules(codecs.__path__)}
    assert "codecs/names.py" in names
    assert names <= set(_sources())
