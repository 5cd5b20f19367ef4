"""What took time: written down as marks of a runtime (on an accelerator: events), which become times when a trace ends.

Nothing here makes the host wait before ``TimeLog.slices`` is called.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Iterator
from typing import Generic, NamedTuple, TypeVar

import torch

from eager_offload.errors import OffloadError
from eager_offload.runtime.base import Event, Runtime, Stream
from eager_offload.runtime.host import host_runtime
from eager_offload.trace_file import Slice, SliceKind

#: Slices, samples and saves each, beyond which a trace only counts: a viewer could not show them, and memory is finite.
MOST = 1 << 20
#: Seconds; a wait that is shorter has not waited.
_NO_WAIT = 1e-6

_T = TypeVar("_T")


class Bounded(Generic[_T]):
    """The first entries of a trace, and how many more there were. Any thread may add some."""

    def __init__(self) -> None:
        self.entries: list[_T] = []
        self.dropped = 0

    def add(self, entry: _T) -> bool:
        """Whether there was room."""
        if len(self.entries) < MOST:
            self.entries.append(entry)
            return True
        self.dropped += 1
        return False


class Clock(NamedTuple):
    """The time of one device."""

    runtime: Runtime
    device: torch.device
    #: When the trace began; seconds.
    base: float

    def at(self, stream: Stream | None) -> object:
        """The moment when ``stream`` comes to this point; ``None`` for the host."""
        return self.runtime.host_clock() if stream is None else self.runtime.mark(stream)

    def now(self) -> object:
        """The moment when the stream comes to this point that the calling thread computes on."""
        return self.at(self.runtime.current_stream(self.device))

    def seconds(self, moment: object) -> float:
        """Since the trace began; the host waits until ``moment`` has come."""
        return (moment if isinstance(moment, float) else self.runtime.time_of(moment)) - self.base


class Clocks:
    """The clocks of all devices that a trace comes across; ``runtime_of`` says what serves a device."""

    def __init__(self, runtime_of: Callable[[torch.device], Runtime | None]) -> None:
        self._runtime_of = runtime_of
        self._clocks: dict[torch.device, Clock] = {}
        self._lock = threading.RLock()
        host = runtime_of(torch.device("cpu")) or host_runtime()
        #: The host's own, which may be a simulated one.
        self.host = Clock(host, torch.device("cpu"), host.host_clock())
        self._base = host_runtime().host_clock()

    def of(self, device: torch.device) -> Clock:
        clock = self._clocks.get(device)
        if clock is None:
            with self._lock:
                clock = self._clocks.get(device) or self._clocks.setdefault(device, self._start(device))
        return clock

    def stop(self) -> None:
        """May be called again."""
        for device in list(self._clocks):
            self._clocks.pop(device).runtime.stop_timing(device)

    def _start(self, device: torch.device) -> Clock:
        try:
            runtime = self._runtime_of(device)
        except OffloadError:
            runtime = None
        if runtime is None:  # a device that nothing is moved from: what the host sees of it
            return Clock(host_runtime(), device, self._base)
        runtime.start_timing(device)
        return Clock(runtime, device, self.host.base if runtime is self.host.runtime else self._base)


class Work(NamedTuple):
    """Something that a thread or a stream did between two moments of a clock."""

    kind: SliceKind
    name: str
    clock: Clock
    began: object
    ended: object
    track: str
    module: str = ""
    operation: str = ""
    thread: Hashable = None


class Saver(NamedTuple):
    """What saved a tensor: a module, and an operation where backward has come to it."""

    module: str = ""
    operation: str = ""


class Copy(NamedTuple):
    """Bytes that travelled."""

    kind: SliceKind
    clock: Clock
    event: Event
    nbytes: int
    tier: str
    #: The saved storage; ``None`` for one of a graph.
    key: int | None
    module: str


class TimeLog(Bounded[Work | Copy]):
    """Everything that took time."""

    def slices(self, savers: Callable[[int | None], Saver | None]) -> tuple[Slice, ...]:
        """In the order of their beginning, outer ones first; the host waits for all of them.

        Args:
            savers: what saved the storage of that key.
        """
        #: A second thread on a track gets one of its own.
        tracks: dict[tuple[str, str], dict[Hashable, str]] = {}
        found: list[Slice] = []
        for entry in self.entries:
            if isinstance(entry, Copy):
                found += _slices_of_copy(entry, savers(entry.key) or Saver(entry.module))
                continue
            device, start = str(entry.clock.device), entry.clock.seconds(entry.began)
            seconds = max(0.0, entry.clock.seconds(entry.ended) - start)
            if entry.kind is SliceKind.STALL and seconds < _NO_WAIT:
                continue
            names = tracks.setdefault((device, entry.track), {})
            track = names.setdefault(entry.thread, entry.track if not names else f"{entry.track} {len(names) + 1}")
            found.append(Slice(entry.kind, entry.name, device, track, start, seconds, 0, entry.module, entry.operation))
        self.entries = []
        return tuple(sorted(found, key=lambda one: (one.start, -one.seconds)))


def _slices_of_copy(copy: Copy, saver: Saver) -> Iterator[Slice]:
    error, runtime, device = "", copy.clock.runtime, str(copy.clock.device)
    try:
        runtime.synchronize(copy.event)
    except OffloadError as failure:
        error = str(failure)
    for hop in runtime.hops(copy.event):
        name = f"{copy.kind.value} {hop.name}".rstrip()
        start, seconds = hop.start - copy.clock.base, max(0.0, hop.stop - hop.start)
        yield Slice(copy.kind, name, device, name, start, seconds, copy.nbytes, *saver, tier=copy.tier, error=error)
