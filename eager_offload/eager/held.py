"""``HeldTensor``: offloads a tensor that the caller holds, e.g. for an engine with a store of its own."""

from __future__ import annotations

from torch import Tensor

from eager_offload.contexts import unpack
from eager_offload.eager.handles import KeptTensor, SavedView, detached_for_keeping
from eager_offload.eager.hooks import Packed
from eager_offload.stats import KeepReason
from eager_offload.torch_private.memory import version_of


class HeldTensor:
    """A tensor that an :class:`Offload` holds and moves like a saved tensor; made by ``Offload.hold``.

    Deleting the object frees its bytes, restored or not. It may be restored several times, and on other streams or
    threads than it was made on.
    """

    __slots__ = ("__weakref__", "_packed")

    def __init__(self, packed: Packed) -> None:
        self._packed = packed

    def restore(self) -> Tensor:
        """Returns the tensor, bit for bit, with its size and strides, ordered on the current stream.

        The returned tensor has no history and does not require grad.

        Raises:
            SavedTensorModifiedError: the tensor was modified in place after ``hold``.
            TransferError, CorruptionError: its bytes could not be reloaded.
        """
        tensor = unpack(self._packed)
        return tensor.detach() if tensor.requires_grad else tensor

    def prefetch(self) -> None:
        """Starts to reload the tensor, if it was offloaded and ``prefetch_bytes`` has room. Does not wait."""
        for view in views_of(self._packed):
            view.prefetch()


def views_of(packed: Packed) -> list[SavedView]:
    """Returns the handles of the offloaded tensors in a packed one."""
    if isinstance(packed, KeptTensor):
        return []
    return [packed] if isinstance(packed, SavedView) else list(packed.views())


def stays(tensor: Tensor) -> KeptTensor:
    """Returns the handle of a tensor that is kept and not counted."""
    return KeptTensor(detached_for_keeping(tensor), version_of(tensor), KeepReason.REGION)
