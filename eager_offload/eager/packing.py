"""What travels in place of a saved storage: packed when its copy is due, and unpacked for the stream that asks."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from eager_offload.eager.coding import Coding
from eager_offload.eager.handles import SavedStorage
from eager_offload.engine.offloader import DeviceOffloader
from eager_offload.runtime.base import Layout, Stream

__all__ = ["Packed", "packed", "unpacked"]


class Packed(NamedTuple):
    """What travels in place of a storage."""

    packed: Tensor
    #: One ``bool`` on the host, once the stream has got so far: whether the codec can hold it; ``None``: any.
    holds: Tensor | None


def packed(offloader: DeviceOffloader, saved: SavedStorage, coding: Coding) -> Packed | None:
    """What travels in place of a storage; ``None`` where the device has no memory for that, and it stays."""
    layout, storage = Layout(coding.nbytes), saved.aliases[0].untyped_storage()
    try:
        with offloader.runtime.enter(saved.stream):  # packing is compute, of the stream that made the tensor
            out = offloader.runtime.allocate(layout, offloader.device, saved.stream)
            seed = None
            if coding.rounds and coding.codec.unbiased:
                seed = torch.full((1,), coding.seed, dtype=torch.int64, device=offloader.device)
            holds = coding.codec.pack(saved.coded(coding, storage, saved.footprint.start), out, seed)
            return Packed(out, None if holds is None else holds.to("cpu", non_blocking=True))
    except (RuntimeError, MemoryError) as error:
        if not _is_full(error):
            raise
    if offloader.accounts.counters.demote("device_full"):
        offloader.warn(
            f"{offloader.device} has no memory left to {coding.codec.name} the {coding.nbytes} bytes of a saved "
            "tensor before they leave: they stay, with the storage that they are a part of"
        )
    return None


def unpacked(offloader: DeviceOffloader, saved: SavedStorage, target: Tensor, stream: Stream) -> Tensor:
    """Memory of ``stream`` with what was packed into ``target``, as the storage had it."""
    assert saved.coding is not None
    place = offloader.runtime.allocate(saved.layout, offloader.device, stream)
    coded = saved.coded(saved.coding, place.untyped_storage(), int(place.storage_offset()))
    saved.coding.codec.unpack(target, coded)
    return place


def _is_full(error: RuntimeError | MemoryError) -> bool:
    """Whether a device, or the CPU, had no memory for a tensor; torch has an error of its own for the former only."""
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or "DefaultCPUAllocator" in str(error)
