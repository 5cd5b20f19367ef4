"""Slices before they can be told: moments are marks of a runtime (on an accelerator: events) until the trace ends.

Nothing here makes the host wait before ``slices`` is called.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Iterator
from typing import NamedTuple

import torch

from eager_offload.errors import OffloadError
from eager_offload.observe.ledger import MOST, Save
from eager_offload.observe.trace import Kind, Slice
from eager_offload.runtime.base import Event, Runtime, Stream
from eager_offload.runtime.host import HostRuntime, host_runtime

__all__ = ["Clock", "Clocks", "Mark", "Moments"]

#: Seconds; a wait that is shorter has not waited.
_NO_WAIT = 1e-6


class Clock(NamedTuple):
    """The time of one device."""

    runtime: Runtime
    device: torch.device
    #: When the trace began; seconds.
    base: float

    def now(self) -> Mark:
        """This moment of the host."""
        return Mark(self, self.runtime.host_clock())

    def at(self, stream: Stream) -> Mark:
        """This moment of ``stream``."""
        return Mark(self, self.runtime.mark(stream))

    @property
    def computes_on_host(self) -> bool:
        """Whether compute is the host, so that both have one time."""
        return isinstance(self.runtime, HostRuntime)

    @property
    def current_stream(self) -> Stream:
        return self.runtime.current_stream(self.device)


class Mark(NamedTuple):
    """A moment on a device."""

    clock: Clock
    #: Seconds, or what the runtime makes seconds of.
    moment: object

    def seconds(self) -> float:
        """Since the trace began; the host waits until the moment has come."""
        moment = self.moment if isinstance(self.moment, float) else self.clock.runtime.time_of(self.moment)
        return moment - self.clock.base


class Clocks:
    """The clocks of all devices that a trace comes across.

    Args:
        runtime_of: what serves a device, or ``None``.
    """

    def __init__(self, runtime_of: Callable[[torch.device], Runtime | None]) -> None:
        self._runtime_of = runtime_of
        self._clocks: dict[torch.device, Clock] = {}
        self._lock = threading.Lock()
        host = runtime_of(torch.device("cpu")) or host_runtime()
        #: The host's own, which may be a simulated one.
        self.host = Clock(host, torch.device("cpu"), host.host_clock())
        self._base = host_runtime().host_clock()

    def of(self, device: torch.device) -> Clock:
        clock = self._clocks.get(device)
        if clock is None:
            with self._lock:
                clock = self._clocks.get(device)
                if clock is None:
                    clock = self._clocks[device] = self._start(device)
        return clock

    def stop(self) -> None:
        """May be called again."""
        for device in list(self._clocks):
            clock = self._clocks.pop(device)
            clock.runtime.stop_timing(device)

    def _start(self, device: torch.device) -> Clock:
        try:
            runtime = self._runtime_of(device)
        except OffloadError:
            runtime = None
        if runtime is None:  # a device that nothing is moved from: what the host sees of it
            return Clock(host_runtime(), device, self._base)
        runtime.start_timing(device)
        return Clock(runtime, device, self.host.base if runtime is self.host.runtime else self._base)


class _Work(NamedTuple):
    kind: Kind
    name: str
    track: str
    #: Which of several threads or streams.
    lane: Hashable
    began: Mark
    ended: Mark
    module: str
    operation: str


class _Copy(NamedTuple):
    kind: Kind
    clock: Clock
    event: Event
    nbytes: int
    tier: str
    module: str
    key: int | None


class _Tracks:
    """Names the tracks: a second thread or stream on a track gets one of its own."""

    def __init__(self) -> None:
        self._lanes: dict[tuple[str, str], dict[Hashable, str]] = {}

    def name(self, device: str, track: str, lane: Hashable) -> str:
        names = self._lanes.setdefault((device, track), {})
        return names.setdefault(lane, track if not names else f"{track} {len(names) + 1}")


class Moments:
    """Everything that took time. Appending is all that happens while the trace runs, and any thread may do it."""

    def __init__(self) -> None:
        self.dropped = 0
        self._works: list[_Work] = []
        self._copies: list[_Copy] = []

    def add_work(
        self,
        kind: Kind,
        name: str,
        began: Mark,
        ended: Mark,
        *,
        track: str,
        lane: Hashable = None,
        module: str = "",
        operation: str = "",
    ) -> None:
        if len(self._works) < MOST:
            self._works.append(_Work(kind, name, track, lane, began, ended, module, operation))
        else:
            self.dropped += 1

    def add_copy(
        self, kind: Kind, clock: Clock, event: Event, *, nbytes: int, tier: str, module: str, key: int | None
    ) -> None:
        if len(self._copies) < MOST:
            self._copies.append(_Copy(kind, clock, event, nbytes, tier, module, key))
        else:
            self.dropped += 1

    def slices(self, of_key: Callable[[int | None], Save | None]) -> tuple[Slice, ...]:
        """In the order of their beginning, outer ones first; the host waits for all of them.

        Args:
            of_key: who saved the storage that a copy moves.
        """
        tracks = _Tracks()
        found = [*self._of_works(tracks), *self._of_copies(of_key)]
        self._works, self._copies = [], []
        return tuple(sorted(found, key=lambda one: (one.start, -one.seconds)))

    def _of_works(self, tracks: _Tracks) -> Iterator[Slice]:
        for work in self._works:
            start = work.began.seconds()
            seconds = max(0.0, work.ended.seconds() - start)
            if work.kind is Kind.STALL and seconds < _NO_WAIT:
                continue
            device = str(work.began.clock.device)
            yield Slice(
                kind=work.kind,
                name=work.name,
                device=device,
                start=start,
                seconds=seconds,
                track=tracks.name(device, work.track, work.lane),
                module=work.module,
                operation=work.operation,
            )

    def _of_copies(self, of_key: Callable[[int | None], Save | None]) -> Iterator[Slice]:
        for copy in self._copies:
            error, save = "", of_key(copy.key)
            try:
                copy.clock.runtime.synchronize(copy.event)
            except OffloadError as failure:
                error = str(failure)
            for leg in copy.clock.runtime.legs(copy.event):
                yield Slice(
                    kind=copy.kind,
                    name=f"{copy.kind.value} {leg.name}".rstrip(),
                    device=str(copy.clock.device),
                    track=f"{copy.kind.value} {leg.name}".rstrip(),
                    start=leg.start - copy.clock.base,
                    seconds=max(0.0, leg.stop - leg.start),
                    nbytes=copy.nbytes,
                    module=copy.module if save is None else save.module,
                    operation="" if save is None else save.operation,
                    tier=copy.tier,
                    error=error,
                )
