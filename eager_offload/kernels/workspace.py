"""The scratch memory of codecs: one place for each stream.

[Note: one workspace]
Work of one stream runs in order, so of all packing and unpacking there one is at work at a time. What they compute in
is one place: as large as the largest that has come so far, of memory that was touched before. For a large tensor on a
CPU fresh memory takes as long as the rest. An accelerator's allocator gives a stream the block that it has just given
back, so there nothing is held in between, which would be a part of the device's peak.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable

import torch
from torch import Tensor

from eager_offload.codecs import BitMask, Codec, TensorMeta

#: Sizes of which it is remembered where parts lie, until the workspace goes.
_MOST_PLACED = 256


class Workspaces:
    """Scratch memory by stream; the caller has enqueued what it does there before it asks for the next.

    Args:
        allocate: new memory on a stream: flat ``uint8`` of so many bytes, at a multiple of 16.
        holds: whether it is held for the next one.
    """

    def __init__(self, allocate: Callable[[int, Hashable], Tensor], *, holds: bool = True) -> None:
        self._allocate, self._holds = allocate, holds
        self._buffers: dict[Hashable, Tensor] = {}
        #: Where parts lie in what is held: to make so many views takes longer than to pack a small mask.
        self._placed: dict[tuple[Hashable, TensorMeta], dict[str, Tensor]] = {}

    @property
    def nbytes(self) -> int:
        """Bytes that it holds."""
        return sum(buffer.nbytes for buffer in self._buffers.values())

    def of(self, codec: Codec, meta: TensorMeta, stream: Hashable) -> dict[str, Tensor] | None:
        """What ``codec`` computes in to pack or unpack such a tensor; ``None``: in nothing."""
        if not isinstance(codec, BitMask):
            return None
        if (known := self._placed.get((stream, meta))) is not None:
            return known
        parts = codec.scratch(meta)
        nbytes, buffer = sum(parts.values()), self._buffers.get(stream)
        if buffer is None or buffer.nbytes < nbytes:
            self._buffers.pop(stream, None)  # first: the old one's memory may be a part of the new one's
            self._placed.clear()
            buffer = self._allocate(nbytes, stream)
            if self._holds:
                self._buffers[stream] = buffer
        placed = dict(zip(parts, torch.split(buffer[:nbytes], list(parts.values())), strict=True))
        if self._holds and len(self._placed) < _MOST_PLACED:
            self._placed[stream, meta] = placed
        return placed

    def clear(self) -> None:
        """Lets go of all of it."""
        self._buffers.clear()
        self._placed.clear()
