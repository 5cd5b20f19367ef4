"""A copy of saved bytes, either way, and what is counted of bytes that may move."""

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
    """Where saved bytes are between their pack and the end of their last handle."""

    WAITING = auto()
    """The source is held; its copy has not started."""
    LEAVING = auto()
    """The copy is on its way; the source is still held."""
    AWAY = auto()
    """The bytes rest in a tier, and the source was released."""
    KEPT = auto()
    """They could not leave (or must not) and stay, for the reason that was counted."""


#: The same, each by its name: before Python 3.12, to ask the class for a member takes as long as some calls of
#: functions, and each saved tensor is asked about a dozen times.
WAITING, LEAVING, AWAY, KEPT = State


class CountedBytes:
    """What is counted of saved bytes that may move: of ``Transfers``, so the lock is theirs."""

    #: What becomes of bytes that did not arrive, for the warning.
    fallback: ClassVar[str] = "the saved tensor stays on {device}"
    #: None: classes of these have ``COUNTED`` among theirs, since a weak reference takes no second base with slots.
    __slots__ = tuple[str, ...]()
    state: State
    #: Where the bytes are counted, and how many: those of the view that was saved first.
    counters: Counters
    logical_bytes: int
    #: Those of the device that they take where they stay.
    device_bytes: int
    #: Where what is alive is counted, and the storage that they are in; ``None``: they are in none that is followed.
    live: LiveBytes
    storage: LiveStorage | None
    #: Without a storage: the bytes that autograd would hold because of them.
    autograd_bytes: int
    #: Bytes beside their storage that they take on the device where they stay.
    apart_bytes: int
    #: Those that stay whatever becomes of these, for as long as the owner lives.
    beside_bytes: int
    #: Bytes of further saves that are counted there as shared with these.
    shared_bytes: int
    #: Why they stay, or are counted as long as they have not left.
    kept: KeepReason
    #: Whether they were asked for since they left.
    asked: bool
    #: Whether the owner has died.
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
            device_bytes: those of the device that they take where they stay.
            storage: what they are in, if it is to be followed to its end.
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
        self.state, self.shared_bytes, self.asked, self.is_gone = WAITING, 0, False, False
        counters.kept(reason, nbytes)

    def keep_beside(self, nbytes: int) -> None:
        """Counts ``nbytes`` bytes more as alive for as long as the owner lives."""
        self.beside_bytes = nbytes
        self.live.on_device += nbytes
        self.live.without_offload += nbytes
        self.counters.note_live()

    def stay(self, reason: KeepReason) -> None:
        """The bytes have not left, or did not arrive, and stay, and with them every save that shares them."""
        counters, nbytes = self.counters, self.logical_bytes
        if self.state is not KEPT and not self.is_gone:
            self.live.on_device += self.apart_bytes
        if self.state is WAITING:
            counters.kept_bytes[self.kept] -= nbytes
        else:
            counters.offloaded_bytes -= nbytes
            counters.offloaded_tensors -= 1
            if self.asked:  # which makes them no more forwarded than any others that stay
                counters.forwarded_bytes -= nbytes
        counters.kept_bytes[reason] += nbytes + self.shared_bytes
        counters.shared_bytes -= self.shared_bytes
        self.state, self.kept = KEPT, reason

    def on_unpack(self, *, resident: bool) -> None:
        """Backward asks for the bytes, which have left; they may be resident all the same."""
        if not self.asked:
            self.asked = True
            if resident:
                self.counters.forwarded_bytes += self.logical_bytes
            else:
                self.counters.reloaded_bytes += self.logical_bytes

    def on_transferred(self, transfer: Transfer, failure: OffloadError | None) -> None:
        """The copy out is over: ``state`` says whether the bytes rest in a tier, or have stayed because it failed."""


#: The slots of ``CountedBytes``.
COUNTED = tuple(name for name in CountedBytes.__annotations__ if name != "fallback")


class BytesRecord(FinalizerRecord[T], CountedBytes):
    """A weak reference to what owns saved bytes, with what is counted of them: a transfer may end after its owner."""

    __slots__ = COUNTED

    def on_finalized(self) -> None:
        """The owner has died."""
        self.is_gone = True
        live = self.live
        live.without_offload -= self.autograd_bytes + self.beside_bytes
        live.on_device -= self.beside_bytes + (self.apart_bytes if self.state is KEPT else 0)
        if self.storage is not None:
            live.dropped.append(self.storage)
        if self.state is AWAY and not self.asked:
            self.counters.released_bytes += self.logical_bytes


class Transfer:
    """A copy of bytes out of a device or back. It holds none of them: its offloader does, until it is over."""

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
        #: When the copy is over; `None` before it has started.
        self.event: Event = None
        #: Of its slot, which only the copy and the owner of the bytes hold.
        self.slot, self.tier = slot.record, slot.tier
        #: The bytes of the device that the library holds for it, and whether it still does.
        self.nbytes = nbytes
        self.is_held = True
        #: Where those of them are counted that are in no storage which is, and how many.
        self.live: LiveBytes | None = None
        self.live_nbytes = 0
        #: Whether it does when the copy is over, until ``DeviceOffloader.release``.
        self.held_after = False
        #: Where the link's bytes and seconds are counted, and how many were.
        self.counters = counters
        self.moved = slot.nbytes
        #: Whose bytes leave; `None` for those that come back.
        self.record = record
        #: What is copied out, and where it had its bytes, which it has to have there until the copy is over: see
        #: [Note: memory that is replaced] in `transfers.py`. None of these for what was gathered.
        self.source: Callable[[], torch.UntypedStorage | None] | None = None
        if source is not None:
            self.source, self.address, self.source_nbytes = weak_storage(source), source.data_ptr(), source.nbytes()
