"""What a tier is: bytes that rest somewhere, named by slots that give themselves back."""

from __future__ import annotations

import abc
from collections.abc import Hashable
from typing import ClassVar, NamedTuple, Protocol

from torch import Tensor

__all__ = ["Fence", "Region", "Shortage", "Slot", "Tier"]


class Region(NamedTuple):
    """A range of bytes, named by identity: never by an address that someone else may get next."""

    space: Hashable
    start: int
    stop: int


class Fence(NamedTuple):
    """The last use of some bytes: they may be written again once ``event`` has completed.

    The event and the runtime that can judge it travel together, since a slot may outlive every other
    trace of the transfer.
    """

    runtime: _Judge
    event: Hashable

    def passed(self) -> bool:
        """Whether the event has completed; never blocks."""
        return self.runtime.query(self.event)


class _Judge(Protocol):
    """The part of a runtime that a fence needs."""

    def query(self, event: Hashable) -> bool: ...


class Slot(abc.ABC):
    """Room for ``nbytes`` bytes in a tier.

    [Note: slots give themselves back]
    A slot is owned by references alone: the saved storage whose bytes it holds, and the transfer that is writing
    or reading it. When the last one goes, its finalizer hands range and fences to the tier by appending to a
    ``deque``. It takes no lock and waits for nothing, because the garbage collector may run it in the middle of any
    locked section. The tier takes the range up the next time someone asks for room.
    """

    tier: ClassVar[str]
    __slots__ = ("__weakref__", "fences", "nbytes")

    def __init__(self, nbytes: int, fences: tuple[Fence, ...]) -> None:
        self.nbytes = nbytes
        #: Uses of these bytes that have to be over before they are written again. A new slot carries those of the
        #: range's last owner; each transfer that touches the slot adds its own.
        self.fences = fences

    @property
    @abc.abstractmethod
    def region(self) -> Region:
        """The slot's bytes, for the happens-before log."""

    @abc.abstractmethod
    def write(self, source: Tensor) -> None:
        """Copies ``source`` into the slot and returns when it is there.

        Args:
            source: a flat ``uint8`` CPU tensor of ``nbytes`` elements, at any address.

        Raises:
            TransferError: the bytes did not arrive; the slot's content is undefined.
        """

    @abc.abstractmethod
    def read(self, target: Tensor) -> None:
        """Copies the slot into ``target`` and returns when it is there.

        Args:
            target: a flat ``uint8`` CPU tensor of ``nbytes`` elements, at any address.

        Raises:
            TransferError: the bytes did not come back.
            CorruptionError: they came back changed (only with ``verify=True``).
        """

    @abc.abstractmethod
    def memory(self) -> memoryview:
        """The slot's bytes as host memory, which keeps the slot. It takes no memory of its own until it is read.

        Raises:
            MemoryError: the system has no room for it among the process's addresses.
        """


class Shortage(NamedTuple):
    """Why a tier has no room."""

    #: A clause that says what binds, with numbers.
    reason: str
    #: What the user can do about it: a clause in the imperative.
    remedy: str


class Tier(abc.ABC):
    """A place where saved bytes rest, with a bound in bytes."""

    name: ClassVar[str]

    @abc.abstractmethod
    def reserve(self, nbytes: int) -> Slot | None:
        """Room for ``nbytes`` bytes, or ``None`` where the budget or the machine has none.

        Reserving comes before moving: once it has succeeded, only an I/O error can stop the bytes. Thread-safe.
        """

    @property
    def shortage(self) -> Shortage:
        """Why ``reserve`` last found no room."""
        return Shortage(f"all of {self.name}_budget is in use", f"raise {self.name}_budget")

    def trim(self) -> None:  # noqa: B027  # most tiers keep nothing idle that anyone else could use
        """A forward begins: gives idle memory back where the machine is short of it. Cheap where nothing is to do."""

    @property
    @abc.abstractmethod
    def used_bytes(self) -> int:
        """Bytes in slots that are alive."""

    @property
    @abc.abstractmethod
    def held_bytes(self) -> int:
        """Bytes that the tier holds from the system: slots, rounding and idle room."""

    @property
    @abc.abstractmethod
    def peak_bytes(self) -> int:
        """Most bytes held at one time since ``restart_peak``."""

    @property
    def written_bytes(self) -> int:
        """Bytes that were written to disks so far; 0 for memory, which does not wear."""
        return 0

    @abc.abstractmethod
    def restart_peak(self) -> None:
        """Starts measuring the peak anew, from what is held now."""

    @abc.abstractmethod
    def close(self) -> None:
        """Gives everything back to the system. Slots that are still alive keep working until they go. Idempotent."""
