"""What a codec is: bytes of one tensor in another form, of a size that is known before anything moves."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import ClassVar, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn.functional import pad

#: Bytes; where parts begin, so that any dtype may be viewed there.
_ALIGNMENT = 16


class TensorMeta(NamedTuple):
    """What is known of a tensor without its bytes; strides in elements. ``meta`` of a codec's methods."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: Tensor) -> TensorMeta:
        """That of ``tensor``."""
        return cls(tuple(tensor.size()), tuple(tensor.stride()), tensor.dtype)

    @property
    def distinct(self) -> int:
        """How many elements there are, where a broadcast dimension counts once."""
        return math.prod(length for length, stride in zip(self.size, self.stride, strict=True) if stride != 0)

    @property
    def is_empty(self) -> bool:
        """Whether there are none."""
        return 0 in self.size

    @property
    def is_contiguous(self) -> bool:
        """Whether the elements lie side by side, in order."""
        expected = 1
        for length, stride in zip(reversed(self.size), reversed(self.stride), strict=True):
            if length != 1 and stride != expected:
                return False
            expected *= length
        return True


class Part(NamedTuple):
    """A range of a packed tensor; bytes."""

    name: str
    start: int
    nbytes: int


class PackedLayout(NamedTuple):
    """The sizes of a packed tensor; bytes."""

    nbytes: int
    parts: tuple[Part, ...]

    def split(self, packed: Tensor) -> list[Tensor]:
        """The parts of the flat ``uint8`` tensor ``packed``, in order."""
        return [packed[part.start : part.start + part.nbytes] for part in self.parts]

    def join(self, parts: Sequence[Tensor], out: Tensor) -> None:
        """Writes the flat ``uint8`` tensors ``parts``, in order, and zeros between them, to all of ``out``.

        At once: of a write to each part torch's functionalization makes one of all of ``out``, and a compiler from that
        a loop over all of it, with a branch for each byte.
        """
        ends = [part.start for part in self.parts[1:]] + [self.nbytes]
        gaps = [end - part.start - part.nbytes for part, end in zip(self.parts, ends, strict=True)]
        padded = [pad(part, (0, gap)) if gap else part for part, gap in zip(parts, gaps, strict=True)]
        torch.cat(padded, out=out)


class Codec(Protocol):
    """Packs a tensor before it travels and unpacks it when it is back, in torch arithmetic that compilers can trace.

    ``x`` and ``out`` have any strides, and neither the conjugate nor the negative bit; a packed tensor is a flat
    ``uint8`` tensor of ``layout(meta).nbytes`` bytes on the same device, at a multiple of 16.
    """

    def __hash__(self) -> int:
        """Equal ones pack alike."""

    @property
    def name(self) -> str:
        """What counters call it."""

    @property
    def lossless(self) -> bool:
        """Whether every bit comes back."""

    def layout(self, meta: TensorMeta) -> PackedLayout | None:
        """All sizes, from shape, strides and dtype alone; ``None``: not for such a tensor."""

    def pack(self, x: Tensor, out: Tensor) -> Tensor | None:
        """Writes ``x`` into the packed tensor ``out``.

        Returns:
            For a codec that holds some values only: one ``bool`` on the device of ``x``, whether all of ``x`` are such.
            If not, ``out`` is of no use. Else ``None``.
        """

    def unpack(self, packed: Tensor, out: Tensor) -> None:
        """Writes what was packed into ``out``, which has the ``meta`` of what that was."""


def compact(x: Tensor) -> Tensor:
    """``x`` with every broadcast dimension narrowed to one element."""
    for dim, stride in enumerate(x.stride()):
        if stride == 0:
            x = x.narrow(dim, 0, 1)
    return x


def flat(x: Tensor) -> Tensor:
    """The elements of ``x`` side by side, a broadcast dimension once, so that they may be viewed as other words."""
    elements = compact(x).reshape(-1).contiguous()
    return elements if elements.stride(0) == 1 else elements.as_strided((1,), (1,))  # of one, any stride is contiguous


def layout_of(codec: Codec, x: Tensor) -> PackedLayout:
    """That of ``x``, which ``codec`` is for."""
    layout = codec.layout(TensorMeta.of(x))
    assert layout is not None, "the caller has looked"
    return layout


def parts_of(*sizes: tuple[str, int]) -> PackedLayout:
    """A layout of parts with these names and bytes, one behind the other.

    Of several, the whole is padded too: torch's functionalization divides it by the size of what a part is viewed as.
    """
    parts, end = [], 0
    for name, nbytes in sizes:
        parts.append(Part(name, end, nbytes))
        end += nbytes if len(sizes) == 1 else -(-nbytes // _ALIGNMENT) * _ALIGNMENT
    return PackedLayout(end, tuple(parts))


class Elements:
    """What packs the elements of a tensor side by side, each once: as they are, or those of ``float32`` as ``held``."""

    held: ClassVar[torch.dtype | None] = None

    def layout(self, meta: TensorMeta) -> PackedLayout | None:
        """Of a strided tensor that is not empty; where another dtype is held, of ``float32``."""
        if meta.is_empty or (self.held is not None and meta.dtype is not torch.float32):
            return None
        return parts_of(("elements", meta.distinct * (self.held or meta.dtype).itemsize))

    def pack(self, x: Tensor, out: Tensor) -> Tensor | None:
        """Holds any values."""
        elements = compact(x)
        out.view(self.held or x.dtype).view(elements.shape).copy_(elements)
        return None

    def unpack(self, packed: Tensor, out: Tensor) -> None:
        """Writes them to where they were."""
        places = compact(out)
        places.copy_(packed.view(self.held or out.dtype).view(places.shape))
