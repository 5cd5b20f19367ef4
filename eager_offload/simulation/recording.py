"""A log kept as it was written, to be read again: whole, or with one entry left out."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from eager_offload.runtime.base import Event, Stream
from eager_offload.simulation.log import Log
from eager_offload.tiers.base import Region

__all__ = ["Allocated", "Entry", "Freed", "Operation", "Recorded", "Recording", "Synchronized", "Waited"]


@dataclass(frozen=True, slots=True)
class Operation:
    """See ``Log.access``."""

    stream: Stream
    reads: tuple[Region, ...]
    writes: tuple[Region, ...]
    what: str

    def feed(self, log: Log) -> None:
        log.access(self.stream, self.reads, self.writes, self.what)


@dataclass(frozen=True, slots=True)
class Allocated:
    """See ``Log.allocate``."""

    stream: Stream
    region: Region
    what: str

    def feed(self, log: Log) -> None:
        log.allocate(self.stream, self.region, self.what)


@dataclass(frozen=True, slots=True)
class Freed:
    """See ``Log.free``."""

    stream: Stream
    region: Region
    what: str

    def feed(self, log: Log) -> None:
        log.free(self.stream, self.region, self.what)


@dataclass(frozen=True, slots=True)
class Recorded:
    """See ``Log.record``."""

    stream: Stream
    event: Event

    def feed(self, log: Log) -> None:
        log.record(self.stream, self.event)


@dataclass(frozen=True, slots=True)
class Waited:
    """See ``Log.wait``."""

    stream: Stream
    event: Event

    def feed(self, log: Log) -> None:
        log.wait(self.stream, self.event)


@dataclass(frozen=True, slots=True)
class Synchronized:
    """See ``Log.synchronize``."""

    event: Event

    def feed(self, log: Log) -> None:
        log.synchronize(self.event)


Entry: TypeAlias = Operation | Allocated | Freed | Recorded | Waited | Synchronized


class Recording(Log):
    """Keeps every entry; its place in ``entries`` is the number that a `Checker` gives it.

    It grows without a bound and keeps the events alive: for short programs.
    """

    def __init__(self, then: Log | None = None) -> None:
        self.entries: list[Entry] = []
        #: Another log that gets every entry too, such as a ``Checker``.
        self.then = then
        self._lock = threading.RLock()

    def replay(self, log: Log, without: int | None = None) -> None:
        """Writes all entries to ``log`` in their order, leaving out the one at index ``without``."""
        for index, entry in enumerate(self.entries):
            if index != without:
                entry.feed(log)

    @property
    def edges(self) -> list[int]:
        """The entries that order one agent after another, by index: what a test may leave out to see it reported."""
        return [index for index, entry in enumerate(self.entries) if isinstance(entry, Waited | Synchronized)]

    # -- the log --------------------------------------------------------------------------------------------------

    def access(self, stream: Stream, reads: Sequence[Region], writes: Sequence[Region], what: str) -> None:
        self._put(Operation(stream, tuple(reads), tuple(writes), what))

    def allocate(self, stream: Stream, region: Region, what: str) -> None:
        self._put(Allocated(stream, region, what))

    def free(self, stream: Stream, region: Region, what: str) -> None:
        self._put(Freed(stream, region, what))

    def record(self, stream: Stream, event: Event) -> None:
        self._put(Recorded(stream, event))

    def wait(self, stream: Stream, event: Event) -> None:
        self._put(Waited(stream, event))

    def synchronize(self, event: Event) -> None:
        self._put(Synchronized(event))

    def _put(self, entry: Entry) -> None:
        with self._lock:
            self.entries.append(entry)
            if self.then is not None:
                entry.feed(self.then)
