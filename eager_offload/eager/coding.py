"""How a saved storage travels: which codec packs it before it leaves, and what that packs.

A part of a storage that has holes is gathered, whatever the user asks for: what lies in them was not saved. The other
codecs that change no bit take the whole range of bytes, whatever view of it was saved.

[Note: rounding]
What is rounded follows from the save alone: the name of the codec that is in force there (``marks.codec_here``), and
the tensor (``rounding_codec``). Codecs round to nearest, so what is packed comes back as the same numbers every time; a
tensor that stays is exact, so a step sees the same numbers again if the same tensors move. A storage has one copy,
which serves all its saves: one that is to be exact, or rounded otherwise, has the copy be exact if that has not
started, and else takes the storage anew.

A graph that goes backward twice sees the same numbers. What was rounded is packed once, and from then on nothing but
what was packed is given out.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from eager_offload._torch import cast_from, made_by_function
from eager_offload.codecs import BitMask, Codec, Gather, Narrow, TensorMeta
from eager_offload.codecs.names import IDENTITY, ROUNDING
from eager_offload.selection import Footprint, is_copy_of_leaf

_GATHER, _NARROW, _BITMASK = Gather(), Narrow(), BitMask()
#: Bytes; where the words that codecs work on begin.
_WORD = 8


class Coding(NamedTuple):
    """How the bytes of one saved storage travel."""

    codec: Codec
    #: What is packed: the first element is that of the footprint.
    meta: TensorMeta
    #: That travel.
    nbytes: int
    #: Whether a look at the first bytes says if it is worth the time, once they are final.
    looks: bool = False

    @property
    def rounds(self) -> bool:
        """Whether other numbers may come back."""
        return not self.codec.lossless

    @property
    def may_be_refused(self) -> bool:
        """Whether the values say if it can be packed."""
        return isinstance(self.codec, BitMask | Narrow)

    @property
    def exact(self) -> Coding | None:
        """In place of this one where nothing may be rounded."""
        if not self.rounds:
            return self
        return None if self.meta.is_contiguous and len(self.meta.size) == 1 else _coding(_GATHER, self.meta)

    def serves(self, tensor: Tensor, name: str, min_bytes: int) -> bool:
        """Whether a save of ``tensor``, for which the codec ``name`` is in force, may be given what comes back."""
        if not self.rounds:
            return True
        return tensor.dtype is self.meta.dtype and rounding_codec(tensor, name, min_bytes) == self.codec

    def may_hold(self, x: Tensor) -> bool:
        """Whether the first bytes of ``x`` say that the codec may hold it."""
        return not isinstance(self.codec, BitMask) or self.codec.may_hold(x)


def coding_of(tensor: Tensor, area: Footprint, name: str, min_bytes: int) -> Coding | None:
    """How ``area`` of the storage of ``tensor`` is to travel; ``None``: as it is.

    Args:
        name: of the codec that is in force.
        min_bytes: what is smaller is not rounded.
    """
    rounding, exact = _rounding_of(tensor, area, name, min_bytes), _exact_of(tensor, area, name)
    return exact if rounding is None or (exact is not None and exact.nbytes <= rounding.nbytes) else rounding


def rounding_codec(tensor: Tensor, name: str, min_bytes: int) -> Codec | None:
    """Returns what may round ``tensor``, which is no parameter, where ``name`` is in force; ``None``: nothing.

    What does not require grad may be the cast of a parameter that is not trained, or a statistic; a copy or a cast of
    one that is trained does. What a custom function has made is exact, since a graph does not say whether it requires
    grad: see [Note: what requires grad in a graph].
    """
    codec = ROUNDING.get(name)
    if codec is None or not tensor.requires_grad or tensor.nbytes < min_bytes or tensor.is_neg():
        return None
    if is_copy_of_leaf(tensor) or made_by_function(tensor):
        return None
    return None if codec.layout(TensorMeta.of(tensor)) is None else codec


def _exact_of(tensor: Tensor, area: Footprint, name: str) -> Coding | None:
    """What changes no bit."""
    if area.gathered:
        return _coding(_GATHER, TensorMeta.of(tensor))
    if name == IDENTITY:
        return None
    codec, looks = exact_codec(tensor)
    if codec is None:
        return None
    dtype = tensor.dtype
    address = tensor.untyped_storage().data_ptr() + area.start
    if address % _WORD or area.start % _WORD or area.nbytes % dtype.itemsize:
        return None
    coding = _coding(codec, TensorMeta((area.nbytes // dtype.itemsize,), (1,), dtype))
    return coding._replace(looks=looks) if coding is not None and coding.nbytes < area.nbytes else None


def exact_codec(tensor: Tensor) -> tuple[Codec | None, bool]:
    """What may hold every bit of ``tensor`` in fewer bytes, and whether a look at the first ones is to say if it does.

    Asks for no number in it.
    """
    dtype = tensor.dtype
    if dtype is torch.float32 and cast_from(tensor) is torch.bfloat16:
        return _NARROW, False
    looks = dtype is not torch.bool and not tensor.requires_grad and tensor.device.type == "cpu"
    return (_BITMASK, looks) if dtype is torch.bool or (looks and dtype.is_floating_point) else (None, False)


def _rounding_of(tensor: Tensor, area: Footprint, name: str, min_bytes: int) -> Coding | None:
    """What rounds."""
    codec, meta = rounding_codec(tensor, name, min_bytes), TensorMeta.of(tensor)
    if codec is None:
        return None
    if not area.gathered:
        if not is_all_of(meta, area.nbytes):
            return None  # what else is there, and was not saved, would have a part in the scales
        meta = TensorMeta((area.nbytes // meta.dtype.itemsize,), (1,), meta.dtype)
    coding = _coding(codec, meta)
    return coding if coding is not None and coding.nbytes < area.moved else None


def is_all_of(meta: TensorMeta, nbytes: int) -> bool:
    """Whether each element of an area of so many bytes is one of the tensor, once."""
    expected = 1
    for stride, length in sorted(zip(meta.stride, meta.size, strict=True)):
        if length != 1:
            if stride != expected:
                return False
            expected *= length
    return expected * meta.dtype.itemsize == nbytes


def _coding(codec: Codec, meta: TensorMeta) -> Coding | None:
    layout = codec.layout(meta)
    return None if layout is None else Coding(codec, meta, layout.nbytes)
