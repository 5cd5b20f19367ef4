"""What a tier is: bytes that rest somewhere, named by slots that give themselves back."""

from __future__ import annotations

import abc
from collections.abc import Hashable
from dataclasses import dataclass
from typing import ClassVar, NamedTuple, Protocol

from torch import Tensor

from eager_offload.tiers.finalizers import FinalizerRecord


@dataclass(slots=True, unsafe_hash=True)
class Fence:
    """The last use of some bytes: they may be written again once ``event`` has completed. It never changes.

    The event and the runtime that can judge it travel together, since a slot may outlive every other
    trace of the transfer. There is one for each copy, and what is frozen takes three times as long to make.
    """

    runtime: _Judge
    event: Hashable

    def passed(self) -> bool:
        """Returns whether the event has completed; never blocks."""
        return self.runtime.query(self.event)


class _Judge(Protocol):
    """The part of a runtime that a fence needs."""

    def query(self, event: Hashable) -> bool: ...


class SlotRecord(FinalizerRecord["Slot"]):
    """What a slot leaves behind."""

    __slots__ = ("carried", "fences", "nbytes")
    fences: tuple[Fence, ...]
    nbytes: int
    #: Bytes that travel, each way; once the write is over. Less than ``nbytes`` where a part is known to be zero.
    carried: int


class Slot(abc.ABC):
    """Room for ``nbytes`` bytes in a tier.

    [Note: slots give themselves back]
    A slot is owned by references alone: the saved storage whose bytes it holds, and the transfer that is writing
    or reading it. When the last one goes, its record, which knows range and fences, lands in a ``deque`` of the tier;
    see [Note: finalizers] in ``finalizers.py``. The tier takes the range back when the next slot is reserved.
    """

    tier: ClassVar[str]
    #: Whether ``write`` takes a storage as well, whose first bytes are meant.
    writes_storages: ClassVar[bool] = False
    #: Slots of different lanes are written, and read, at once.
    lane: int = 0
    __slots__ = ("__weakref__", "nbytes", "record")

    def __init__(self, nbytes: int, fences: tuple[Fence, ...], record: SlotRecord | None = None) -> None:
        self.nbytes = nbytes
        self.record = SlotRecord(self) if record is None else record
        self.record.nbytes, self.record.carried, self.record.fences = nbytes, nbytes, fences

    @property
    def fences(self) -> tuple[Fence, ...]:
        """Uses of these bytes that have to be over before they are written again.

        A new slot carries those of the range's last owner; each transfer that touches the slot adds its own. That of a
        write goes once the host knows that it is over.
        """
        return self.record.fences

    @fences.setter
    def fences(self, fences: tuple[Fence, ...]) -> None:
        self.record.fences = fences

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
        """Returns the slot's bytes as memory that keeps the slot. It takes none of its own until it is read.

        Raises:
            MemoryError: the system has no room for it among the process's addresses.
        """


class Shortage(NamedTuple):
    """Why a tier has no room."""

    #: A clause that says what binds, with numbers.
    reason: str
    #: What the user can do about it: a clause in the imperative.
    remedy: str


class MustGrow(Exception):
    """There is room once a tier has taken more memory from the system, or has made its files longer."""


class Tier(abc.ABC):
    """A place where saved bytes rest, with a bound in bytes."""

    name: ClassVar[str]

    @abc.abstractmethod
    def reserve(self, nbytes: int) -> Slot | None:
        """Returns room for ``nbytes`` bytes, or ``None`` where the budget or the machine has none.

        Reserving comes before moving: once it has succeeded, only an I/O error can stop the bytes. Thread-safe.
        """

    @abc.abstractmethod
    def at_hand(self, nbytes: int) -> Slot | None:
        """Does the same for a caller with a lock that others wait for: it takes nothing from the system.

        Raises:
            MustGrow: that is what ``reserve`` would do.
        """

    @property
    def lanes(self) -> int:
        """How many of its slots can be written at once."""
        return 1

    @property
    @abc.abstractmethod
    def shortage(self) -> Shortage:
        """Why ``reserve`` last found no room."""

    def take(self, nbytes: int) -> Shortage | None:
        """Takes from the system now what slots of ``nbytes`` bytes in all need; those that there are count.

        Returns:
            Why it has less; ``None`` where it has as much.
        """
        raise NotImplementedError(f"the {self.name} tier takes nothing before it is needed")

    @abc.abstractmethod
    def warn(self, said: set[str]) -> None:
        """Warns of what ``reserve`` has taken, unless ``said`` holds that; see ``warn_once``."""

    def release_idle(self) -> None:  # noqa: B027  # most tiers keep nothing idle that another program could use
        """Gives idle memory back if the machine is short of it, as a forward begins. Cheap where nothing is to do."""

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
        """Most bytes in slots at one time since ``restart_peak``."""

    @property
    def written_bytes(self) -> int:
        """Bytes that were written to disks so far; 0 for memory, which does not wear."""
        return 0

    @abc.abstractmethod
    def restart_peak(self) -> None:
        """Starts measuring the peak anew, from what is in slots now."""

    @abc.abstractmethod
    def close(self) -> None:
        """Gives everything back to the system. Slots that are still alive keep working until they go. Idempotent."""
