"""The codecs that change no bit."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from eager_offload.codecs.base import Elements, PackedLayout, TensorMeta, compact, flat, layout_of, parts_of

#: Where the upper half of a number of four bytes is, of its two halves.
_UPPER = 1 if sys.byteorder == "little" else 0

#: Integers that have as many bytes as the numbers that a mask may be made of.
_WORDS = {
    torch.float64: torch.int64,
    torch.float32: torch.int32,
    torch.bfloat16: torch.int16,
    torch.float16: torch.int16,
}
#: Elements of a tensor in which more than two values are looked for before all of them are.
_LOOKED_AT = 4096

#: Of a word whose eight bytes are 0 or 1, times this, the uppermost byte has them as bits, the lowest byte's as bit 0.
_COLLECT = 0x0102040810204080
#: A byte times this is repeated eight times, of which this leaves one bit in each, from the lowest on; both as signed.
_REPEAT = 0x0101010101010101
_ONE_EACH = 0x8040201008040201 - (1 << 64)
#: Added to a byte that has one bit at most, this sets the uppermost where there was one, and carries nothing over.
_TO_THE_TOP = 0x7F7F7F7F7F7F7F7F


@dataclass(frozen=True)
class Gather(Elements):
    """The elements of a view side by side: what lies between them stays behind, and a broadcast travels once."""

    name: ClassVar[str] = "gather"
    lossless: ClassVar[bool] = True


@dataclass(frozen=True)
class Identity(Elements):
    """The bytes of a contiguous tensor as they are."""

    name: ClassVar[str] = "identity"
    lossless: ClassVar[bool] = True

    def layout(self, meta: TensorMeta) -> PackedLayout | None:
        """Of a contiguous tensor that is not empty."""
        return super().layout(meta) if meta.is_contiguous else None


@dataclass(frozen=True)
class Narrow(Elements):
    """``float32`` whose values are ``bfloat16``, in half the bytes: the upper halves, if all lower ones are zero."""

    name: ClassVar[str] = "narrow"
    lossless: ClassVar[bool] = True
    held = torch.bfloat16

    def pack(self, x: Tensor, out: Tensor) -> Tensor:
        """Holds ``bfloat16`` values, of NaN every bit."""
        halves = flat(x).view(torch.int16).view(-1, 2)
        out.view(torch.int16).copy_(halves[:, _UPPER])
        least, most = torch.aminmax(halves[:, 1 - _UPPER])
        return (least | most) == 0


@dataclass(frozen=True)
class BitMask:
    """``bool``, or floating-point numbers of at most two values, as one bit for each, and those values."""

    name: ClassVar[str] = "bitmask"
    lossless: ClassVar[bool] = True

    def layout(self, meta: TensorMeta) -> PackedLayout | None:
        """Of ``bool`` and floating-point numbers of two bytes or more; not empty."""
        if meta.is_empty or not (meta.dtype is torch.bool or meta.dtype in _WORDS):
            return None
        bits = ("bits", -(-meta.distinct // 8))
        return parts_of(bits) if meta.dtype is torch.bool else parts_of(("values", 2 * meta.dtype.itemsize), bits)

    def may_hold(self, x: Tensor) -> bool:
        """Whether the first elements of ``x`` have two values at most. The host waits for them."""
        if x.dtype is torch.bool:
            return True
        words = flat(x)[:_LOOKED_AT].view(_WORDS[x.dtype])
        least, most = torch.aminmax(words)
        return bool(((words == least) | (words == most)).all())

    def scratch(self, meta: TensorMeta) -> dict[str, int]:
        """What ``pack`` and ``unpack`` may be given to compute in, by name; bytes, in multiples of 16.

        The bits as words; of numbers, which of them are one value, and which neither. Fresh memory for that can take
        longer than the rest. ``scratch`` of the two is such memory, flat ``uint8``.
        """
        names = ("words",) if meta.dtype is torch.bool else ("words", "mask", "differs")
        return dict.fromkeys(names, -(-meta.distinct // 16) * 16)

    def pack(self, x: Tensor, out: Tensor, scratch: Mapping[str, Tensor] | None = None) -> Tensor:
        """Holds two values, told apart by their bits; of ``bool`` those that are 0 or 1 as bytes."""
        elements = flat(x)
        parts = layout_of(self, x).split(out)
        if x.dtype is torch.bool:
            mask = elements.view(torch.uint8)
            fits = mask.max() <= 1
        else:
            words = elements.view(_WORDS[x.dtype])
            least, most = torch.aminmax(words)
            is_most = torch.eq(words, most, out=_part(scratch, "mask", words.numel(), torch.bool))
            differs = torch.ne(words, least, out=_part(scratch, "differs", words.numel(), torch.bool))
            differs.logical_xor_(is_most)
            fits = (least == most) | torch.logical_not(differs.view(torch.uint8).max())
            parts[0].view(words.dtype).copy_(torch.stack((least, most)))
            mask = is_most.view(torch.uint8)
        if mask.numel() % 8:
            mask = torch.nn.functional.pad(mask, (0, -mask.numel() % 8))
        elif torch.compiler.is_compiling() or mask.storage_offset() % 8:  # no compiler traces the latter
            mask = mask.clone()
        into = _part(scratch, "words", mask.numel() // 8, torch.int64)
        collected = torch.mul(mask.view(torch.int64), _COLLECT, out=into)
        collected >>= 56  # in place: fresh memory for each of these takes longer than they do
        parts[-1].copy_(collected)
        return fits

    def unpack(self, packed: Tensor, out: Tensor, scratch: Mapping[str, Tensor] | None = None) -> None:
        """Each bit as the value that it stands for."""
        places = compact(out)
        parts = layout_of(self, out).split(packed)
        mask = _part(scratch, "words", parts[-1].numel(), torch.int64)
        mask = parts[-1].to(torch.int64) if mask is None else mask.copy_(parts[-1])
        mask *= _REPEAT
        mask.bitwise_and_(_ONE_EACH)  # spelt out: torch.func.functionalize knows no `&=`
        mask += _TO_THE_TOP
        mask >>= 7
        mask.bitwise_and_(_REPEAT)
        chosen = mask.view(torch.bool)[: places.numel()].view(places.shape)
        if out.dtype is torch.bool:
            places.copy_(chosen)
            return
        # In place, of integers that wrap around: four times as quick as torch.where, or as in memory of their own.
        least, most = parts[0].view(_WORDS[out.dtype]).unbind()
        is_own = places.is_contiguous()
        words = places.view(least.dtype) if is_own else torch.empty_like(chosen, dtype=least.dtype)
        words.copy_(chosen)
        words.mul_(most - least)
        words.add_(least)
        if not is_own:  # of a view with holes, functionalization loses the strides
            places.copy_(words.view(out.dtype))


def _part(scratch: Mapping[str, Tensor] | None, name: str, count: int, dtype: torch.dtype) -> Tensor | None:
    """So many elements of a part; ``None``, for ``out`` of an operator that then takes memory of its own, without."""
    return None if scratch is None else scratch[name].view(dtype)[:count]
