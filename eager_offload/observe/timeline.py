"""The timeline of a trace: work is noted as moments of a device, which become times when the trace ends."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple, TypeVar

import torch

from eager_offload.errors import OffloadError
from eager_offload.runtime.base import Event, Moment, Runtime, Stream
from eager_offload.runtime.host import host_runtime
from eager_offload.trace_file import Slice, SliceKind

#: The most slices, samples and saves of a trace; more are only counted, because no viewer could show them.
MOST = 1 << 20
#: Seconds; a shorter wait is not shown.
_NO_WAIT = 1e-6

_T = TypeVar("_T")


class Noted(NamedTuple):
    """A moment of a device, and the seconds since the trace began when the host enqueued it."""

    device: torch.device
    moment: Moment
    enqueued: float


class _Both(NamedTuple):
    """One moment of a device, and its time on the host's clock."""

    moment: Moment
    seconds: float


@dataclass(eq=False, slots=True)
class Saver:
    """The module and the operation that have saved a tensor."""

    module: str = ""
    #: Empty until backward has come to the operation.
    operation: str = ""


class Timeline:
    """The clocks of all devices of a trace, and the work that took time on them.

    [Note: two clocks] A device's moments lie on a clock of its own. Both clocks are read when all noted work is over,
    and each moment is placed by its distance from that reading. So nothing waits while the trace runs.

    Args:
        runtime_of: returns the runtime of a device.
    """

    def __init__(self, runtime_of: Callable[[torch.device], Runtime | None]) -> None:
        self._runtime_of = runtime_of
        self._runtimes: dict[torch.device, Runtime] = {}
        self._lock = threading.RLock()
        #: The host's runtime, whose clock may be a simulated one.
        self._host = runtime_of(torch.device("cpu")) or host_runtime()
        self._began = self._host.moment(None)
        #: Functions that return the slices of noted work, once it is over.
        self._entries: list[Callable[[], Iterator[Slice]]] = []
        #: The moments that these use.
        self._noted: list[Noted] = []
        #: For each device with a clock of its own, the reading of both clocks: see [Note: two clocks].
        self._ends: dict[torch.device, _Both] = {}
        #: The threads of each track of a device, in order: each thread gets a track of its own.
        self._threads: dict[tuple[str, str], list[int]] = {}
        #: The number of entries without room.
        self.dropped = 0
        #: Whether the recording has ended.
        self.is_over = False

    def runtime(self, device: torch.device) -> Runtime:
        """Returns the runtime that tells the time of ``device``: the host's, if nothing moves off the device."""
        with self._lock:
            if device not in self._runtimes:
                try:
                    runtime = self._runtime_of(device) or self._host
                except OffloadError:
                    runtime = self._host
                self._runtimes[device] = runtime
            return self._runtimes[device]

    def stop(self) -> None:
        """Ends the recording and drops its entries; may be called again."""
        self.is_over = True
        self._entries.clear()
        self._noted.clear()

    def now(self) -> float:
        """Returns the seconds since the trace began, by the host."""
        return self.seconds_at(self._host.moment(None))

    def seconds_at(self, moment: Moment) -> float:
        """Returns the seconds since the trace began at a ``moment`` of the host; negative before that."""
        seconds = self._host.seconds_between(self._began, moment)
        assert seconds is not None, "the host's moments have come"
        return seconds

    def moment(self, device: torch.device, stream: Stream | None = None) -> Noted:
        """Returns the moment when ``stream`` reaches this point; the default is the compute stream of ``device``."""
        runtime = self.runtime(device)
        stream = runtime.current_stream(device) if stream is None else stream
        return Noted(device, runtime.moment(stream), self.now())

    def keep(self, entries: list[_T], entry: _T) -> bool:
        """Appends ``entry``, or counts it if there is no room; returns whether there was. For any thread."""
        if self.is_over or len(entries) >= MOST:
            self.dropped += not self.is_over
            return False
        entries.append(entry)
        return True

    def worked(self, draft: Slice, began: Noted, ended: Noted, thread: int) -> None:
        """Notes work of a thread, or of its compute stream; ``draft`` is its slice without times."""

        def slices() -> Iterator[Slice]:
            start = self._seconds_of(began)
            seconds = max(0.0, self._seconds_of(ended) - start)
            threads = self._threads.setdefault((draft.device, draft.track), [])
            if thread not in threads:
                threads.append(thread)
            track = f"{draft.track} {threads.index(thread) + 1}" if thread != threads[0] else draft.track
            if draft.kind is not SliceKind.STALL or seconds >= _NO_WAIT:
                yield replace(draft, track=track, start=start, seconds=seconds)

        if self.keep(self._entries, slices):
            self._noted += began, ended

    def copied(self, draft: Slice, device: torch.device, event: Event, saver: Saver) -> None:
        """Notes a copy of bytes of ``saver`` to or from ``device``, which ``event`` has timed."""
        runtime = self.runtime(device)

        def slices() -> Iterator[Slice]:
            try:
                runtime.synchronize(event)
            except OffloadError:
                return  # the copy failed, and the bytes are in their old place
            for span in runtime.spans(event):
                start, stop = self._place(device, span.began), self._place(device, span.ended)
                if start is not None and stop is not None:
                    named = replace(draft, module=saver.module, operation=saver.operation)
                    name = f"{draft.name} {span.name}".rstrip()
                    yield replace(named, name=name, track=name, start=start, seconds=max(0.0, stop - start))

        self.keep(self._entries, slices)

    def slices(self) -> tuple[Slice, ...]:
        """Returns all slices by their beginning, outer ones first; the host waits until their work is over."""
        for one in self._noted:
            if not isinstance(one.moment, float):
                self.runtime(one.device).seconds_between(one.moment, one.moment, synchronize=True)
        for device, runtime in list(self._runtimes.items()):
            end = runtime.moment(runtime.current_stream(device))
            if not isinstance(end, float) and runtime.tells_time(device):
                runtime.seconds_between(end, end, synchronize=True)
                self._ends[device] = _Both(end, self.now())
        found = (one for entry in self._entries for one in entry())
        return tuple(sorted(found, key=lambda one: (one.start, -one.seconds)))

    def _seconds_of(self, noted: Noted) -> float:
        """Returns the time of ``noted``; if its device does not tell the time, the time when it was enqueued."""
        seconds = self._place(noted.device, noted.moment)
        return noted.enqueued if seconds is None else seconds

    def _place(self, device: torch.device, moment: Moment) -> float | None:
        """Returns the seconds from the beginning of the trace; ``None`` if ``device`` does not tell the time."""
        if isinstance(moment, float):
            return self.seconds_at(moment)
        end = self._ends.get(device)
        if end is None:
            return None
        before_end = self.runtime(device).seconds_between(moment, end.moment, synchronize=True)
        return None if before_end is None else end.seconds - before_end
