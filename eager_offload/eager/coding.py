"""Which codec packs a saved storage before it leaves, and what that packs.

A part of a storage that has holes is gathered, whatever the user asks for: what lies in them was not saved. The other
codecs that change no bit take the whole range of bytes, whatever view of it was saved.

[Note: rounding]
What rounds is allowed by its readers, known once a forward like this one has gone backward: unpack logs the
name of the node that asks. So the first forward of its kind is exact, and a save of a later one is rounded if it is
like the save that it was then (bytes, dtype, the operator that made it) and every reader of its storage has a rule. A
storage that several read is packed for the strictest; a save that was not expected finds it exact, or takes it anew.
What was rounded is given only to readers that may have it: another one is a `PrecisionError`.

A graph that goes backward twice sees the same numbers. What was rounded is packed once, and from then on nothing but
what was packed is given out.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

import torch
from torch import Tensor

from eager_offload._torch import cast_from
from eager_offload.codecs import BitMask, Codec, CodecPolicy, Gather, Narrow, TensorMeta
from eager_offload.codecs.policy import NORMS, text_of
from eager_offload.errors import ConfigError
from eager_offload.learning import SaveKind
from eager_offload.selection import Footprint
from eager_offload.step_plan import Coded, Fate, StepPlan

_GATHER, _NARROW, _BITMASK = Gather(), Narrow(), BitMask()
#: Bytes; where the words that codecs work on begin.
_WORD = 8
#: The dtypes of what may be rounded, by name.
_ROUNDED = {str(dtype): dtype for dtype in (torch.float32, torch.bfloat16, torch.float16)}


class Coding(NamedTuple):
    """How the bytes of one saved storage travel."""

    codec: Codec
    #: What is packed: the first element is that of the footprint.
    meta: TensorMeta
    #: That travel.
    nbytes: int
    #: Whether a look at the first bytes says if it is worth the time, once they are final.
    looks: bool = False
    #: For stochastic rounding.
    seed: int = 0
    #: Of the tensor, if this rounds it.
    kind: SaveKind | None = None

    @property
    def rounds(self) -> bool:
        """Whether other numbers may come back."""
        return not self.codec.lossless

    @property
    def draws(self) -> bool:
        """Whether it rounds stochastically."""
        return self.rounds and self.codec.unbiased

    @property
    def exact(self) -> Coding | None:
        """In place of this one where nothing may be rounded."""
        if not self.rounds:
            return self
        return None if self.meta.is_contiguous and len(self.meta.size) == 1 else _coding(_GATHER, self.meta)

    @property
    def coded(self) -> Coded:
        """What a step plan says of it."""
        maker = "" if self.kind is None else self.kind.maker
        return Coded(text_of(self.codec), str(self.meta.dtype), maker, self.nbytes)

    def suits(self, tensor: Tensor) -> bool:
        """Whether the storage of ``tensor``, which leaves whole, may travel so as a step plan says."""
        if self.rounds:
            is_like = kind_of(tensor) == self.kind and not tensor.is_neg()
            # As many bytes as its storage has may be some of its elements, several times each.
            return is_like and (tensor.is_contiguous() or is_all_of(TensorMeta.of(tensor), tensor.nbytes))
        if tensor.dtype is not self.meta.dtype or tensor.untyped_storage().data_ptr() % _WORD:
            return False
        return self.codec is not _NARROW or cast_from(tensor) is torch.bfloat16

    def may_round_for(self, readers: Collection[str], policy: CodecPolicy) -> bool:
        """Whether ``policy`` has all of ``readers`` given what this makes of a tensor."""
        return self.kind is None or rounding_codec(self.meta, policy, readers, self.kind) == self.codec

    def may_hold(self, x: Tensor) -> bool:
        """Whether the first bytes of ``x`` say that the codec may hold it."""
        return not isinstance(self.codec, BitMask) or self.codec.may_hold(x)


def coding_of(
    tensor: Tensor,
    area: Footprint,
    policy: CodecPolicy,
    readers: Collection[str] = (),
    kind: SaveKind | None = None,
) -> Coding | None:
    """How ``area`` of the storage of ``tensor`` is to travel; ``None``: as it is.

    Args:
        policy: what the user asks for.
        readers: all that read the storage, as far as that is known of an earlier forward: else none of them.
        kind: of ``tensor``, where there are any.
    """
    rounding = _rounding_of(tensor, area, policy, readers, kind) if readers and kind is not None else None
    exact = _exact_of(tensor, area, policy)
    return exact if rounding is None or (exact is not None and exact.nbytes <= rounding.nbytes) else rounding


def kind_of(tensor: Tensor) -> SaveKind | None:
    """What a save of ``tensor`` is known by; ``None`` for one that nothing may round.

    What does not require grad has no maker, and may be the cast of a parameter that is not trained, or a statistic.
    """
    dtype = str(tensor.dtype)
    if dtype not in _ROUNDED or not tensor.requires_grad:
        return None
    maker = tensor.grad_fn
    return SaveKind(tensor.nbytes, dtype, "" if maker is None else maker.name())


def codings_of(plan: StepPlan, policy: CodecPolicy) -> list[Coding | None]:
    """How a step plan says that storages travel, by number of save; ``None``: as they are, or as ``policy`` cannot say.

    Raises:
        ConfigError: there is no such codec at all.
    """
    return [
        _planned_coding(save.coded, save.storage_nbytes, policy)
        if save.coded is not None and save.fate is Fate.OFFLOAD
        else None
        for save in plan.saves
    ]


def _planned_coding(save: Coded, storage_nbytes: int, policy: CodecPolicy) -> Coding | None:
    """What a step plan says of a storage that leaves whole; ``None`` where ``policy`` has no such codec."""
    codec, dtype = policy.codec(save.codec), getattr(torch, save.dtype.removeprefix("torch."), None)
    if codec is None or not isinstance(dtype, torch.dtype):
        return None
    coding = _coding(codec, TensorMeta((storage_nbytes // dtype.itemsize,), (1,), dtype))
    if coding is None or coding.nbytes != save.nbytes:
        return None
    return coding if codec.lossless else coding._replace(kind=SaveKind(storage_nbytes, save.dtype, save.maker))


def check_codecs(plan: StepPlan, policy: CodecPolicy) -> None:
    """Looks whether ``policy`` has what ``plan`` packs with.

    Raises:
        ConfigError: it does not.
    """
    for number, (save, coding) in enumerate(zip(plan.saves, codings_of(plan, policy), strict=True)):
        if coding is None and save.coded is not None and save.fate is Fate.OFFLOAD:
            raise ConfigError(
                f"save {number} of the step plan is packed by the codec {save.coded.codec!r}, which codec=... does not "
                "have, or has no rule for: give the codec that the plan was made with, or another plan"
            )


def _exact_of(tensor: Tensor, area: Footprint, policy: CodecPolicy) -> Coding | None:
    """What changes no bit."""
    if area.gathered:
        return _coding(_GATHER, TensorMeta.of(tensor))
    if not policy.lossless:
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


def _rounding_of(
    tensor: Tensor, area: Footprint, policy: CodecPolicy, readers: Collection[str], kind: SaveKind
) -> Coding | None:
    """What rounds, where all of ``readers`` may be given that."""
    if tensor.is_neg():
        return None
    meta = TensorMeta.of(tensor)
    if not area.gathered:
        if not is_all_of(meta, area.nbytes):
            return None  # what else is there, and was not saved, would have a part in the scales
        meta = TensorMeta((area.nbytes // meta.dtype.itemsize,), (1,), meta.dtype)
    codec = rounding_codec(meta, policy, readers, kind)
    coding = None if codec is None else _coding(codec, meta)
    return coding._replace(kind=kind) if coding is not None and coding.nbytes < area.moved else None


def rounding_codec(meta: TensorMeta, policy: CodecPolicy, readers: Collection[str], kind: SaveKind) -> Codec | None:
    """What may round a tensor that all of ``readers`` ask for."""
    if NORMS.intersection(readers) and kind.maker in readers:
        return None  # it may be the statistics of a norm, which that has made
    return policy.strictest(readers, meta)


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
