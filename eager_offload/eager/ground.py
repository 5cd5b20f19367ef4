"""What the two directions of a lane stand on: one device, its runtime, and what is counted."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from eager_offload.runtime.base import Event, Runtime, Stream
from eager_offload.runtime.registry import Registry
from eager_offload.stats import Accounts
from eager_offload.tiers.base import Fence, Slot

if TYPE_CHECKING:
    from eager_offload.eager.handles import SavedStorage

__all__ = ["Ground"]


class Ground:
    """Shared by the parts of one lane; whoever uses it holds ``accounts.lock``."""

    def __init__(self, device: torch.device, runtime: Runtime, accounts: Accounts) -> None:
        self.device = device
        self.runtime = runtime
        self.accounts = accounts
        #: Transfers in both directions whose completion nobody has taken up.
        self.registry = Registry(runtime)
        #: Every storage that was taken and has a living handle, by key.
        self.storages: dict[int, weakref.ref[SavedStorage]] = {}
        #: Bytes on the device that the library holds: newest, on their way out, brought back and not asked for yet.
        self.resident_bytes = 0

    def storage(self, key: int) -> SavedStorage | None:
        """The saved storage of ``key``, while a handle of it lives."""
        ref = self.storages.get(key)
        return None if ref is None else ref()

    def hold(self, nbytes: int) -> None:
        """The library holds ``nbytes`` more on the device."""
        self.resident_bytes += nbytes
        tally = self.accounts.tally
        if self.resident_bytes > tally.resident_bytes_peak:
            tally.resident_bytes_peak = self.resident_bytes

    def let_go(self, nbytes: int) -> None:
        """The library holds ``nbytes`` less on the device."""
        self.resident_bytes -= nbytes

    def copy(self, dst: Tensor | Slot, src: Tensor | Slot, slot: Slot, stream: Stream, after: Sequence[Event]) -> Event:
        """Enqueues a copy of bytes on ``stream``; returns the event that it is over with, the last use of ``slot``.

        [Note: interrupts] A KeyboardInterrupt may come when the copy is enqueued and nobody knows of it yet. Both of
        its ends must outlive it all the same, and the slot's next owner must wait for it.
        """
        runtime = self.runtime
        try:
            event = runtime.copy(dst, src, stream, after)
            # It stands for all earlier uses: a write waits for them, and a read for the write; reads are on one stream.
            slot.fences = (Fence(runtime, event),)
        except BaseException:
            event = runtime.record(stream)
            slot.fences = (*slot.fences, Fence(runtime, event))
            runtime.leave_behind(event, (dst, src))
            raise
        return event

    def tell(self, message: str) -> None:
        """A warning to the user, who is told each thing once."""
        warnings.warn(f"eager_offload: {message}", RuntimeWarning, stacklevel=3)
