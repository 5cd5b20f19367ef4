"""One log of the transfers of an ``Offload``: the engine writes entries, readers turn them into seconds.

    stats      count each wait once its device has passed it     here
    budgets    read the waits of a step                          eager/keeping.py
    traces     read every entry as soon as it is written         observe/trace.py

[Note: entries of the log]
Waits are always logged, for the stats. Copies and offloads by graphs are logged only while a trace runs; the writer
checks ``on_entry`` first, so that it makes no entry without a reader. The duration of a wait or a copy is not known
when the entry is written, and the writer does not wait for it: an entry has moments and events, from which its reader
computes seconds later. A trace needs the current module and the bytes held at that moment, so it reads within the call
that writes. An entry is dropped once all readers have read it. If the log is full, the oldest entry is dropped unread.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import torch

from eager_offload.engine.transfer import CountedBytes
from eager_offload.runtime.base import Event, Moment, Runtime
from eager_offload.stats import Counters
from eager_offload.tiers.forking import Living

#: Most entries in the log.
_MOST = 1 << 16


class Copied(NamedTuple):
    device: torch.device
    #: ``"offload"``, ``"reload"`` or ``"prefetch"``.
    what: str
    nbytes: int
    tier: str
    #: Recorded after the copy.
    event: Event
    #: The key of the saved storage; ``None`` for bytes of a compiled graph.
    key: int | None


class Waited(NamedTuple):
    device: torch.device
    runtime: Runtime
    #: The kind of transfer; empty if a tier grew, or if several transfers had to be over.
    what: str
    #: Whether the wait made room for other copies out.
    fills_window: bool
    #: Moments of the compute stream before and after the wait.
    before: Moment
    after: Moment
    #: The host's moment when the wait began.
    called: Moment
    #: The counters to which the wait is added.
    counters: Counters

    def seconds(self) -> float | None:
        """Returns how long compute waited, in seconds; ``None`` while its device has not passed the wait."""
        return self.runtime.seconds_between(self.before, self.after)

    def synchronize(self) -> None:
        if not isinstance(self.after, float):
            self.runtime.seconds_between(self.before, self.after, synchronize=True)


class GraphOffloaded(NamedTuple):
    record: CountedBytes
    #: At the first offload of a graph, the saves that the graph keeps (see ``stats.kept_by_graph``); else empty.
    region: str


Entry: TypeAlias = Copied | Waited | GraphOffloaded


@dataclass(slots=True, eq=False, weakref_slot=True)
class Reader:
    """A position in the log: its owner has read the entries before."""

    position: int


class TransferLog:
    """The log. All methods require the lock of the accounts."""

    def __init__(self) -> None:
        self._entries: deque[Entry] = deque()
        self._readers: Living[Reader] = Living()
        #: The number of the next entry.
        self.end = 0
        #: Called after each entry while a trace runs; it reads the entry.
        self.on_entry: Callable[[], None] | None = None
        #: The position of the stats.
        self.counted = self.reader()

    @property
    def begin(self) -> int:
        """The number of the oldest entry; computed, because an interrupt could separate a stored number from it."""
        return self.end - len(self._entries)

    def reader(self) -> Reader:
        """Returns a reader of future entries; unread entries are held as long as the reader lives."""
        reader = Reader(self.end)
        self._readers.add(reader)
        return reader

    def write(self, entry: Entry) -> None:
        self._entries.append(entry)
        self.end += 1
        if self.on_entry is not None:
            self.on_entry()
        if len(self._entries) > _MOST:
            self._entries.popleft()

    def read(self, reader: Reader, end: int | None = None) -> Iterator[Entry]:
        """Yields the unread entries before ``end``; an entry counts as read when the next one is requested."""
        reader.position = max(reader.position, self.begin)
        while reader.position < (self.end if end is None else end):
            yield self._entries[reader.position - self.begin]
            reader.position += 1

    def count_stalls(self) -> None:
        """Counts the waits that their devices have passed, in the order in which they ended on the host.

        Then drops the entries that all readers have read.
        """
        for entry in self.read(self.counted):
            if isinstance(entry, Waited):
                if (seconds := entry.seconds()) is None:
                    break
                entry.counters.stall(seconds, fills_window=entry.fills_window)
        entries, unread = self._entries, min([reader.position for reader in self._readers])
        while entries and self.end - len(entries) < unread:
            entries.popleft()

    def uncounted(self) -> list[Waited]:
        return [entry for entry in self.read(Reader(self.counted.position)) if isinstance(entry, Waited)]
