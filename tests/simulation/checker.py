"""Happens-before: which pairs of conflicting accesses does no event order?

Pure Python that knows no device, like ``torch.cuda._sanitizer``'s ``StreamSynchronizations``, whose vector clocks
these are. A runtime writes its log into a `Checker`; a schedule written by hand can do the same.

[Note: what orders what]
The agents are the streams and the host. Every agent has a clock: for each stream, the number of the last operation on
it that the agent comes after.

    an operation on stream s  comes after all before it on s, all that s waited for, all that the host knew when it
                              enqueued the operation
    record(s, e)              e stands for the clock of s
    wait(s, e)                s comes after what e stands for
    synchronize(e)            the host comes after what e stands for, and so does all that it enqueues from here on

Allocating and freeing write the whole block on the stream whose allocator owns it: the next owner of a freed block may
write it at once, and a new block's last owner may have kernels queued. Two accesses of the same byte conflict when at
least one writes and neither comes after the other.

[Note: what is forgotten]
An access can be dropped once whatever conflicts with it would also conflict with a later one that is kept: a read
behind which the same stream reads again, anything behind which an ordered write came. What the host knows to be over
is before every operation to come, so it is dropped as well, now and then. A byte keeps at most two accesses a stream.
"""

from __future__ import annotations

import enum
import threading
import weakref
from bisect import bisect_left, bisect_right
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

from eager_offload.runtime.base import Event, Stream
from tests.simulation.log import Allocated, ByteRegion, Entry, Freed, Log, Operation, Recorded, Synchronized, Waited

_Clock: TypeAlias = dict[Stream, int]

#: Cells in all spaces together before the first search for those that nothing can conflict with any more.
_COMPACT_AT = 4096


class OrderingError(AssertionError):
    """Accesses that no event orders, or a wait for an event that never was recorded."""


class AccessKind(enum.Enum):
    """What an entry of the log does to memory, or to the clock of its stream."""

    READ = "reads"
    WRITE = "writes"
    ALLOCATE = "hands out"
    FREE = "gives back"
    WAIT = "waits for"
    SYNCHRONIZE = "makes the host wait for"


@dataclass(frozen=True, slots=True)
class Access:
    """One entry of the log."""

    #: ``None`` for the host.
    stream: Stream | None
    kind: AccessKind
    what: str
    #: The bytes, or ``None`` for a wait.
    region: ByteRegion | None
    #: Its place in the log: the first entry is number 0.
    number: int

    def __str__(self) -> str:
        agent = "the host" if self.stream is None else f"stream {self.stream}"
        where = "" if self.region is None else f" {_show(self.region)}"
        return f"#{self.number} {self.what!r} on {agent} {self.kind.value}{where}"


@dataclass(frozen=True, slots=True)
class Violation:
    """Two accesses of the same bytes that nothing orders, or one entry that cannot be right by itself."""

    #: The one that the host issued first; ``None`` where a single entry is wrong.
    earlier: Access | None
    later: Access
    #: What is wrong and what would put it right.
    text: str

    def __str__(self) -> str:
        return self.text


