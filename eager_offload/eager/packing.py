"""What travels in place of a saved storage: packed when its copy is due, and unpacked for the stream that asks.

[Note: what was packed stands for its source]
Once the copy of what was packed is enqueued, and nothing in it may be refused any more, its source goes: on the device
there are packed bytes only. An unpack before they have arrived is given those, unpacked, and so is one of what did not
arrive, or was taken back. So what was rounded is the same for every unpack from its pack on. On an accelerator,
where the memory of a source may belong to another stream than the one that packs (a batch that was loaded), the runtime
holds it until the device has packed it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from torch import Tensor

from eager_offload._torch import weak_storage
from eager_offload.eager.coding import Coding
from eager_offload.eager.handles import Returned, SavedStorage, SavedView
from eager_offload.engine.transfer import State, Transfer
from eager_offload.engine.transfers import Transfers
from eager_offload.errors import warn_once
from eager_offload.kernels.codecs import CODECS, is_out_of_memory
from eager_offload.runtime.base import Layout, Stream


class Packed(NamedTuple):
    """What travels in place of a storage."""

    packed: Tensor
    #: One ``bool`` on the host, once the stream has got so far: whether the codec can hold it; ``None``: it is known.
    holds: Tensor | None
    #: Whether it is known that it cannot, so that the storage travels as it is.
    is_refused: bool = False


def packed(transfers: Transfers, saved: SavedStorage, coding: Coding) -> Packed | None:
    """What travels in place of a storage; ``None`` where the device has no memory for that, and it stays."""
    runtime, device = transfers.runtime, transfers.device
    try:
        with runtime.enter(saved.stream):  # packing is compute, of the stream that made the tensor
            out = runtime.allocate(Layout(coding.nbytes), device, saved.stream)
            scratch = saved.saves.scratch.of(coding.codec, coding.meta, saved.stream)
            holds = pack_into(out, saved, coding, scratch)
            if holds is None or transfers.device.type != "cpu":
                return Packed(out, None if holds is None else holds.to("cpu", non_blocking=True))
            return Packed(out, None, is_refused=not holds)
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
    transfers.accounts.counters.demote("device_full")
    warn_once(
        "device_full",
        f"{transfers.device} has no memory left to {coding.codec.name} the {coding.nbytes} bytes of a saved "
        "tensor before they leave: they stay, with the storage that they are a part of",
        transfers.accounts.said,
    )
    return None


def let_go(transfers: Transfers, saved: SavedStorage, transfer: Transfer, packed: Tensor) -> None:
    """The copy of ``packed``, which no verdict comes of, has started: see the note above."""
    record = transfer.record
    assert record is not None
    if record.state is not State.LEAVING:
        return  # it is over, or could not start
    saved.packed, record.device_bytes, record.apart_bytes = packed, transfer.moved, transfer.moved
    transfers.shrink(transfer, transfer.moved)
    saved.release_source()


def unpacked(transfers: Transfers, saved: SavedStorage, target: Tensor, stream: Stream) -> Tensor:
    """Memory of ``stream`` with what was packed into ``target``, as the storage had it."""
    assert saved.coding is not None
    place = transfers.runtime.allocate(saved.layout, transfers.device, stream)
    unpack_into(place, saved, target, saved.saves.scratch.of(saved.coding.codec, saved.coding.meta, stream))
    return place


def pack_into(
    out: Tensor,
    saved: SavedStorage,
    coding: Coding,
    scratch: Mapping[str, Tensor] | None = None,
) -> Tensor | None:
    """Packs a storage on the current stream; returns what ``Codec.pack`` does."""
    storage = saved.aliases[0].untyped_storage()
    return CODECS.pack(coding.codec, saved.coded(coding, storage, saved.footprint.start), out, scratch)


def unpack_into(
    place: Tensor, saved: SavedStorage, packed: Tensor, scratch: Mapping[str, Tensor] | None = None
) -> None:
    """Unpacks a storage on the current stream, into memory of its ``layout``."""
    assert saved.coding is not None
    coded = saved.coded(saved.coding, place.untyped_storage(), int(place.storage_offset()))
    CODECS.unpack(saved.coding.codec, packed, coded, scratch)


def unpacked_at_once(view: SavedView, saved: SavedStorage, stream: Stream) -> Tensor:
    """``view``, of what was packed and has not arrived, for ``stream``."""
    transfers, packed, is_shared = saved.saves.transfers, saved.packed, stream == saved.stream
    assert packed is not None
    if not is_shared:
        transfers.runtime.wait(stream, transfers.runtime.record(saved.stream))
    place = unpacked(transfers, saved, packed, stream)
    storage, first_byte = place.untyped_storage(), int(place.storage_offset())
    if is_shared:
        saved.returned = Returned(weak_storage(storage), first_byte, None)
    else:
        transfers.runtime.keep_until(transfers.runtime.record(stream), packed)
    return view.over(storage, first_byte)
