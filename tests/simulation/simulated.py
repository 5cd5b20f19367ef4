"""A simulated device with real bytes and a log: to prove orderings on.

CPU tensors stand for device memory. Compute runs the moment it is called; copies are only enqueued, and carried out as
late as the ordering allows: when the host has synchronized or a query has said yes, or when compute waits. So a copy
that nothing waits for reads what compute has written over its source since, and an unpack that does not wait reads
what was in the target before: a missing edge shows as wrong bytes, besides the happens-before checker's verdict.

Each operator takes as long as its bytes do at ``compute_rate``; ``clocked.py`` has the clock.

What is simpler than on a device: autograd does not switch streams in backward, so that a node runs on the stream that
is current where ``backward`` was called, and operators that read a value to the host do not synchronize.
"""

from __future__ import annotations

import ctypes
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from eager_offload.errors import OffloadError
from eager_offload.runtime.base import Direction, Event, Layout, Moment, Span, Stream
from eager_offload.tiers.base import Slot
from eager_offload.torch_private.calls import TorchDispatchMode, without_dispatch_modes
from eager_offload.torch_private.memory import weak_storage
from tests.simulation.checker import Access, AccessKind, Checker, Violation
from tests.simulation.clocked import ClockedEvent, ClockedRuntime, ClockedStream
from tests.simulation.log import Log, Operation, Recorded, Synchronized, Waited, WrittenLog, region_of
from tests.simulation.observer import OperatorObserver
from tests.simulation.timeline import StreamSpan, Timeline

#: What bytes are filled with that may not be used. It reads as NaN in every floating-point format.
POISON = 0xFF


@dataclass(eq=False, slots=True)
class SimulatedStream(ClockedStream):
    """A stream whose copies are put off; compute streams do everything at once."""

    #: Steps that were enqueued, and how many of those were carried out; the rest is in the queue.
    enqueued: int = 0
    done: int = 0
    queue: deque[Move | SimulatedEvent] = field(default_factory=deque)
    #: Copies that no event stands for yet.
    fresh: list[Move] = field(default_factory=list)

    __repr__ = ClockedStream.__repr__

    def push(self, step: Move | SimulatedEvent) -> None:
        self.queue.append(step)
        self.enqueued += 1


class SimulatedEvent(ClockedEvent):
    """A point on a stream, which knows of the copies before it."""

    __slots__ = ("moves", "position")
    stream: SimulatedStream

    def __init__(self, stream: SimulatedStream, time: float) -> None:
        super().__init__(stream, time)
        #: How many steps of the stream come before it.
        self.position = stream.enqueued
        #: The copies whose failure it carries: those after the event before it.
        self.moves = tuple(stream.fresh)
        stream.fresh.clear()

    def raise_failure(self) -> None:
        for move in self.moves:
            if move.error is not None:
                raise move.error


class Move:
    """A copy between a slot and device memory, carried out when a stream or the host is to know that it is over.

    [Note: what a pending copy holds]
    Nothing on the device: a copy engine knows addresses, so if the last reference goes too early the block goes too,
    and that has to show. Of a slot in memory only the bytes, so that the range returns to its tier and its next owner
    is written as early as on a device. A slot elsewhere is held itself, since only it knows how to read and write.
    """

    __slots__ = ("_host", "_nbytes", "_offset", "_storage", "direction", "entry", "error")

    def __init__(self, slot: Slot, tensor: Tensor, direction: Direction, entry: Access) -> None:
        assert tensor.dtype is torch.uint8, "copies move flat bytes"
        assert tensor.dim() == 1, "copies move flat bytes"
        assert tensor.is_contiguous(), "copies move flat bytes"
        assert tensor.numel() == slot.nbytes, f"{tensor.numel()} bytes for a slot of {slot.nbytes}"
        with without_dispatch_modes():
            in_memory = getattr(slot, "tensor", None)
        self._host: Slot | Tensor | None = in_memory if isinstance(in_memory, Tensor) else slot
        self._storage = weak_storage(tensor.untyped_storage())
        self._offset = tensor.storage_offset()
        self._nbytes = slot.nbytes
        self.direction = direction
        #: What is said of it should it run too late.
        self.entry = entry
        #: What the tier raised.
        self.error: OffloadError | None = None

    def carry_out(self) -> bool:
        """Moves the bytes, once; says whether the end on the device was still there."""
        host, self._host = self._host, None
        assert host is not None, "a copy is carried out once"
        storage = self._storage()
        alive = storage is not None and storage.nbytes() >= self._offset + self._nbytes
        with without_dispatch_modes(), torch.inference_mode(False), torch.no_grad():
            if storage is not None and alive:
                device = torch.empty(0, dtype=torch.uint8).set_(storage, self._offset, (self._nbytes,), (1,))
            else:
                device = torch.full((self._nbytes,), POISON, dtype=torch.uint8)
            outward = self.direction is Direction.OUT
            if isinstance(host, Tensor):
                to, by = (host, device) if outward else (device, host)
                ctypes.memmove(to.data_ptr(), by.data_ptr(), self._nbytes)
                return alive
            try:
                (host.write if outward else host.read)(device)
            except OffloadError as error:
                self.error = error
        return alive


