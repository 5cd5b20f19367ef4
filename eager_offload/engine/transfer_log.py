"""What the transfers of one ``Offload`` do, in one list: the engine writes it, others read it.

    stats      read waits, each once its device has passed it     here
    budgets    read the waits of a step                           eager/keeping.py
    traces     read everything, at once                           observe/trace.py

[Note: entries of the log]
Waits are always written: stats count them. Copies and what graphs offload are written while a trace runs: the writer
looks at ``on_entry`` first, so that nothing is made that nobody reads. How long a wait or a copy took is not known when
it is written, and nobody waits for that: an entry has moments and events, which its reader turns into seconds later. A
trace shows which module the thread is in and how many bytes are held, so it reads in the call that writes. An entry
goes when all readers have read it, or when the list is full: then the oldest one goes unread.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import NamedTuple, TypeAlias

import torch

from eager_offload.engine.transfer import CountedBytes
from eager_offload.runtime.base import Event, Moment, Runtime
from eager_offload.stats import Counters
from eager_offload.tiers.forking import Living

#: How many entries the list holds.
_MOST = 1 << 16


class Copied(NamedTuple):
    """A copy was enqueued."""

    device: torch.device
    #: ``"offload"``, ``"reload"`` or ``"prefetch"``.
    what: str
    nbytes: int
    tier: str
    #: Stands behind the copy.
    event: Event
    #: Of the saved storage; ``None`` for bytes of a compiled graph.
    key: int | None


class Waited(NamedTuple):
    """Compute or the host has waited for transfers."""

    device: torch.device
    runtime: Runtime
    #: The transfer that was waited for; empty where a tier grew, or several transfers had to be over.
    what: str
    #: Whether it was so that others may leave.
    fills_window: bool
    #: Moments of the stream that computes, on either side of the wait.
    before: Moment
    after: Moment
    #: When the wait began on the host.
    called: Moment
    #: Where the wait is counted.
    counters: Counters

    def seconds(self) -> float | None:
        """Returns the seconds that compute has waited; ``None`` while its device has not passed the wait."""
        return self.runtime.seconds_between(self.before, self.after)

    def synchronize(self) -> None:
        """Makes the host wait until the device has passed the wait."""
        if not isinstance(self.after, float):
            self.runtime.seconds_between(self.before, self.after, synchronize=True)


class GraphOffloaded(NamedTuple):
    """A compiled graph offloads bytes."""

    record: CountedBytes
    #: With the first offload of a graph, what else it keeps: see ``stats.kept_by_graph``. Else empty.
    region: str


Entry: TypeAlias = Copied | Waited | GraphOffloaded


class Reader:
    """A place in a log: what is written from there on has not been read by its owner."""

    __slots__ = ("__weakref__", "position")

    def __init__(self, position: int) -> None:
        self.position = position


class TransferLog:
    """See the module. All of it needs the lock of the accounts."""

    def __init__(self) -> None:
        self._entries: deque[Entry] = deque()
        self._readers: Living[Reader] = Living()
        #: The number of the next entry.
        self.end = 0
        #: Reads each entry in the call that writes it, while a trace runs.
        self.on_entry: Callable[[], None] | None = None
        #: What the stats have read.
        self.counted = self.reader()

    @property
    def begin(self) -> int:
        """The number of the oldest entry that is held: counted, as an interrupt may part an entry from its number."""
        return self.end - len(self._entries)

    def reader(self) -> Reader:
        """Returns a reader of what is written from here on; what it has not read is held for as long as it lives."""
        reader = Reader(self.end)
        self._readers.add(reader)
        return reader

    def write(self, entry: Entry) -> None:
        """Appends ``entry``."""
        self._entries.append(entry)
        self.end += 1
        if self.on_entry is not None:
            self.on_entry()
        if len(self._entries) > _MOST:
            self._entries.popleft()

    def read(self, reader: Reader, end: int | None = None) -> Iterator[Entry]:
        """Yields what ``reader`` has not read, up to ``end``; an entry is read once the next one is asked for."""
        reader.position = max(reader.position, self.begin)
        while reader.position < (self.end if end is None else end):
            yield self._entries[reader.position - self.begin]
            reader.position += 1

    def count_stalls(self) -> None:
        """Counts the waits that their device has passed, in the order in which they ended on the host, and lets go of
        what all readers have read."""
        for entry in self.read(self.counted):
            if isinstance(entry, Waited):
                if (seconds := entry.seconds()) is None:
                    break
                entry.counters.stall(seconds, fills_window=entry.fills_window)
        entries, unread = self._entries, min([reader.position for reader in self._readers])
        while entries and self.end - len(entries) < unread:
            entries.popleft()

    def uncounted(self) -> list[Waited]:
        """Returns the waits that are not counted yet."""
        return [entry for entry in self.read(Reader(self.counted.position)) if isinstance(entry, Waited)]