class Checker(Log):
    """Finds what no event orders, while the log is written. Thread-safe; entries count in the order they arrive."""

    def __init__(self) -> None:
        #: Everything found so far, in the order of the later access.
        self.violations: list[Violation] = []
        self._lock = threading.RLock()
        #: How many entries were written so far; the next one has this number.
        self.entries = 0
        self._streams: dict[Stream, _Clock] = {}
        self._host: _Clock = {}
        #: What each event stands for. One that can be waited for no more is forgotten.
        self._events: weakref.WeakKeyDictionary[Event, _Clock] = weakref.WeakKeyDictionary()
        self._spaces: dict[Hashable, _CellMap] = {}
        self._compact_at = _COMPACT_AT

    def assert_clean(self) -> None:
        """Raises ``OrderingError`` with a readable report if anything was found."""
        if self.violations:
            raise OrderingError(_report(self.violations))

    def report(self, violation: Violation) -> None:
        """Adds what the simulated device found, such as a copy whose source is gone."""
        with self._lock:
            self.violations.append(violation)

    @property
    def cells(self) -> int:
        """How many ranges of bytes are followed at present."""
        return sum(len(space.cells) for space in self._spaces.values())

    @property
    def events(self) -> int:
        """How many events that were recorded are alive: something can still wait for them."""
        return len(self._events)

    # -- the log --------------------------------------------------------------------------------------------------

    def write(self, entry: Entry) -> None:
        with self._lock:
            number = self.entries
            self.entries += 1
            if isinstance(entry, Synchronized):
                waiter = Access(None, AccessKind.SYNCHRONIZE, "synchronize", None, number)
                _join(self._host, self._clock_at(entry.event, waiter))
                return
            stream = entry.stream
            clock = self._streams.setdefault(stream, {})
            _join(clock, self._host)  # what the host enqueues comes after all that it knows
            clock[stream] = number
            match entry:
                case Operation(_, reads, writes, what):
                    touched = [Access(stream, AccessKind.READ, what, region, number) for region in reads]
                    touched += [Access(stream, AccessKind.WRITE, what, region, number) for region in writes]
                    self._check(touched)
                case Allocated(_, region, what):
                    self._check([Access(stream, AccessKind.ALLOCATE, what, region, number)])
                case Freed(_, region, what):
                    self._check([Access(stream, AccessKind.FREE, what, region, number)])
                case Recorded(_, event):
                    self._events[event] = dict(clock)
                case Waited(_, event):
                    _join(clock, self._clock_at(event, Access(stream, AccessKind.WAIT, "wait", None, number)))

    # -- clocks ---------------------------------------------------------------------------------------------------

    def _clock_at(self, event: Event, waiter: Access) -> _Clock:
        known = self._events.get(event)
        if known is not None:
            return known
        text = (
            f"{waiter} {event}, which was never recorded: an accelerator takes such an event for complete and does not "
            "wait at all. Record it on the stream that does the work, before this."
        )
        self.violations.append(Violation(None, waiter, text))
        return {}

    # -- memory ---------------------------------------------------------------------------------------------------

    def _check(self, touched: Sequence[Access]) -> None:
        """Compares one operation's accesses with what came before, then takes note of them."""
        found: dict[Access, Violation] = {}
        for access in touched:
            region = access.region
            assert region is not None
            if region.start >= region.stop:
                continue
            space = self._spaces.setdefault(region.space, _CellMap())
            for clash in space.touch(access, self._streams[access.stream]):
                if clash.earlier not in found:
                    found[clash.earlier] = self._race(clash, access)
        self.violations += found.values()
        if self.entries >= self._compact_at:
            self._compact()

    def _race(self, clash: _Clash, later: Access) -> Violation:
        earlier = clash.earlier
        assert later.region is not None
        shared = ByteRegion(later.region.space, clash.start, clash.stop)
        known = self._streams[later.stream].get(earlier.stream)
        seen = (
            f"stream {later.stream} has waited for nothing on stream {earlier.stream}"
            if known is None
            else f"stream {later.stream} comes after stream {earlier.stream} up to #{known} only"
        )
        record = f"an event recorded on stream {earlier.stream} after #{earlier.number}"
        if later.kind is AccessKind.FREE:
            cure = (
                f"The last reference to these bytes may go only once stream {later.stream} has waited for, or the host "
                f"has seen complete, {record}."
            )
        elif earlier.kind in (AccessKind.ALLOCATE, AccessKind.FREE):
            cure = (
                "An earlier owner of the block may still have work queued: before "
                f"#{later.number}, stream {later.stream} has to wait for {record}."
            )
        else:
            cure = f"Before #{later.number}, stream {later.stream} has to wait for {record}."
        text = (
            f"nothing orders {later}\n"
            f"         after {earlier};\n"
            f"    both touch {_show(shared)}, and {seen}.\n"
            f"    {cure}"
        )
        return Violation(earlier, later, text)

    def _compact(self) -> None:
        """Forgets what the host knows to be over."""
        for space in list(self._spaces):
            if self._spaces[space].compact(self._host):
                del self._spaces[space]
        self._compact_at = self.entries + max(_COMPACT_AT, 2 * self.cells)


def _join(clock: _Clock, known: _Clock) -> None:
    for stream, number in known.items():
        if clock.get(stream, -1) < number:
            clock[stream] = number


