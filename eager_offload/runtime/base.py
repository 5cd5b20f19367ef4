"""The contract between the library and a device: streams, events, copies, memory.

A *runtime* knows how to move bytes and how to order that against compute; it knows nothing of autograd, of what is
worth moving, or when. There are three: ``accelerator`` (``torch.accelerator``), ``host`` (the device is the CPU) and
``simulated`` (virtual streams on a virtual clock).

Every call that orders or touches memory goes through this class, so that any runtime can write a log in the form that
the happens-before checker reads (``checker.py``).
"""

from __future__ import annotations

import abc
import enum
import time
import weakref
from collections import deque
from collections.abc import Hashable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from typing import NamedTuple, Protocol, TypeAlias

import torch
from torch import Tensor

from eager_offload.errors import OffloadError
from eager_offload.tiers.base import Region, Slot

__all__ = ["ALIGNMENT", "Direction", "Event", "Layout", "Leg", "Log", "Naming", "Runtime", "Stream"]

#: Streams and events are opaque and named by identity; each runtime has its own types.
Stream: TypeAlias = Hashable
Event: TypeAlias = Hashable


class Direction(enum.Enum):
    """Which way bytes travel; each has a transfer stream of its own."""

    OUT = "out"
    IN = "in"


@dataclass(frozen=True, slots=True)
class Layout:
    """What a reload target must look like.

    Kernels choose their order of summation by alignment, so a reloaded tensor has to sit at the same address modulo 64
    as the one that was saved, or its gradients differ in the last bit.
    """

    nbytes: int
    #: The address of the first byte, modulo ``ALIGNMENT``.
    phase: int = 0


class Leg(NamedTuple):
    """When a copy, or a part of its way, ran: seconds on the clock of ``Runtime.host_clock``."""

    #: Which part, where there are several; else empty.
    name: str
    start: float
    stop: float


#: Bytes; what ``Layout.phase`` is counted in. The widest vector register that torch's CPU kernels use.
ALIGNMENT = 64


class Log(Protocol):
    """Where a runtime writes what it does, in the order in which the host issues it."""

    def access(self, stream: Stream, reads: Sequence[Region], writes: Sequence[Region], what: str) -> None:
        """An operation enqueued on ``stream``."""

    def allocate(self, stream: Stream, region: Region, what: str) -> None:
        """``region`` was handed out for use on ``stream``."""

    def free(self, stream: Stream, region: Region, what: str) -> None:
        """The host gave ``region`` back to the allocator of ``stream``: its next owner may write it at once."""

    def record(self, stream: Stream, event: Event) -> None:
        """``event`` stands for all that was enqueued on ``stream`` so far."""

    def wait(self, stream: Stream, event: Event) -> None:
        """Everything enqueued on ``stream`` from here on comes after ``event``."""

    def synchronize(self, event: Event) -> None:
        """The host knows that ``event`` is over: it waited, or a query said so."""


class Naming(Protocol):
    """Gives memory its name in the log."""

    def region(self, tensor: Tensor) -> Region:
        """The bytes from the first to the last element of ``tensor``."""

    def allocated(self, tensor: Tensor, stream: Stream, what: str) -> None:
        """Takes note of a new block that the runtime itself allocated."""


