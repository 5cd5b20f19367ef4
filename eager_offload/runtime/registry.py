"""Transfers whose completion nobody has taken up yet."""

from __future__ import annotations

import itertools
from typing import NamedTuple

from eager_offload.errors import OffloadError
from eager_offload.runtime.base import Event, Runtime, Stream

__all__ = ["Pending", "Registry"]


class Pending(NamedTuple):
    """A transfer's completion and what has to stay alive until then; they travel together."""

    event: Event
    keepalive: object


class Registry:
    """Completions by ticket.

    [Note: register, wait, keepalive]
    Offloads and reloads *register* an event under a new ticket, together with a keepalive: the source of the copy and
    its target. A *wait* takes the registration up, exactly once: it makes a stream wait for the event, after which the
    keepalive may go. Whoever needs the same bytes on a further stream waits for the event itself, which the handle
    keeps. A ticket is a number that is never given twice, so a new transfer cannot be mistaken for an old one, as it
    could be under an address.

    Safe across threads without a lock: an accelerator's backward runs on autograd's own threads, and each method is a
    single dictionary operation.
    """

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._pending: dict[int, Pending] = {}
        self._tickets = itertools.count(1)

    def __del__(self) -> None:
        # Its owner is gone with transfers under way: what they read and write must outlive them all the same.
        for pending in self._pending.values():
            self._runtime.leave_behind(pending.event, pending.keepalive)

    def __len__(self) -> int:
        return len(self._pending)

    def register(self, event: Event, keepalive: object) -> int:
        """Takes note of a transfer that was enqueued; returns its ticket."""
        ticket, pending = next(self._tickets), Pending(event, keepalive)
        self._pending[ticket] = pending
        return ticket

    def forget(self, ticket: int | None) -> None:
        """Ends the keepalive of a transfer that is over, if nobody has done so yet."""
        if ticket is not None:
            self._pending.pop(ticket, None)

    def arrived(self, ticket: int) -> bool:
        """Whether the transfer has completed, by success or by failure; never blocks."""
        return self._runtime.query(self._find(ticket).event)

    def wait(self, ticket: int, stream: Stream) -> None:
        """Makes ``stream`` wait for the transfer, and ends its keepalive.

        Raises:
            OffloadError: nothing is pending under ``ticket``, or (on a CPU device) the transfer failed.
        """
        event = self._find(ticket).event
        try:
            self._runtime.wait(stream, event)
        except OffloadError:
            self.forget(ticket)
            raise
        self._take_up(ticket)

    def synchronize(self, ticket: int) -> None:
        """Makes the host wait for the transfer, and ends its keepalive.

        Raises:
            OffloadError: nothing is pending under ``ticket``, or the transfer failed.
        """
        event = self._find(ticket).event
        try:
            self._runtime.synchronize(event)
        except OffloadError:
            self.forget(ticket)
            raise
        self._take_up(ticket)

    def tickets(self) -> list[int]:
        """Every ticket that is pending, oldest first."""
        return list(self._pending)

    def _find(self, ticket: int) -> Pending:
        pending = self._pending.get(ticket)
        if pending is None:
            raise _unpaired(ticket)
        return pending

    def _take_up(self, ticket: int) -> None:
        # Not before the wait: a KeyboardInterrupt in it must not end the keepalive of a copy that is still running.
        if self._pending.pop(ticket, None) is None:
            raise _unpaired(ticket)


def _unpaired(ticket: int) -> OffloadError:
    return OffloadError(
        f"wait for transfer {ticket}, but nothing is pending under it: every wait pairs with exactly one offload or "
        "reload, enqueued before it, and takes it up once. A second stream waits for the handle's event"
    )
