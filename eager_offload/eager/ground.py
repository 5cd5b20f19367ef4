"""What the two directions of a lane stand on: one device, its runtime, and what is counted.

[Note: interrupts]
A KeyboardInterrupt is raised when a function is entered, after a call, and at the end of a loop's turn; never between
two statements that call nothing. So wherever one may come, doing it again or leaving it half done has to be harmless:
    - What belongs together changes in statements without a call between them. The objects that this needs are made
      before.
    - All else may be done twice. It is done first, and the entry that has it done again is taken out last.
    - A copy that nobody took note of is held, with both of its ends, until it is over.
Where the order of lines serves this, they refer to this note.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from eager_offload._torch import profiled, profiler_is_on
from eager_offload.runtime.base import Event, Runtime, Stream
from eager_offload.runtime.registry import Registry
from eager_offload.stats import Accounts
from eager_offload.tiers.base import Fence, Slot, Tier

if TYPE_CHECKING:
    from eager_offload.eager.handles import SavedStorage

__all__ = ["Ground", "Transfer"]


class Transfer(Protocol):
    """What is known of a copy to those who started it. It exists before the copy does."""

    event: Event
    #: The registration that the first wait takes up; ``None`` before the copy, and after that.
    ticket: int | None


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

    def note_peak(self) -> None:
        """The library may hold more on the device than it ever did."""
        tally = self.accounts.tally
        if self.resident_bytes > tally.resident_bytes_peak:
            tally.resident_bytes_peak = self.resident_bytes

    def copy(
        self,
        dst: Tensor | Slot,
        src: Tensor | Slot,
        slot: Slot,
        stream: Stream,
        after: Sequence[Event],
        *,
        keepalive: object,
        transfer: Transfer,
        what: str = "offload",
        key: int | None = None,
    ) -> None:
        """Enqueues a copy of bytes on ``stream`` and registers it, as the last use of ``slot``.

        See [Note: interrupts]: one may come when the copy is enqueued and nobody knows of it yet. Both of its ends must
        outlive it all the same, and the slot's next owner must wait for it. No call stands between its registration and
        what the caller does next.

        Args:
            keepalive: both ends, and whatever else has to stay until it is over.
            transfer: is told the event that the copy is over with, and the ticket.
            what: ``"offload"``, ``"reload"`` or ``"prefetch"``, for traces.
            key: of the saved storage, for traces.
        """
        runtime, recorder = self.runtime, self.accounts.recorder
        try:
            if profiler_is_on():
                with profiled(what):
                    event = runtime.copy(dst, src, stream, after)
            else:
                event = runtime.copy(dst, src, stream, after)
            # It stands for all earlier uses: a write waits for them, and a read for the write; reads are on one stream.
            slot.fences = (Fence(runtime, event),)
            if recorder is not None:
                recorder.copied(self, what, slot, event, key)
            ticket = self.registry.register(event, keepalive)
        except BaseException:
            event = runtime.record(stream)
            slot.fences = (*slot.fences, Fence(runtime, event))
            runtime.leave_behind(event, keepalive)
            raise
        transfer.event, transfer.ticket = event, ticket

    def reserve(self, tiers: Sequence[Tier], nbytes: int, *, else_: str | None = None) -> Slot | None:
        """Room in the first of ``tiers`` that has it; ``None``, and counted, where none has.

        Args:
            else_: what becomes of the bytes then, for the one who is told; ``None``: they stay where they are.
        """
        tally, first = self.accounts.tally, tiers[0]
        for tier in tiers:
            slot = tier.reserve(nbytes)
            if slot is not None:
                if tier is not first and tally.demote(f"{first.name}_to_{tier.name}"):
                    reason, remedy = first.shortage
                    self.tell(
                        f"the {first.name} tier is full: saved tensors go to the {tier.name} tier as well. The reason: "
                        f"{reason}. To change that, {remedy}"
                    )
                return slot
        if tally.demote("budget"):
            names = " and ".join(tier.name for tier in tiers)
            why = "; ".join(f"{tier.name}: {tier.shortage.reason}" for tier in tiers)
            cures = [tier.shortage.remedy for tier in tiers]
            if all(tier.name != "disk" for tier in tiers):
                cures.append('let saved tensors go on to disk (tier="auto" and a disk_path)')
            cure = ", or ".join(dict.fromkeys(cures))
            self.tell(
                f"no room for {nbytes} bytes in the {names} tier: {else_ or f'they stay on {self.device}'}. "
                f"The reason: {why}. To change that, {cure}"
            )
        return None

    def tell(self, message: str) -> None:
        """A warning to the user, who is told each thing once."""
        warnings.warn(f"eager_offload: {message}", RuntimeWarning, stacklevel=3)