class Runtime(abc.ABC):
    """One kind of device.

    Subclasses implement the underscored methods; the public ones add the log. All methods may be called from any
    thread.
    """

    def __init__(self) -> None:
        self._log: Log | None = None
        self._naming: Naming | None = None
        self._left_behind: deque[tuple[Event, object]] = deque()
        self._users: weakref.WeakSet[object] = weakref.WeakSet()

    def attach(self, log: Log | None, naming: Naming | None) -> None:
        """Starts (or, with ``None``, ends) writing a log of every call below."""
        self._log, self._naming = log, naming

    # -- streams and events ---------------------------------------------------------------------------------------

    @abc.abstractmethod
    def current_stream(self, device: torch.device) -> Stream:
        """The stream that compute on ``device`` is enqueued on, for the calling thread, at this moment."""

    @abc.abstractmethod
    def transfer_stream(self, device: torch.device, direction: Direction) -> Stream:
        """The process's one transfer stream of ``device`` in ``direction``; created at the first call."""

    def record(self, stream: Stream) -> Event:
        """A new event that completes when all that is enqueued on ``stream`` so far has."""
        event = self._record(stream)
        if self._log is not None:
            self._log.record(stream, event)
        return event

    def wait(self, stream: Stream, event: Event) -> None:
        """Makes ``stream`` wait for ``event``; the host goes on, except where compute *is* the host (a CPU device).

        Raises:
            OffloadError: on a CPU device, what made the awaited transfer fail.
        """
        if self._log is not None:
            self._log.wait(stream, event)
        self._wait(stream, event)

    def query(self, event: Event) -> bool:
        """Whether ``event`` has completed, by success or by failure; never blocks."""
        done = self._query(event)
        if done and self._log is not None:
            self._log.synchronize(event)
        return done

    def synchronize(self, event: Event) -> None:
        """Makes the host wait for ``event``.

        Raises:
            OffloadError: what made the awaited transfer fail.
        """
        self._synchronize(event)
        if self._log is not None:
            self._log.synchronize(event)

    def clock(self, stream: Stream) -> float:
        """Seconds, from any beginning: when ``stream`` comes to what is enqueued next, as far as this runtime knows.

        Where it does not, this is the host's clock, which runs ahead of a device.
        """
        return time.perf_counter()

    def seconds(self, event: Event) -> float | None:
        """How long the copy took that ``event`` stands behind and that is over; ``None`` where nobody knows."""
        return None

    # -- for traces -----------------------------------------------------------------------------------------------

    def start_timing(self, device: torch.device) -> None:
        """From here on copies and marks on ``device`` can tell when they ran; pairs with ``stop_timing``."""
        return

    def stop_timing(self, device: torch.device) -> None:
        """Ends what the matching ``start_timing`` began."""
        return

    def host_clock(self) -> float:
        """Seconds, from any beginning: the host's clock."""
        return time.perf_counter()

    def mark(self, stream: Stream) -> object:
        """The moment when ``stream`` comes to what is enqueued next; ``time_of`` tells when that was."""
        return self.clock(stream)

    def time_of(self, mark: object) -> float:
        """Seconds of ``host_clock``; the host waits until ``mark`` is over."""
        assert isinstance(mark, float)
        return mark

    def legs(self, event: Event) -> tuple[Leg, ...]:
        """When the copy ran that ``event`` stands behind and that is over; empty where nobody knows."""
        return ()

    # -- in between -----------------------------------------------------------------------------------------------

    def leave_behind(self, event: Event, keepalive: object) -> None:
        """Holds ``keepalive`` until ``event`` has completed, for a transfer whose owner is gone.

        Takes no lock and waits for nothing: finalizers call it.
        """
        self._left_behind.append((event, keepalive))

    def tidy(self) -> None:
        """Lets go of what was left behind and has completed. Cheap; called at every pack and unpack."""
        while self._left_behind:
            try:
                event, keepalive = self._left_behind.popleft()
            except IndexError:  # another thread was faster: two objects share a runtime and no lock
                return
            if not self.query(event):
                self._left_behind.appendleft((event, keepalive))
                return

    def finish(self) -> None:
        """Waits for what was left behind and lets go of it."""
        for event, _ in list(self._left_behind):
            with suppress(OffloadError):  # its owner is gone, and nobody else is to hear of it
                self.synchronize(event)
        self.tidy()

    def trim(self) -> None:
        """A forward begins, in which nothing comes back: gives back to the system what only reloads need."""
        self.tidy()

    def enter(self, stream: Stream) -> AbstractContextManager[object]:
        """Makes ``stream`` the current one of the calling thread, for compute that belongs to it."""
        return nullcontext()

    def attach_user(self, user: object) -> None:
        """Counts ``user`` among those for whom threads and buffers are kept ready."""
        self._users.add(user)

    def detach_user(self, user: object) -> None:
        """``user`` has given its memory back. With the last one goes what was kept ready."""
        self._users.discard(user)
        if not self._users:
            self._retire()

    def _retire(self) -> None:
        self.tidy()

    # -- bytes ----------------------------------------------------------------------------------------------------

    def copy(self, dst: Tensor | Slot, src: Tensor | Slot, stream: Stream, after: Sequence[Event] = ()) -> Event:
        """Enqueues a copy of bytes on ``stream``: a tensor into a slot (offload) or a slot into a tensor (reload).

        Args:
            dst, src: one slot and one flat ``uint8`` tensor on the device, of equal size in bytes. The caller keeps
                both alive until the copy is over.
            after: what ``stream`` waits for first.

        Returns:
            A new event, recorded behind the copy; it carries what makes the copy fail.
        """
        log = self._log
        if log is not None:
            for event in after:
                log.wait(stream, event)
            if self._naming is not None:
                what = "offload" if isinstance(dst, Slot) else "reload"
                log.access(stream, [self._region(src)], [self._region(dst)], what)
        over = self._copy(dst, src, stream, after)
        if log is not None:
            log.record(stream, over)
        return over

    def allocate(self, layout: Layout, device: torch.device, stream: Stream) -> Tensor:
        """A flat ``uint8`` tensor of ``layout.nbytes`` on ``device``, owned by ``stream`` as allocators mean it.

        Its content is undefined. Its address is ``layout.phase`` modulo ``ALIGNMENT``.
        """
        target = self._allocate(layout, device, stream)
        if self._naming is not None:
            self._naming.allocated(target, stream, "reload target")
        return target

    @abc.abstractmethod
    def host_buffer(self, nbytes: int) -> Tensor:
        """A slab of host memory: a flat ``uint8`` CPU tensor, page-aligned, pinned where that helps this device.

        The memory returns to the system when the tensor's storage goes.
        """

    @abc.abstractmethod
    def bandwidth(self, device: torch.device, direction: Direction) -> float:
        """Bytes a second between ``device`` and host memory in ``direction``; measured once, then cached."""

    def duplex_bandwidth(self, device: torch.device, direction: Direction) -> float:
        """Bytes a second in ``direction`` while as much travels the other way; measured once, then cached.

        Where the two ways do not share a link, this is what ``bandwidth`` says.
        """
        return self.bandwidth(device, direction)

    def _region(self, end: Tensor | Slot) -> Region:
        if isinstance(end, Slot):
            return end.region
        assert self._naming is not None
        return self._naming.region(end)

    @abc.abstractmethod
    def _record(self, stream: Stream) -> Event: ...

    @abc.abstractmethod
    def _wait(self, stream: Stream, event: Event) -> None: ...

    @abc.abstractmethod
    def _query(self, event: Event) -> bool: ...

    @abc.abstractmethod
    def _synchronize(self, event: Event) -> None: ...

    @abc.abstractmethod
    def _copy(self, dst: Tensor | Slot, src: Tensor | Slot, stream: Stream, after: Sequence[Event]) -> Event: ...

    @abc.abstractmethod
    def _allocate(self, layout: Layout, device: torch.device, stream: Stream) -> Tensor: ...
