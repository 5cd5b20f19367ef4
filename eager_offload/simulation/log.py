"""What a runtime is asked to do, as entries of a log: the form that the happens-before checker reads."""

# mypy: disable-error-code="safe-super"
# What is abstract in `Runtime` has a body in the class behind.

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import torch
from torch import Tensor

from eager_offload.runtime.base import Event, Layout, Runtime, Stream
from eager_offload.tiers.base import Region, Slot


@dataclass(frozen=True, slots=True)
class Operation:
    """An operation enqueued on ``stream``, and the bytes that it reads and writes."""

    stream: Stream
    reads: tuple[Region, ...]
    writes: tuple[Region, ...]
    what: str


@dataclass(frozen=True, slots=True)
class Allocated:
    """``region`` was handed out for use on ``stream``."""

    stream: Stream
    region: Region
    what: str


@dataclass(frozen=True, slots=True)
class Freed:
    """The host gave ``region`` back to the allocator of ``stream``: its next owner may write it at once."""

    stream: Stream
    region: Region
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


class Naming(Protocol):
    """Gives memory its name in the log."""

    def region(self, tensor: Tensor) -> Region:
        """The bytes from the first to the last element of ``tensor``."""

    def allocated(self, tensor: Tensor, stream: Stream, what: str) -> None:
        """Takes note of a new block that the runtime itself allocated."""


class LoggedRuntime(Runtime):
    """Stands in front of a runtime: ``class Logged(LoggedRuntime, AcceleratorRuntime)`` logs the calls of that one."""

    _log: Log | None = None
    _naming: Naming | None = None

    def attach(self, log: Log | None, naming: Naming | None) -> None:
        """Starts (or, with ``None``, ends) writing a log of every call below."""
        self._log, self._naming = log, naming

    def record(self, stream: Stream) -> Event:
        event = super().record(stream)
        if self._log is not None:
            self._log.write(Recorded(stream, event))
        return event

    def wait(self, stream: Stream, event: Event) -> None:
        if self._log is not None:
            self._log.write(Waited(stream, event))
        super().wait(stream, event)

    def query(self, event: Event) -> bool:
        done = super().query(event)
        if done and self._log is not None:
            self._log.write(Synchronized(event))
        return done

    def synchronize(self, event: Event) -> None:
        super().synchronize(event)
        if self._log is not None:
            self._log.write(Synchronized(event))

    def copy(self, dst: Tensor | Slot, src: Tensor | Slot, stream: Stream, after: Sequence[Event] = ()) -> Event:
        log = self._log
        if log is not None:
            for event in after:
                log.write(Waited(stream, event))
            what = "offload" if isinstance(dst, Slot) else "reload"
            log.write(Operation(stream, (self._region(src),), (self._region(dst),), what))
        over = super().copy(dst, src, stream, after)
        if log is not None:
            log.write(Recorded(stream, over))
        return over

    def allocate(self, layout: Layout, device: torch.device, stream: Stream) -> Tensor:
        target = super().allocate(layout, device, stream)
        if self._naming is not None:
            self._naming.allocated(target, stream, "reload target")
        return target

    def _region(self, end: Tensor | Slot) -> Region:
        if isinstance(end, Slot):
            return end.region
        assert self._naming is not None
        return self._naming.region(end)
