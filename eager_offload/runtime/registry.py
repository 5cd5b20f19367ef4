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
        ticket = next(self._tickets)
        self._pending[ticket] = Pending(event, keepalive)
        return ticket

    def arrived(self, ticket: int) -> bool:
        """Whether the transfer has completed, by success or by failure; never blocks."""
        return self._runtime.query(self._find(ticket).event)

    def wait(self, ticket: int, stream: Stream) -> None:
        """Makes ``stream`` wait for the transfer, and ends its keepalive.

        Raises:
            OffloadError: nothing is pending under ``ticket``, or (on a CPU device) the transfer failed.
        """
        pending = self._take(ticket)
        try:
            self._runtime.wait(stream, pending.event)
        except BaseException as error:
            self._claim_again(ticket, pending, error)
            raise

    def synchronize(self, ticket: int) -> None:
        """Makes the host wait for the transfer, and ends its keepalive.

        Raises:
            OffloadError: nothing is pending under ``ticket``, or the transfer failed.
        """
        pending = self._take(ticket)
        try:
            self._runtime.synchronize(pending.event)
        except BaseException as error:
            self._claim_again(ticket, pending, error)
            raise

    def tickets(self) -> list[int]:
        """Every ticket that is pending, oldest first."""
        return list(self._pending)

    def _claim_again(self, ticket: int, pending: Pending, error: BaseException) -> None:
        """A KeyboardInterrupt in a wait of the host must not end the keepalive of a copy that is still running."""
        if not isinstance(error, OffloadError):
            self._pending[ticket] = pending

    def _find(self, ticket: int) -> Pending:
        pending = self._pending.get(ticket)
        if pending is None:
            raise _unpaired(ticket)
        return pending

    def _take(self, ticket: int) -> Pending:
        pending = self._pending.pop(ticket, None)
        if pending is None:
            raise _unpaired(ticket)
        return pending


def _unpaired(ticket: int) -> OffloadError:
    return OffloadError(
        f"wait for transfer {ticket}, but nothing is pending under it: every wait pairs with exactly one offload or "
        "reload, enqueued before it, and takes it up once. A second stream waits for the handle's event"
    )
