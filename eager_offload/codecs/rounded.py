"""Codecs that round to nearest, each within a bound that it states. The same numbers come back every time.

[Note: scales are powers of two]
As in the MX formats, a block of elements shares a scale that is a power of two, kept as the exponent of a ``float32``
(E8M0). So the products with it are exact, and no division, contraction of operations or backend can change a bit. The
price is a step of up to twice amax / 127. A block with an element that is not finite comes back as NaN, all of it: code
255. Scales stay so large that what comes back is a number of the tensor's own dtype, and none below its normal ones.

[Note: whole blocks]
The scale of an element is found by its number divided by the block's size. Inductor splits a loop over such a quotient
on a CPU without asking whether the size divides the length of the loop, and what is left over is never written
(``try_loop_split`` in ``torch/_inductor/codegen/cpp.py``, up to torch 2.13 at least). So what is compiled for a CPU
unpacks whole blocks, and all of them: its readers, which may be slices, are given memory.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from eager_offload.codecs.base import Codec, Elements, PackedLayout, TensorMeta, compact, flat, layout_of, parts_of

#: What a codec of blocks is for.
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
#: Elements that share a scale.
BLOCK = 64
#: The code of a block that is not finite, and that of the scale 1.
_NOT_FINITE, _ONE = 255, 127
_MANTISSA = (1 << 23) - 1
#: Of the largest integer, 127, and of the largest ``float8_e4m3fn``, 448: the exponent and the mantissa bits, as in a
#: ``float32``.
_MOST_INT8, _MOST_FP8 = (6, 0x7E0000), (8, 0x600000)


@dataclass(frozen=True)
class BF16(Elements):
    """``float32`` as the nearest ``bfloat16``, in half the bytes: within 1/256 of each magnitude.

    Rounds half to even; NaN stays NaN, and what is too large becomes infinite.
    """

    name: ClassVar[str] = "bf16"
    lossless: ClassVar[bool] = False
    held = torch.bfloat16


class _Blocks:
    """What codecs have in common that pack ``float32``, ``bfloat16`` and ``float16`` as a byte for each element and a
    scale for each block."""

    lossless: ClassVar[bool] = False

    def layout(self, meta: TensorMeta) -> PackedLayout | None:
        """Of a tensor that is not empty: whole blocks."""
        if meta.is_empty or meta.dtype not in _DTYPES:
            return None
        blocks = -(-meta.distinct // BLOCK)
        return parts_of(("scales", blocks), ("values", blocks * BLOCK))


@dataclass(frozen=True)
class BlockInt(_Blocks):
    """Integers of 8 bits with a scale for each block: within half a step, which is at most amax / 63 of a block."""

    name: ClassVar[str] = "int8"

    def pack(self, x: Tensor, out: Tensor) -> None:
        """Rounds half to even; see the note above for what is not finite."""
        codes, scaled = _scaled(_blocks(x), _MOST_INT8, _least(x.dtype, 0))
        values = torch.round(scaled).view(-1).to(torch.int8).view(torch.uint8)
        layout_of(self, x).join((codes.to(torch.uint8), values), out)

    def unpack(self, packed: Tensor, out: Tensor) -> None:
        """Writes the integers times their scales."""
        scales, values = layout_of(self, out).split(packed)
        _restore(values.view(torch.int8).to(torch.float32), scales, out)


@dataclass(frozen=True)
class BlockFP8(_Blocks):
    """``float8_e4m3fn`` with a scale for each block: within 1/16 of each magnitude, or 2**-10 steps of the block."""

    name: ClassVar[str] = "fp8"

    def pack(self, x: Tensor, out: Tensor) -> None:
        """Rounds half to even; see the note above for what is not finite."""
        codes, scaled = _scaled(_blocks(x), _MOST_FP8, _least(x.dtype, 9))
        values = scaled.view(-1).to(torch.float8_e4m3fn).view(torch.uint8)
        layout_of(self, x).join((codes.to(torch.uint8), values), out)

    def unpack(self, packed: Tensor, out: Tensor) -> None:
        """Writes the numbers times their scales."""
        scales, values = layout_of(self, out).split(packed)
        _restore(values.view(torch.float8_e4m3fn).to(torch.float32), scales, out)


def compiled_multiple(codec: Codec, device: torch.device) -> int:
    """Of how many elements a tensor must be a multiple for ``codec`` to be compiled: see [Note: whole blocks]."""
    return BLOCK if isinstance(codec, _Blocks) and device.type == "cpu" else 1


def _blocks(x: Tensor) -> Tensor:
    """The elements, as rows of ``float32``; the last row ends in zeros."""
    elements = flat(x).to(torch.float32)
    if elements.numel() % BLOCK:
        elements = torch.nn.functional.pad(elements, (0, -elements.numel() % BLOCK))
    return elements.view(-1, BLOCK)


def _least(dtype: torch.dtype, bits: int) -> int:
    """The smallest code with which a number that has ``bits`` bits behind the point comes back exactly."""
    return _ONE + bits + (-24 if dtype is torch.float16 else -126)


def _scaled(blocks: Tensor, most: tuple[int, int], least: int) -> tuple[Tensor, Tensor]:
    """The code of each block, and the blocks divided by their scales: 0 where they are not finite.

    It is that of the smallest scale with which a block is at most the largest number of a format.
    """
    words = blocks.abs().amax(1).view(torch.int32)
    exponent = (words >> 23) & 255
    codes = (exponent - most[0] + ((words & _MANTISSA) > most[1])).clamp(min=least)
    codes = torch.where(exponent == 255, _NOT_FINITE, codes)
    inverse = ((2 * _ONE - codes.clamp(max=2 * _ONE - 1)) << 23).view(torch.float32)
    return codes, torch.where((codes == _NOT_FINITE)[:, None], 0.0, blocks * inverse[:, None])


def _restore(numbers: Tensor, scales: Tensor, out: Tensor) -> None:
    """Writes ``numbers`` times their scales to ``out``."""
    codes = scales.to(torch.int32)
    scale = torch.where(codes == _NOT_FINITE, math.nan, (codes.clamp(max=2 * _ONE) << 23).view(torch.float32))
    places, largest = compact(out), torch.finfo(out.dtype).max
    # What is within half a step of the largest number may be rounded to more than that.
    values = (numbers.view(-1, BLOCK) * scale[:, None]).clamp(-largest, largest)
    places.copy_(values.view(-1)[: places.numel()].view(places.shape))
