"""What a trace asks of those who move bytes: while one runs, it is ``Accounts.recorder``, and they tell it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from eager_offload.eager.ground import Ground
    from eager_offload.parcels import Parcel
    from eager_offload.runtime.base import Event, Stream
    from eager_offload.tiers.base import Slot

__all__ = ["Recorder", "Waiting"]


class Waiting(Protocol):
    """A wait that has begun."""

    def over(self, what: str) -> None:
        """It is over; ``what`` was waited for."""


class Recorder(Protocol):
    """Called with the accounts' lock held, but for ``waits``. None of these blocks or raises."""

    def copied(self, ground: Ground, what: str, slot: Slot, event: Event, key: int | None) -> None:
        """A copy was enqueued that ``event`` stands behind; arguments as for ``Ground.copy``."""

    def waits(self, ground: Ground, stream: Stream | None) -> Waiting:
        """A wait of ``stream`` begins, or where that is ``None`` of the host."""

    def stays(self, key: int) -> None:
        """The saved storage ``key`` was to leave, and stays."""

    def parcel(self, ground: Ground, parcel: Parcel, region: str | None) -> None:
        """A graph offloads what ``parcel`` stands for; ``region`` as for ``Transfers.offload``."""

    def parcel_stays(self, parcel: Parcel) -> None:
        """The bytes of ``parcel`` did not arrive."""

    def graph_reloads(self, ground: Ground) -> None:
        """A graph asks for something that it offloaded."""
