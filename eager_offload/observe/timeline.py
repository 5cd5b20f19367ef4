"""What took time while a trace ran: noted as moments of a device, which become times when the trace ends."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TypeAlias, TypeVar

import torch

from eager_offload.errors import OffloadError
from eager_offload.runtime.base import Event, Runtime, Stream
from eager_offload.runtime.host import host_runtime
from eager_offload.trace_file import Slice, SliceKind

#: Slices, samples and saves each, beyond which a trace only counts: a viewer could not show them, and memory is finite.
MOST = 1 << 20
#: Seconds; a wait that is shorter has not waited.
_NO_WAIT = 1e-6

#: Tells the seconds since the trace began; the host waits until the moment has come.
Moment: TypeAlias = Callable[[], float]
_T = TypeVar("_T")


@dataclass(eq=False, slots=True)
class Saver:
    """What has saved something."""

    module: str = ""
    #: Empty until backward has come to it.
    operation: str = ""


class Timeline:
    """The time of all devices that a trace comes across, and everything that took some.

    Args:
        runtime_of: what serves a device.
    """

    def __init__(self, runtime_of: Callable[[torch.device], Runtime | None]) -> None:
        self._runtime_of = runtime_of
        self._runtimes: dict[torch.device, Runtime] = {}
        self._lock = threading.RLock()
        #: Its clock may be a simulated one.
        self._host = runtime_of(torch.device("cpu")) or host_runtime()
        self._began = self._host.host_clock()
        #: Give the slices of what took time, once it is over.
        self._entries: list[Callable[[], Iterator[Slice]]] = []
        #: The threads that were on a track of a device, in order: each has a track of its own.
        self._threads: dict[tuple[str, str], list[int]] = {}
        #: What there was no room for.
        self.dropped = 0
        #: Whether nothing is written down any more.
        self.is_over = False

    def runtime(self, device: torch.device) -> Runtime:
        """Returns what tells the time of ``device``: of one that nothing is moved from, the host."""
        with self._lock:
            if device not in self._runtimes:
                try:
                    runtime = self._runtime_of(device) or self._host
                except OffloadError:
                    runtime = self._host
                runtime.start_timing(device)
                self._runtimes[device] = runtime
            return self._runtimes[device]

    def stop(self) -> None:
        """Writes nothing down any more, and forgets what was; may be called again."""
        self.is_over = True
        self._entries.clear()
        for device in list(self._runtimes):
            self._runtimes.pop(device).stop_timing(device)

    def now(self) -> float:
        """Returns the seconds since the trace began, by the host."""
        return self._host.host_clock() - self._began

    def moment(self, device: torch.device, stream: Stream | None = None) -> Moment:
        """Returns the moment when ``stream`` comes to this point; by default the one that ``device`` computes on."""
        runtime = self.runtime(device)
        mark = runtime.mark(runtime.current_stream(device) if stream is None else stream)
        return lambda: runtime.time_of(mark) - self._began

    def keep(self, entries: list[_T], entry: _T) -> bool:
        """Writes ``entry`` down, or counts it where there is no room; returns whether there was. For any thread."""
        if self.is_over or len(entries) >= MOST:
            self.dropped += not self.is_over
            return False
        entries.append(entry)
        return True

    def worked(self, draft: Slice, began: Moment, ended: Moment, thread: int) -> None:
        """A thread, or the stream that it computes on, did what ``draft`` says, which has no times yet."""

        def slices() -> Iterator[Slice]:
            start = began()
            seconds = max(0.0, ended() - start)
            threads = self._threads.setdefault((draft.device, draft.track), [])
            if thread not in threads:
                threads.append(thread)
            track = f"{draft.track} {threads.index(thread) + 1}" if thread != threads[0] else draft.track
            if draft.kind is not SliceKind.STALL or seconds >= _NO_WAIT:
                yield replace(draft, track=track, start=start, seconds=seconds)

        self.keep(self._entries, slices)

    def copied(self, draft: Slice, runtime: Runtime, event: Event, saver: Saver) -> None:
        """Bytes of ``saver`` travelled, as ``event`` tells."""

        def slices() -> Iterator[Slice]:
            try:
                runtime.synchronize(event)
            except OffloadError:
                return  # the bytes are where they were
            for hop in runtime.hops(event):
                named = replace(draft, module=saver.module, operation=saver.operation)
                name, seconds = f"{draft.name} {hop.name}".rstrip(), max(0.0, hop.stop - hop.start)
                yield replace(named, name=name, track=name, start=hop.start - self._began, seconds=seconds)

        self.keep(self._entries, slices)

    def slices(self) -> tuple[Slice, ...]:
        """Returns all, in the order of their beginning, outer ones first; the host waits until they are over."""
        found = (one for entry in self._entries for one in entry())
        return tuple(sorted(found, key=lambda one: (one.start, -one.seconds)))
