"""Fewer bytes on the way: what packs a saved tensor before it leaves and unpacks it when it is back."""

from __future__ import annotations

from eager_offload.codecs.base import Codec, PackedLayout, Part, TensorMeta
from eager_offload.codecs.exact import BitMask, Gather, Identity, Narrow
from eager_offload.codecs.rounded import BF16, BlockFP8, BlockInt

__all__ = [
    "BF16",
    "BitMask",
    "BlockFP8",
    "BlockInt",
    "Codec",
    "Gather",
    "Identity",
    "Narrow",
    "PackedLayout",
    "Part",
    "TensorMeta",
]