class _Selected(threading.local):
    def __init__(self) -> None:
        #: The streams that a thread has entered.
        self.stack: list[SimulatedStream] = []


class SimulatedRuntime(ClockedRuntime):
    """A device with streams of its own and a clock that only work moves, whose calls can be checked.

    The defaults make a device that is much slower than its host, and links that are slower than compute: the host runs
    ahead, few queries say yes, and copies stay pending for as long as they can. The strictest proof of an ordering is
    ``launch_seconds=0``: the host's clock then moves only when it synchronizes, no query hides a missing wait, and a
    loop that polls never ends.
    """

    default_stream: SimulatedStream
    _transfers: dict[Direction, SimulatedStream]  # type: ignore[assignment]  # as `_new_stream` makes them

    def __init__(
        self,
        *,
        compute_rate: float = 1e9,
        out_bandwidth: float = 2.5e8,
        in_bandwidth: float = 2.5e8,
        launch_seconds: float = 1e-6,
        at_once: bool = False,
        host_waits: bool = False,
    ) -> None:
        """
        Args:
            compute_rate: bytes a second that operators read and write.
            out_bandwidth, in_bandwidth: bytes a second from the device, and to it.
            launch_seconds: what each call costs the host.
            at_once: carry copies out when they are enqueued, not as late as possible.
            host_waits: the host waits for each operator, as where it computes itself.
        """
        super().__init__(
            out_bandwidth=out_bandwidth,
            in_bandwidth=in_bandwidth,
            launch_seconds=launch_seconds,
            host_waits=host_waits,
        )
        self.compute_rate = compute_rate
        #: It grows with every operation; put a new one here to forget.
        self.timeline = Timeline()
        #: Copies that were carried out although one of their ends was gone.
        self.faults: list[Violation] = []
        self._at_once = at_once
        self._lock = threading.RLock()
        self._selected = _Selected()
        self._log: Log | None = None
        self._naming: OperatorObserver | None = None
        self._checker: Checker | None = None
        #: Of the last ``checked()``.
        self.observer: OperatorObserver | None = None

    # -- what tests and planners use ----------------------------------------------------------------------------------

    @contextmanager
    def stream(self, stream: SimulatedStream) -> Iterator[SimulatedStream]:
        """Makes ``stream`` the calling thread's current one."""
        self._selected.stack.append(stream)
        try:
            yield stream
        finally:
            self._selected.stack.pop()

    def enter(self, stream: Stream) -> AbstractContextManager[object]:
        assert isinstance(stream, SimulatedStream)
        return self.stream(stream)

    def advance(self, stream: Stream, seconds: float, what: str = "compute", nbytes: int = 0) -> None:
        with self._lock:
            super().advance(stream, seconds, what, nbytes)

    def synchronize_all(self) -> None:
        """Carries out all that is pending and waits for it. Failed transfers stay with their events."""
        with self._lock:
            for stream in self._transfers.values():
                self._carry_out(stream, stream.enqueued)
            super().synchronize_all()
            self.now = max(self.now, self.timeline.end)

    @property
    def pending_copies(self) -> int:
        """Copies that were enqueued and are not carried out yet."""
        with self._lock:
            return sum(isinstance(step, Move) for stream in self._transfers.values() for step in stream.queue)

    def attach(self, log: Log | None, naming: OperatorObserver | None) -> None:
        """Starts (or, with ``None``, ends) to write a log of every call below, and to name what is allocated."""
        self._log, self._naming = log, naming

    @contextmanager
    def checked(self, recording: WrittenLog | None = None) -> Iterator[Checker]:
        """Observes every operator of this thread, and checks the order of all accesses.

        At the end whatever is still pending is carried out; ``checker.assert_clean()`` is left to the caller.

        Args:
            recording: gets the log too, to be replayed without one of its entries.
        """
        assert self._checker is None, "this runtime is being checked already"
        checker = Checker()
        log: Log = checker
        if recording is not None:
            recording.then = checker
            log = recording
        observer = OperatorObserver(self, log, torch.device("cpu"), home=self.default_stream, work=self._compute)
        self._checker, self.observer = checker, observer
        self.attach(observer, observer)
        try:
            with observer:
                yield checker
        finally:
            observer.sweep()
            self.synchronize_all()
            self.attach(None, None)
            self._checker = None

    def watching(self) -> TorchDispatchMode:
        """A context for a further thread that computes while this one is inside ``checked()``."""
        assert self._checker is not None, "nothing is being checked"
        assert self.observer is not None
        return self.observer

    # -- the contract -------------------------------------------------------------------------------------------------

    def current_stream(self, device: torch.device) -> SimulatedStream:
        assert device.type == "cpu", "the simulated device's tensors are CPU tensors"
        stack = self._selected.stack
        return stack[-1] if stack else self.default_stream

    def moment(self, stream: Stream | None) -> Moment:
        with self._lock:
            return super().moment(stream)

    def wait(self, stream: Stream, event: Event) -> None:
        assert isinstance(stream, SimulatedStream)
        assert isinstance(event, SimulatedEvent)
        if self._log is not None:
            self._log.write(Waited(stream, event))
        with self._lock:
            super().wait(stream, event)
            if stream.is_transfer:
                stream.push(event)
            else:
                self._carry_out(event.stream, event.position)
                event.raise_failure()

    def query(self, event: Event) -> bool:
        assert isinstance(event, SimulatedEvent)
        with self._lock:
            if not super().query(event):
                return False
            self._carry_out(event.stream, event.position)
        if self._log is not None:
            self._log.write(Synchronized(event))
        return True

    def synchronize(self, event: Event) -> None:
        assert isinstance(event, SimulatedEvent)
        with self._lock:
            began = self.now + self.launch_seconds
            super().synchronize(event)
            self.timeline.host_wait_seconds += self.now - began
            self._carry_out(event.stream, event.position)
            event.raise_failure()
        if self._log is not None:
            self._log.write(Synchronized(event))

    def allocate(self, layout: Layout, device: torch.device, stream: Stream) -> Tensor:
        target = super().allocate(layout, device, stream)
        with without_dispatch_modes(), torch.inference_mode(False), torch.no_grad():
            target.fill_(POISON)
        if self._naming is not None:
            self._naming.allocated(target, stream, "reload target")
        return target

    # -- inside -------------------------------------------------------------------------------------------------------

    def _compute(self, stream: Stream, what: str, nbytes: int) -> None:
        self.advance(stream, nbytes / self.compute_rate, what, nbytes)

    def _new_stream(self, name: str, *, is_transfer: bool = False) -> SimulatedStream:
        return SimulatedStream(name, is_transfer)

    def _new_event(self, stream: ClockedStream) -> SimulatedEvent:
        assert isinstance(stream, SimulatedStream)
        with self._lock:
            self._launch()
            event = SimulatedEvent(stream, self._reached(stream))
        if self._log is not None:
            self._log.write(Recorded(stream, event))
        return event

    def _move(self, slot: Slot, tensor: Tensor, direction: Direction, stream: ClockedStream) -> Span:
        assert isinstance(stream, SimulatedStream)
        outward, region, number = direction is Direction.OUT, None, -1
        kind, what = (AccessKind.READ, "offload") if outward else (AccessKind.WRITE, "reload")
        if self._log is not None:
            assert self._naming is not None
            region = self._naming.region(tensor)
            reads, writes = (region, region_of(slot)) if outward else (region_of(slot), region)
            self._log.write(Operation(stream, (reads,), (writes,), what))
        if self._checker is not None:
            number = self._checker.entries - 1
        move = Move(slot, tensor, direction, Access(stream, kind, what, region, number))
        with self._lock:
            copy = super()._move(slot, tensor, direction, stream)
            stream.push(move)
            stream.fresh.append(move)
            if self._at_once or not stream.is_transfer:
                self._carry_out(stream, stream.enqueued)
        return copy

    def _occupy(self, stream: ClockedStream, seconds: float, what: str, nbytes: int) -> float:
        ready = max(stream.tail, self.now)
        start = super()._occupy(stream, seconds, what, nbytes)
        if start > ready and not stream.is_transfer:
            self.timeline.spans.append(StreamSpan(stream, ready, start, "stall", 0, is_transfer=False))
        self.timeline.spans.append(StreamSpan(stream, start, stream.tail, what, nbytes, what in ("offload", "reload")))
        return start

    def _carry_out(self, stream: SimulatedStream, position: int) -> None:
        """Carries out the first ``position`` steps of ``stream``, and whatever those wait for first."""
        goals = [(stream, position)]
        while goals:
            stream, position = goals[-1]
            if stream.done >= position:
                goals.pop()
                continue
            step = stream.queue[0]
            if isinstance(step, SimulatedEvent):
                if step.stream.done < step.position:
                    goals.append((step.stream, step.position))
                    continue
            elif not step.carry_out():
                self._report(step)
            stream.queue.popleft()
            stream.done += 1

    def _report(self, move: Move) -> None:
        """Takes note of a copy that was carried out although its end on the device was gone."""
        end, access = "source" if move.direction is Direction.OUT else "target", move.entry
        violation = Violation(
            None,
            access,
            f"{access}, but the {end} was freed before the copy ran. The transfer has to hold the {end} until the "
            "event recorded after the copy has completed, or its allocating stream has waited for that event.",
        )
        self.faults.append(violation)
        if self._checker is not None:
            self._checker.report(violation)
