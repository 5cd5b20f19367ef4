"""Which codec packs a storage of a program before it travels: by the rule of eager code.

Whether a mask of floating-point numbers has two values no trace can see. But it sees which operator has written them: a
mask that dropout has drawn has. Anything else that might be one travels as it is, since eager code would look at its
numbers.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from eager_offload._torch import FakeTensorMode, OpOverload, TorchDispatchMode, storage_key, tensors_in
from eager_offload.codecs import Codec, TensorMeta
from eager_offload.codecs.names import IDENTITY, is_compiled
from eager_offload.compile.cost import OperatorCall, traffic_of
from eager_offload.eager.coding import exact_codec, is_all_of, rounding_codec
from eager_offload.planning.program import Packing

#: Elements of the tensor with which it is found out what a codec reads and writes.
_SAMPLE = 1 << 16


class CodedSave(NamedTuple):
    """What may pack a storage, as far as one save of it says."""

    dtype: torch.dtype
    exact: Codec | None
    """What holds every bit of it."""
    rounding: Codec | None
    """What may round it."""


def coded_save(tensor: Tensor, name: str, min_bytes: int, *, is_drawn: bool) -> CodedSave:
    """What the save of ``tensor`` says where the codec ``name`` is in force; ``is_drawn``: dropout has written it."""
    exact, looks = exact_codec(tensor) if name != IDENTITY else (None, False)
    rounding = rounding_codec(tensor, name, min_bytes)
    if rounding is not None and not is_all_of(TensorMeta.of(tensor), tensor.untyped_storage().nbytes()):
        rounding = None
    return CodedSave(tensor.dtype, exact if is_drawn or not looks else None, rounding)


def packing_of(saves: Sequence[CodedSave], nbytes: int) -> Packing | None:
    """How a storage of so many bytes travels, of which those are the saves; ``None``: as it is."""
    first = saves[0]
    if any(one.dtype is not first.dtype for one in saves) or nbytes % first.dtype.itemsize:
        return None
    meta = TensorMeta((nbytes // first.dtype.itemsize,), (1,), first.dtype)
    rounding = first.rounding if all(one.rounding == first.rounding for one in saves) else None
    found = [(codec, _nbytes(codec, meta)) for codec in (first.exact, rounding) if codec is not None]
    codec, packed = min(found, key=lambda one: one[1], default=(None, nbytes))
    if codec is None or packed >= nbytes:
        return None
    out, back = _costs(codec, first.dtype)
    elements = meta.distinct / _SAMPLE
    # What compiled kernels compute in is no memory, but each is compiled only once that has been in use.
    moved = [nbytes + packed] * 2 if is_compiled(codec) else [round(elements * one.traffic) for one in (out, back)]
    scratch = [round(elements * one.most) for one in (out, back)]
    return Packing(codec.name, str(first.dtype), packed, *moved, *scratch)


def _nbytes(codec: Codec, meta: TensorMeta) -> int:
    layout = codec.layout(meta)
    assert layout is not None, "it is for such a tensor"
    return layout.nbytes


class _Costs(TorchDispatchMode):
    """Counts the bytes that operators read and write, and those that they make."""

    def __init__(self, given: Sequence[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch declares no types for it
        self.traffic = 0
        #: Of what they have made, what lives now, and lived at most.
        self.living = self.most = 0
        self._alive: dict[int, object] = {storage_key(one.untyped_storage()): one for one in given}

    def _count(self, storage: torch.UntypedStorage) -> None:
        key, nbytes = storage_key(storage), storage.nbytes()
        if key in self._alive:
            return

        def gone(_: object) -> None:
            self.living -= nbytes
            del self._alive[key]

        self._alive[key] = weakref.ref(storage, gone)
        self.living += nbytes
        self.most = max(self.most, self.living)

    def __torch_dispatch__(
        self, func: OpOverload[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        named = dict(kwargs or {})
        result = func(*args, **named)
        self.traffic += traffic_of(OperatorCall(func, args, named, result))
        for one in tensors_in(result):
            self._count(one.untyped_storage())
        return result


@lru_cache(maxsize=64)
def _costs(codec: Codec, dtype: torch.dtype) -> tuple[_Costs, _Costs]:
    """What packing and unpacking of ``_SAMPLE`` elements take."""
    meta = TensorMeta((_SAMPLE,), (1,), dtype)
    with FakeTensorMode(), torch.no_grad():
        x, packed = torch.empty(_SAMPLE, dtype=dtype), torch.empty(_nbytes(codec, meta), dtype=torch.uint8)
        with _Costs([x, packed]) as out:
            codec.pack(x, packed)
        with _Costs([x, packed]) as back:
            codec.unpack(packed, x)
    return out, back
