"""Which codec packs a storage of a program before it travels: what a trace knows of its makers and its readers.

[Note: readers of a trace]
Eager code learns which nodes read a saved tensor when a step has gone backward. A trace has seen it before the first
step, so each step that follows a plan is rounded, the first one too; any other reader is a ``PrecisionError``, as in
eager code. Whether a mask of floating-point numbers has two values no trace can see. But it sees which operator has
written them: a mask that dropout has drawn has. Anything else that might be one travels as it is,
since eager code would look at its numbers.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from eager_offload._torch import FakeTensorMode, OpOverload, TorchDispatchMode, storage_key, tensors_in
from eager_offload.codecs import Codec, CodecPolicy, TensorMeta
from eager_offload.codecs.policy import is_compiled, text_of
from eager_offload.compile.cost import OperatorCall, traffic_of
from eager_offload.eager.coding import exact_codec, is_all_of, kind_of, rounding_codec
from eager_offload.learning import SaveKind
from eager_offload.planning.program import Packing

#: Elements of the tensor with which it is found out what a codec reads and writes.
_SAMPLE = 1 << 16


class Known(NamedTuple):
    """What is known of a save when it is saved."""

    dtype: torch.dtype
    exact: Codec | None
    """What holds every bit of it."""
    kind: SaveKind | None
    """Where it may be rounded."""


class Coder:
    """Chooses codecs among those that a user allows."""

    def __init__(self, policy: CodecPolicy) -> None:
        self._policy = policy
        #: By the number of the save.
        self._known: dict[int, Known] = {}
        self._readers: dict[int, set[str]] = {}

    @property
    def is_idle(self) -> bool:
        """Whether everything travels as it is."""
        return not (self._policy.lossless or self._policy.rounds)

    def save(self, number: int, tensor: Tensor, *, is_drawn: bool) -> None:
        """Save ``number`` is ``tensor``; ``is_drawn``: dropout has written it."""
        exact, looks = exact_codec(tensor) if self._policy.lossless else (None, False)
        kind = None if tensor.is_neg() else kind_of(tensor)
        if kind is not None and not is_all_of(TensorMeta.of(tensor), tensor.untyped_storage().nbytes()):
            kind = None
        self._known[number] = Known(tensor.dtype, exact if is_drawn or not looks else None, kind)

    def ask(self, number: int, reader: str) -> None:
        """``reader`` asks for what that save was."""
        self._readers.setdefault(number, set()).add(reader)

    def packing(self, saves: Sequence[int], nbytes: int) -> Packing | None:
        """How a storage of so many bytes travels, of which those are the saves; ``None``: as it is."""
        known = [self._known[number] for number in saves]
        first = known[0]
        if any(one.dtype is not first.dtype for one in known) or nbytes % first.dtype.itemsize:
            return None
        meta = TensorMeta((nbytes // first.dtype.itemsize,), (1,), first.dtype)
        found = [(codec, _nbytes(codec, meta)) for codec in self._codecs(first, meta, saves)]
        codec, packed = min(found, key=lambda one: one[1], default=(None, nbytes))
        if codec is None or packed >= nbytes:
            return None
        maker = first.kind.maker if first.kind is not None and not codec.lossless else ""
        out, back = _costs(codec, first.dtype)
        elements = meta.distinct / _SAMPLE
        # What compiled kernels compute in is no memory, but each is compiled only once that has been in use.
        moved = [nbytes + packed] * 2 if is_compiled(codec) else [round(elements * one.traffic) for one in (out, back)]
        scratch = [round(elements * one.most) for one in (out, back)]
        return Packing(text_of(codec), str(first.dtype), maker, packed, *moved, *scratch)

    def _codecs(self, first: Known, meta: TensorMeta, saves: Sequence[int]) -> Iterable[Codec]:
        """What may pack it; of two as small, the first."""
        if first.exact is not None:
            yield first.exact
        if first.kind is None or any(self._known[number].kind is None for number in saves):
            return
        readers = [self._readers.get(number, {""}) for number in saves]
        codec = rounding_codec(meta, self._policy, frozenset().union(*readers), first.kind)
        if codec is not None:
            yield codec


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
        seed = torch.empty(1, dtype=torch.int64)
        with _Costs([x, packed, seed]) as out:
            codec.pack(x, packed, seed)
        with _Costs([x, packed]) as back:
            codec.unpack(packed, x)
    return out, back
