"""What a runtime is asked to do, as entries of a log: the form that the happens-before checker reads."""

from __future__ import annotations

import threading
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeAlias

from eager_offload.runtime.base import Event, Stream
from eager_offload.tiers.base import Slot


class ByteRegion(NamedTuple):
    """A range of bytes, named by identity: never by an address that another owner may get next."""

    space: Hashable
    start: int
    stop: int


def region_of(slot: Slot) -> ByteRegion:
    """Returns the bytes of ``slot``: a range of a slab or file, or for a slot of a test's own what it says itself."""
    record: Any = slot.record
    if (found := getattr(record, "range", None)) is None:
        own: Any = slot
        return own.region
    return ByteRegion(("slab", found.slab.serial), found.start, found.start + slot.nbytes)


@dataclass(frozen=True, slots=True)
class Operation:
    """An operation enqueued on ``stream``, and the bytes that it reads and writes."""

    stream: Stream
    reads: tuple[ByteRegion, ...]
    writes: tuple[ByteRegion, ...]
    what: str


@dataclass(frozen=True, slots=True)
class Allocated:
    """``region`` was handed out for use on ``stream``."""

    stream: Stream
    region: ByteRegion
    what: str


@dataclass(frozen=True, slots=True)
class Freed:
    """The host gave ``region`` back to the allocator of ``stream``: its next owner may write it at once."""

    stream: Stream
    region: ByteRegion
    what: str


@dataclass(frozen=True, slots=True)
class Recorded:
    """``event`` stands for all that was enqueued on ``stream`` so far."""

    stream: Stream
    event: Event


@dataclass(frozen=True, slots=True)
class Waited:
    """Everything enqueued on ``stream`` from here on comes after ``event``."""

    stream: Stream
    event: Event


@dataclass(frozen=True, slots=True)
class Synchronized:
    """The host knows that ``event`` is over: it waited, or a query said so."""

    event: Event


Entry: TypeAlias = Operation | Allocated | Freed | Recorded | Waited | Synchronized


class Log(Protocol):
    """Where a runtime writes what it does."""

    def write(self, entry: Entry) -> None:
        """Adds ``entry``. Entries come in the order in which the host issues what they say."""


class WrittenLog(Log):
    """A log kept as it was written, to be read again: whole, or with one entry left out.

    The place of an entry in ``entries`` is the number that a `Checker` gives it. It grows without a bound and keeps the
    events alive: for short programs.
    """

    def __init__(self, then: Log | None = None) -> None:
        self.entries: list[Entry] = []
        #: Another log that gets every entry too, such as a ``Checker``.
        self.then = then
        self._lock = threading.RLock()

    def write(self, entry: Entry) -> None:
        with self._lock:
            self.entries.append(entry)
            if self.then is not None:
                self.then.write(entry)

    def replay(self, log: Log, without: int | None = None) -> None:
        """Writes all entries to ``log`` in their order, leaving out the one at index ``without``."""
        for index, entry in enumerate(self.entries):
            if index != without:
                log.write(entry)

    @property
    def edges(self) -> list[int]:
        """The entries that order one agent after another, by index: what a test may leave out to see it reported."""
        return [index for index, entry in enumerate(self.entries) if isinstance(entry, Waited | Synchronized)]
