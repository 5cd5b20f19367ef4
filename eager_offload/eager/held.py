"""``HeldTensor``: a tensor of the caller's own that leaves as a saved one does, for autograd functions and engines that
keep tensors beside autograd."""

from __future__ import annotations

from torch import Tensor

from eager_offload.contexts import unpack
from eager_offload.eager.handles import KeptTensor, SavedView, detached_for_keeping
from eager_offload.eager.hooks import Packed
from eager_offload.stats import KeepReason
from eager_offload.torch_private.memory import version_of


class HeldTensor:
    """A tensor that an :class:`Offload` holds, and moves as it moves saved tensors; ``Offload.hold`` makes one.

    It keeps what it needs for as long as it lives: drop it, restored or not, and its bytes go back. It may be restored
    more than once, and on another stream or thread than it was made on.
    """

    __slots__ = ("__weakref__", "_packed")

    def __init__(self, packed: Packed) -> None:
        self._packed = packed

    def restore(self) -> Tensor:
        """Returns the tensor again, bit for bit, with its sizes and strides, for the stream that is current now.

        The returned tensor has no history and does not require grad.

        Raises:
            SavedTensorModifiedError: the tensor was changed in place after it was held.
            TransferError, CorruptionError: its bytes did not come back.
        """
        tensor = unpack(self._packed)
        return tensor.detach() if tensor.requires_grad else tensor

    def prefetch(self) -> None:
        """Starts to bring the tensor back, if it is away and there is room in ``prefetch_bytes``; waits for nothing."""
        for view in views_of(self._packed):
            view.prefetch()


def views_of(packed: Packed) -> list[SavedView]:
    """Returns the handles of what was taken of a saved tensor."""
    if isinstance(packed, KeptTensor):
        return []
    return [packed] if isinstance(packed, SavedView) else list(packed.views())


def stays(tensor: Tensor) -> KeptTensor:
    """Returns the handle of a tensor that stays, counted nowhere: nothing is moved."""
    return KeptTensor(detached_for_keeping(tensor), version_of(tensor), KeepReason.REGION)
