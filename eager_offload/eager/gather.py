"""Views with holes: a small view that is not dense moves as its own elements.

``gather`` packs the elements before the offload, and ``scatter`` puts them into place after the reload. A broadcast
dimension is copied once. All saves that share such a storage have the same size and strides.
"""

from __future__ import annotations

import torch
from torch import Tensor

from eager_offload.eager.handles import SavedStorage, SavedView, without_bytes
from eager_offload.engine.transfers import Transfers
from eager_offload.runtime.base import Layout, Stream
from eager_offload.torch_private.calls import set_over
from eager_offload.torch_private.memory import is_out_of_memory


def gather(transfers: Transfers, saved: SavedStorage) -> Tensor | None:
    """Returns the gathered elements, flat ``uint8``; ``None``, with a warning, if the device has no memory for them."""
    runtime, nbytes = transfers.runtime, saved.footprint.moved
    try:
        with runtime.enter(saved.stream):  # ordered after the operator that computes the view
            gathered = runtime.allocate(Layout(nbytes), transfers.device, saved.stream)
            alias, first = saved.aliases[0], saved.footprint.start
            elements = _elements(alias.untyped_storage(), first, alias.size(), alias.stride(), alias.dtype)
            _as_elements(gathered, elements).copy_(elements)
            return gathered
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
    transfers.accounts.fall_back(
        "device_full",
        f"{transfers.device} has no memory left to gather the {nbytes} bytes of a saved tensor before they leave: "
        "they stay, with the storage that they are a part of",
    )
    return None


def scatter(transfers: Transfers, view: SavedView, gathered: Tensor, stream: Stream) -> Tensor:
    """Returns new memory of ``stream`` with the gathered elements in the places of ``view``."""
    layout = Layout(view.storage.footprint.nbytes, view.storage.layout.alignment_offset)
    place = transfers.runtime.allocate(layout, transfers.device, stream)
    storage, first_byte = place.untyped_storage(), int(place.storage_offset())
    elements = _elements(storage, first_byte, view.size, view.stride, view.dtype)
    elements.copy_(_as_elements(gathered, elements))
    return place


def _elements(
    storage: torch.UntypedStorage, first_byte: int, size: torch.Size, stride: tuple[int, ...], dtype: torch.dtype
) -> Tensor:
    """Returns the distinct elements of a view of ``storage`` whose first one begins at ``first_byte``.

    The result has no conjugate or negative bit, which a copy would apply.
    """
    distinct = tuple(1 if step == 0 else length for length, step in zip(size, stride, strict=True))
    nothing = without_bytes(dtype, storage.device).data
    return set_over(nothing, storage, first_byte // dtype.itemsize, distinct, stride)


def _as_elements(gathered: Tensor, elements: Tensor) -> Tensor:
    """Returns flat bytes as a contiguous tensor of the dtype and the size of ``elements``."""
    return gathered.view(elements.dtype).view(elements.size())
