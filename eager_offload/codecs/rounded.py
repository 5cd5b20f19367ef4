"""Codecs that round, each within a bound that it states.

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
import struct
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from eager_offload.codecs.base import Codec, Elements, PackedLayout, TensorMeta, compact, flat, layout_of, parts_of
from eager_offload.codecs.seeds import SIGNED_GOLDEN
from eager_offload.errors import ConfigError

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
#: The code of a block that is not finite, and that of the scale 1.
_NOT_FINITE, _ONE = 255, 127
_MANTISSA = (1 << 23) - 1


@dataclass(frozen=True)
class BF16(Elements):
    """``float32`` as the nearest ``bfloat16``, in half the bytes.

    Rounds half to even; NaN stays NaN, and what is too large becomes infinite.
    """

    name = "bf16"
    lossless = False
    unbiased = False
    held = torch.bfloat16

    def error_bound(self, meta: TensorMeta, amax: float) -> float:
        """Half a step, which is 1/256 of the magnitude; infinite beyond the largest ``bfloat16``."""
        if amax > torch.finfo(torch.bfloat16).max:
            return math.inf
        return max(amax * 2.0**-8, 2.0**-134)


@dataclass(frozen=True)
class BlockInt:
    """Integers of 8 or 4 bits with a scale for each block of elements.

    Args:
        bits: 8 or 4.
        block: elements that share a scale; even.
        rounding: ``"rtn"``, to the nearest, half to even; or ``"sr"``, stochastic: up with the probability that makes
            the mean exact (to 2**-24 of a step), with a variance of at most a quarter of the step squared.

    Raises:
        ConfigError: for others.
    """

    bits: int = 8
    block: int = 64
    rounding: Literal["rtn", "sr"] = "rtn"
    lossless = False

    def __post_init__(self) -> None:
        bits: object = self.bits
        if not isinstance(bits, int) or bits not in (4, 8):  # 8.0 would have another name, which is none
            raise ConfigError(f"bits={self.bits!r} is not accepted: BlockInt takes 8 or 4 bits")
        if self.rounding not in ("rtn", "sr"):
            raise ConfigError(f'rounding={self.rounding!r} is not accepted: BlockInt takes "rtn" or "sr"')
        _check_block("BlockInt", self.block)

    @property
    def name(self) -> str:
        """Such as ``int8`` or ``int4_sr``."""
        return f"int{self.bits}" + ("_sr" if self.rounding == "sr" else "")

    @property
    def unbiased(self) -> bool:
        """Whether rounding is stochastic."""
        return self.rounding == "sr"

    @property
    def _most(self) -> tuple[int, int]:
        """The exponent and the mantissa bits of the largest integer, as in a ``float32``."""
        return (6, 0x7E0000) if self.bits == 8 else (2, 0x600000)  # 127 and 7

    def layout(self, meta: TensorMeta) -> PackedLayout | None:
        """Of ``float32``, ``bfloat16`` and ``float16`` that is not empty: whole blocks."""
        return _block_layout(meta, self.block, self.bits)

    def pack(self, x: Tensor, out: Tensor, seed: Tensor | None = None) -> None:
        """Holds any values; see the note above for what is not finite.

        Raises:
            ValueError: stochastic rounding without a ``seed``.
        """
        if self.unbiased and seed is None:
            raise ValueError(f"{self.name} rounds stochastically: it takes a seed")
        blocks = _blocks(x, self.block)
        codes, scaled = _scaled(blocks, self._most, _least(x.dtype, 0))
        if seed is None or not self.unbiased:
            numbers = torch.round(scaled)
        else:
            below = torch.floor(scaled)
            # 1 where the part above is the larger. Not by a comparison: Inductor writes its mask byte by byte on a CPU.
            numbers = below + torch.ceil(scaled - below - _uniform(scaled, seed))
        numbers = numbers.view(-1)
        if self.bits == 8:
            values = numbers.to(torch.int8).view(torch.uint8)
        else:
            halves = (numbers + 8).to(torch.uint8).view(-1, 2)
            values = halves[:, 0] + halves[:, 1] * 16
        layout_of(self, x).join((codes.to(torch.uint8), values), out)

    def unpack(self, packed: Tensor, out: Tensor) -> None:
        """The integers times their scales."""
        scales, values = layout_of(self, out).split(packed)
        if self.bits == 8:
            numbers = values.view(torch.int8).to(torch.float32)
        else:
            numbers = torch.stack((values & 15, values >> 4), 1).view(-1).to(torch.float32) - 8.0
        _restore(numbers, scales, self.block, out)

    def error_bound(self, meta: TensorMeta, amax: float) -> float:
        """Half a step of a block with ``amax`` in it, a whole one where rounding is stochastic."""
        step = _step(amax, self._most, _least(meta.dtype, 0))
        return step if self.unbiased else step / 2


@dataclass(frozen=True)
class BlockFP8:
    """``float8_e4m3fn`` with a scale for each block of elements.

    Args:
        block: elements that share a scale; even.

    Raises:
        ConfigError: for another number.
    """

    block: int = 64
    name = "fp8"
    lossless = False
    unbiased = False

    def __post_init__(self) -> None:
        _check_block("BlockFP8", self.block)

    def layout(self, meta: TensorMeta) -> PackedLayout | None:
        """Of ``float32``, ``bfloat16`` and ``float16`` that is not empty: whole blocks."""
        return _block_layout(meta, self.block, 8)

    def pack(self, x: Tensor, out: Tensor, seed: Tensor | None = None) -> None:
        """Rounds half to even; see the note above for what is not finite."""
        codes, scaled = _scaled(_blocks(x, self.block), _MOST_FP8, _least(x.dtype, 9))
        values = scaled.view(-1).to(torch.float8_e4m3fn).view(torch.uint8)
        layout_of(self, x).join((codes.to(torch.uint8), values), out)

    def unpack(self, packed: Tensor, out: Tensor) -> None:
        """The numbers times their scales."""
        scales, values = layout_of(self, out).split(packed)
        _restore(values.view(torch.float8_e4m3fn).to(torch.float32), scales, self.block, out)

    def error_bound(self, meta: TensorMeta, amax: float) -> float:
        """1/16 of the magnitude, or half the smallest step of a block with ``amax`` in it."""
        return max(amax * 2.0**-4, _step(amax, _MOST_FP8, _least(meta.dtype, 9)) * 2.0**-10)


def compiled_multiple(codec: Codec, device: torch.device) -> int:
    """Of how many elements a tensor must be a multiple for ``codec`` to be compiled: see [Note: whole blocks]."""
    return codec.block if isinstance(codec, BlockInt | BlockFP8) and device.type == "cpu" else 1


#: Of the largest ``float8_e4m3fn``, 448: see ``BlockInt._most``.
_MOST_FP8 = (8, 0x600000)


def _check_block(what: str, block: object) -> None:
    if not isinstance(block, int) or block < 2 or block % 2:
        raise ConfigError(f"block={block!r} is not accepted: {what} takes an even number of elements")


def _block_layout(meta: TensorMeta, block: int, bits: int) -> PackedLayout | None:
    if meta.is_empty or meta.dtype not in _DTYPES:
        return None
    blocks = -(-meta.distinct // block)
    return parts_of(("scales", blocks), ("values", blocks * block * bits // 8))


def _blocks(x: Tensor, block: int) -> Tensor:
    """The elements, as rows of ``float32``; the last row ends in zeros."""
    elements = flat(x).to(torch.float32)
    if elements.numel() % block:
        elements = torch.nn.functional.pad(elements, (0, -elements.numel() % block))
    return elements.view(-1, block)


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


def _restore(numbers: Tensor, scales: Tensor, block: int, out: Tensor) -> None:
    """Writes ``numbers`` times their scales to ``out``."""
    codes = scales.to(torch.int32)
    scale = torch.where(codes == _NOT_FINITE, math.nan, (codes.clamp(max=2 * _ONE) << 23).view(torch.float32))
    places, largest = compact(out), torch.finfo(out.dtype).max
    # What is within half a step of the largest number may be rounded to more than that.
    values = (numbers.view(-1, block) * scale[:, None]).clamp(-largest, largest)
    places.copy_(values.view(-1)[: places.numel()].view(places.shape))


def _step(amax: float, most: tuple[int, int], least: int) -> float:
    """The scale of a block with ``amax`` in it: as in ``_scaled``, without a tensor, since each unpack asks.

    Infinite beyond the largest ``float32``, which no element of such a block is.
    """
    if amax > torch.finfo(torch.float32).max:
        return math.inf
    word: int = struct.unpack("=i", struct.pack("=f", amax))[0]
    exponent = word >> 23 & 255
    return float(2.0 ** (max(exponent - most[0] + ((word & _MANTISSA) > most[1]), least) - _ONE))


def _uniform(like: Tensor, seed: Tensor) -> Tensor:
    """Numbers from 0 to 1 - 2**-24, of 24 bits each, from ``seed`` and the number of the element alone.

    A compiler computes a value anew wherever it is used. So little is done to the seed: a product with 2**64 divided by
    the golden ratio (Fibonacci hashing), of which the upper half has a part in both keys.
    """
    key = seed.view(()) * SIGNED_GOLDEN
    key = key ^ (key >> 32)
    numbers = torch.arange(like.numel(), dtype=torch.int64, device=like.device).to(torch.int32)
    drawn = _mixed(_mixed(numbers + key.to(torch.int32)) ^ (key >> 32).to(torch.int32))
    return ((drawn >> 8 & 0xFFFFFF).to(torch.float32) * 2.0**-24).view(like.shape)


def _mixed(x: Tensor) -> Tensor:
    """A hash of 32 bits (Ellis, "hash-prospector"): one to one, and each bit of ``x`` changes half of them.

    In ``int32``, whose products wrap around; of what is shifted to the right the sign's copies are taken off.
    """
    x = (x ^ (x >> 16 & 0xFFFF)) * 0x21F0AAAD
    x = (x ^ (x >> 15 & 0x1FFFF)) * 0x735A2D97
    return x ^ (x >> 15 & 0x1FFFF)
