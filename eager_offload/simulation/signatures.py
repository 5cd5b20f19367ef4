"""What operators do with their arguments, read from their schemas."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from eager_offload._torch import OpOverload, schema_of, tensors_in


class Operand(NamedTuple):
    """A tensor that an operator was called with."""

    tensor: Tensor
    reads: bool
    writes: bool


#: Arguments that an operator writes in training although its schema does not say so.
_STATISTICS = ("running_mean", "running_var")
_UNMARKED = dict.fromkeys(("aten::native_batch_norm", "aten::cudnn_batch_norm", "aten::miopen_batch_norm"), _STATISTICS)


class Signature(NamedTuple):
    """What an operator's schema says about its arguments."""

    names: tuple[str, ...]
    written: frozenset[str]
    written_in_training: tuple[str, ...]
    #: It looks at sizes only: a factory, or a view in place.
    metadata_only: bool

    def operands(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Operand]:
        named = {**dict(zip(self.names, args, strict=False)), **kwargs}
        written = self.written
        if self.written_in_training and named.get("training", named.get("train")):
            written = written.union(self.written_in_training)
        return [
            Operand(tensor, reads=not self.metadata_only and name not in written, writes=name in written)
            for name, value in named.items()
            for tensor in tensors_in(value)
        ]


@cache
def signature_of(func: OpOverload[..., Any]) -> Signature:
    schema = schema_of(func)
    in_place_view = torch.Tag.inplace_view in func.tags
    name = schema.name.rpartition("::")[2]
    marked = [a.name for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write]
    return Signature(
        names=tuple(argument.name for argument in schema.arguments),
        written=frozenset() if in_place_view else frozenset(marked),
        written_in_training=_UNMARKED.get(schema.name, ()),
        metadata_only=in_place_view or name.startswith("new_") or name.endswith("_like"),
    )