@dataclass(slots=True)
class _Cell:
    """A range of bytes that were always touched together, and what touched them last on each stream."""

    start: int
    stop: int
    reads: dict[Stream, Access] = field(default_factory=dict)
    writes: dict[Stream, Access] = field(default_factory=dict)

    def part(self, start: int, stop: int) -> _Cell:
        """The same past for ``[start, stop)`` alone."""
        if (start, stop) == (self.start, self.stop):
            return self
        return _Cell(start, stop, dict(self.reads), dict(self.writes))

    def forget(self, known: _Clock) -> None:
        for accesses in (self.reads, self.writes):
            for stream in [s for s, access in accesses.items() if access.number <= known.get(s, -1)]:
                del accesses[stream]


class _Clash(NamedTuple):
    """An earlier access that is not ordered before the present one, and the first bytes in question."""

    earlier: Access
    start: int
    stop: int


class _CellMap:
    """An interval map: cells that do not overlap, in order; a gap was never touched."""

    __slots__ = ("cells",)

    def __init__(self) -> None:
        self.cells: list[_Cell] = []

    def touch(self, access: Access, clock: _Clock) -> list[_Clash]:
        """Takes note of ``access`` and returns what conflicts with it."""
        region = access.region
        assert region is not None
        assert access.stream is not None
        low = bisect_right(self.cells, region.start, key=lambda cell: cell.stop)
        high = bisect_left(self.cells, region.stop, key=lambda cell: cell.start)
        inside, tiles = _cut(self.cells[low:high], region.start, region.stop)
        clashes: list[_Clash] = []
        for cell in inside:
            reads = cell.reads if access.kind is not AccessKind.READ else {}
            earlier = [*cell.writes.values(), *reads.values()]
            clashes += [
                _Clash(other, cell.start, cell.stop) for other in earlier if other.number > clock.get(other.stream, -1)
            ]
            if access.kind is AccessKind.READ:
                cell.reads[access.stream] = access
            else:
                cell.forget(clock)
                cell.writes[access.stream] = access
        self.cells[low:high] = _merge(tiles)
        return clashes

    def compact(self, host: _Clock) -> bool:
        """Forgets what the host knows to be over; says whether nothing is left."""
        for cell in self.cells:
            cell.forget(host)
        self.cells = _merge([cell for cell in self.cells if cell.reads or cell.writes])
        return not self.cells


def _cut(cells: Sequence[_Cell], start: int, stop: int) -> tuple[list[_Cell], list[_Cell]]:
    """Cuts ``cells``, all of which overlap ``[start, stop)``, along its ends, and has new ones fill its gaps; returns
    those inside of it, and all of them. Both are in order."""
    inside: list[_Cell] = []
    outside: list[_Cell] = []
    at = start
    for cell in cells:
        if cell.start < start:
            outside.append(cell.part(cell.start, start))
        if at < cell.start:
            inside.append(_Cell(at, cell.start))
        at = min(cell.stop, stop)
        inside.append(cell.part(max(cell.start, start), at))
        if stop < cell.stop:
            outside.append(cell.part(stop, cell.stop))
    if at < stop:
        inside.append(_Cell(at, stop))
    return inside, sorted([*outside, *inside], key=lambda cell: cell.start)


def _merge(cells: Sequence[_Cell]) -> list[_Cell]:
    """Coalesces neighbours that have the same past."""
    merged: list[_Cell] = []
    for cell in cells:
        last = merged[-1] if merged else None
        if last is not None and last.stop == cell.start and last.reads == cell.reads and last.writes == cell.writes:
            last.stop = cell.stop
        else:
            merged.append(cell)
    return merged


def _show(region: ByteRegion) -> str:
    return f"{region.space}[{region.start}:{region.stop}]"


def _report(violations: Sequence[Violation], shown: int = 10) -> str:
    lines = [f"{len(violations)} accesses are out of order (entries of the log are numbered #0, #1, ...):"]
    lines += [f"{n}. {violation}" for n, violation in enumerate(violations[:shown], start=1)]
    if len(violations) > shown:
        lines.append(f"... and {len(violations) - shown} more")
    return "\n".join(lines)
