"""The state and the counts of saved bytes that may move, and one copy of such bytes."""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum, auto
from typing import ClassVar, TypeVar

import torch

from eager_offload.errors import OffloadError
from eager_offload.runtime.base import Event
from eager_offload.stats import Counters, KeepReason, LiveBytes, LiveStorage
from eager_offload.tiers.base import Slot
from eager_offload.tiers.forking import FinalizerRecord
from eager_offload.torch_private.memory import weak_storage

T = TypeVar("T")


class State(Enum):
    """The state of saved bytes between their pack and the end of their last handle."""

    WAITING = auto()
    """The source is held; its copy is not due yet."""
    LEAVING = auto()
    """The copy is queued or runs; the source is held."""
    AWAY = auto()
    """The bytes are stored in a tier; the source was released."""
    KEPT = auto()
    """The bytes stay on the device, for the reason that was counted."""


#: Aliases: before Python 3.12 an attribute of an Enum class costs as much as several calls, and each saved tensor's
#: state is compared about a dozen times.
WAITING, LEAVING, AWAY, KEPT = State


class CountedBytes:
    """The counts of saved bytes that may move. The lock of their ``Transfers`` guards them."""

    #: The warning's text on bytes whose copy failed.
    fallback: ClassVar[str] = "the saved tensor stays on {device}"
    #: Empty: subclasses list ``COUNTED`` instead, since a weak reference allows only one base class with slots.
    __slots__ = tuple[str, ...]()
    state: State
    #: The counters of these bytes, and their number: the size of the first saved view.
    counters: Counters
    logical_bytes: int
    device_bytes: int
    #: The accounts of live bytes, and the record of their storage; ``None`` if the stats do not follow a storage.
    live: LiveBytes
    storage: LiveStorage | None
    #: Bytes that autograd would hold without offload, if no storage is followed.
    autograd_bytes: int
    #: Device bytes outside the storage that they occupy if kept.
    apart_bytes: int
    #: Further bytes that stay on the device as long as the owner lives.
    beside_bytes: int
    #: Bytes of further saves of the same storage.
    shared_bytes: int
    kept: KeepReason
    #: Whether backward has unpacked them since they left.
    is_unpacked: bool
    is_gone: bool

    def save(
        self,
        counters: Counters,
        nbytes: int,
        reason: KeepReason,
        device_bytes: int,
        storage: torch.UntypedStorage | None = None,
    ) -> None:
        """Counts ``nbytes`` bytes as kept for ``reason``, until they leave.

        Args:
            device_bytes: the device bytes that they occupy if kept.
            storage: their storage, if the stats shall follow it until it dies.
        """
        self.counters, self.logical_bytes, self.kept, self.device_bytes = counters, nbytes, reason, device_bytes
        self.live = live = counters.live
        self.beside_bytes = 0
        if storage is not None:
            self.storage, self.autograd_bytes, self.apart_bytes = live.add(storage), 0, 0
        else:
            self.storage, self.autograd_bytes, self.apart_bytes = None, nbytes, device_bytes
            live.without_offload += nbytes
        if live.on_device > counters.device_bytes_peak or live.without_offload > counters.without_offload_bytes_peak:
            counters.note_live()
        self.state, self.shared_bytes, self.is_unpacked, self.is_gone = WAITING, 0, False, False
        counters.kept(reason, nbytes)

    def keep_beside(self, nbytes: int) -> None:
        """Counts ``nbytes`` further bytes as alive for as long as the owner lives."""
        self.beside_bytes = nbytes
        self.live.on_device += nbytes
        self.live.without_offload += nbytes
        self.counters.note_live()

    def stay(self, reason: KeepReason) -> None:
        """Counts the bytes, and all saves that share them, as kept: they did not leave, or their copy failed."""
        counters, nbytes = self.counters, self.logical_bytes
        if self.state is not KEPT and not self.is_gone:
            self.live.on_device += self.apart_bytes
        if self.state is WAITING:
            counters.kept_bytes[self.kept] -= nbytes
        else:
            counters.offloaded_bytes -= nbytes
            counters.offloaded_tensors -= 1
            if self.is_unpacked:  # kept bytes are not counted as forwarded
                counters.forwarded_bytes -= nbytes
        counters.kept_bytes[reason] += nbytes + self.shared_bytes
        counters.shared_bytes -= self.shared_bytes
        self.state, self.kept = KEPT, reason

    def on_unpack(self, *, resident: bool) -> None:
        """Counts the first unpack since the bytes left.

        Args:
            resident: whether the bytes are still or again on the device.
        """
        if not self.is_unpacked:
            self.is_unpacked = True
            if resident:
                self.counters.forwarded_bytes += self.logical_bytes
            else:
                self.counters.reloaded_bytes += self.logical_bytes

    def on_transferred(self, transfer: Transfer, failure: OffloadError | None) -> None:
        """Called when the copy out is over; ``state`` is AWAY, or KEPT if the copy failed."""


COUNTED = tuple(name for name in CountedBytes.__annotations__ if name != "fallback")


class BytesRecord(FinalizerRecord[T], CountedBytes):
    """A weak reference to the owner of saved bytes, with their counts: a transfer may outlive the owner."""

    __slots__ = COUNTED

    def on_finalized(self) -> None:
        self.is_gone = True
        live = self.live
        live.without_offload -= self.autograd_bytes + self.beside_bytes
        live.on_device -= self.beside_bytes + (self.apart_bytes if self.state is KEPT else 0)
        if self.storage is not None:
            live.dropped.append(self.storage)
        if self.state is AWAY and not self.is_unpacked:
            self.counters.released_bytes += self.logical_bytes


class Transfer:
    """One copy of bytes, out or back. The offloader, and not this object, holds the memory until the copy is over."""

    __slots__ = (
        "__weakref__",
        "address",
        "counters",
        "event",
        "held_after",
        "is_held",
        "live",
        "live_nbytes",
        "moved",
        "nbytes",
        "record",
        "slot",
        "source",
        "source_nbytes",
        "tier",
    )

    def __init__(
        self,
        slot: Slot,
        nbytes: int,
        counters: Counters,
        record: CountedBytes | None = None,
        source: torch.UntypedStorage | None = None,
    ) -> None:
        #: Completes with the copy; `None` before the copy has started.
        self.event: Event = None
        #: The record of the slot: only the copy and the owner of the bytes hold the slot.
        self.slot, self.tier = slot.record, slot.tier
        #: Device bytes that the library holds for this copy, and whether it still does.
        self.nbytes = nbytes
        self.is_held = True
        #: The bytes that `live` counts for this copy: those outside storages that the stats follow.
        self.live: LiveBytes | None = None
        self.live_nbytes = 0
        #: Whether the bytes stay held after the copy, until ``drop_resident``.
        self.held_after = False
        #: The counters of the link, and the bytes that the copy moves.
        self.counters = counters
        self.moved = slot.nbytes
        self.record = record
        #: The source storage with its address and size, which must not change during the copy: see
        #: [Note: replaced memory] in `transfers.py`. Unset for gathered bytes.
        self.source: Callable[[], torch.UntypedStorage | None] | None = None
        if source is not None:
            self.source, self.address, self.source_nbytes = weak_storage(source), source.data_ptr(), source.nbytes()
