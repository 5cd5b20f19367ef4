"""A simulated device with real bytes and a log: to prove orderings on.

CPU tensors stand for device memory. Compute runs the moment it is called; copies are only enqueued, and carried out as
late as the ordering allows: when the host has synchronized or a query has said yes, or when compute waits. So a copy
that nothing waits for reads what compute has written over its source since, and an unpack that does not wait reads
what was in the target before: a missing edge shows as wrong bytes, besides the happens-before checker's verdict.

Time is arithmetic, on a clock that only work moves. Each call of the host takes ``launch_seconds``, each operator as
long as its bytes do at ``compute_rate`` and each copy as its bytes take at its direction's bandwidth, and a stream does
one thing at a time.

What is simpler than on a device: autograd does not switch streams in backward, so that a node runs on the stream that
is current where ``backward`` was called, and operators that read a value to the host do not synchronize.
"""

from __future__ import annotations

import mmap
import threading
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager

import torch
from torch import Tensor

from eager_offload.runtime.base import ALIGNMENT, Direction, Event, Layout, Moment, Runtime, Span, Stream
from eager_offload.tiers.base import LinkRates, Rate, Slot
from eager_offload.torch_private.calls import TorchDispatchMode, without_dispatch_modes
from tests.simulation.checker import Access, AccessKind, Checker, Violation
from tests.simulation.log import Log, Operation, Recorded, Synchronized, Waited, WrittenLog, region_of
from tests.simulation.observer import OperatorObserver
from tests.simulation.streams import POISON, Move, SimulatedEvent, SimulatedStream
from tests.simulation.timeline import StreamSpan, Timeline


class _Selected(threading.local):
    def __init__(self) -> None:
        #: The streams that a thread has entered.
        self.stack: list[SimulatedStream] = []


class SimulatedRuntime(Runtime):
    """A device with streams of its own and a clock that only work moves, whose calls can be checked.

    The defaults make a device that is much slower than its host, and links that are slower than compute: the host runs
    ahead, few queries say yes, and copies stay pending for as long as they can. The strictest proof of an ordering is
    ``launch_seconds=0``: the host's clock then moves only when it synchronizes, no query hides a missing wait, and a
    loop that polls never ends.
    """

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
        super().__init__()
        self.compute_rate = compute_rate
        self.launch_seconds = launch_seconds
        #: Seconds on the host's clock.
        self.now = 0.0
        #: It grows with every operation; put a new one here to forget.
        self.timeline = Timeline()
        #: Copies that were carried out although one of their ends was gone.
        self.faults: list[Violation] = []
        #: Of the last ``checked()``.
        self.observer: OperatorObserver | None = None
        #: The one that computes.
        self.default_stream = SimulatedStream("default")
        self._transfers = {d: SimulatedStream(f"transfer-{d.value}", is_transfer=True) for d in Direction}
        self._bandwidths = {Direction.OUT: out_bandwidth, Direction.IN: in_bandwidth}
        self._at_once, self._host_waits = at_once, host_waits
        self._lock = threading.RLock()
        self._selected = _Selected()
        self._log: Log | None = None
        self._naming: OperatorObserver | None = None
        self._checker: Checker | None = None

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
        """Enqueues work of ``seconds`` on ``stream``."""
        assert isinstance(stream, SimulatedStream)
        with self._lock:
            self._launch()
            self._occupy(stream, seconds, what, nbytes)
            if self._host_waits:
                self.now = max(self.now, stream.tail)

    def synchronize_all(self) -> None:
        """Carries out all that is pending and waits for it. Failed transfers stay with their events."""
        with self._lock:
            streams = (self.default_stream, *self._transfers.values())
            for stream in streams:
                self._carry_out(stream, stream.enqueued)
            self.now = max(self.now, self.timeline.end, *(stream.tail for stream in streams))

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

    def transfer_stream(self, device: torch.device, direction: Direction) -> SimulatedStream:
        assert device.type == "cpu", "the simulated device's tensors are CPU tensors"
        return self._transfers[direction]

    def timestamp(self) -> float:
        return self._reached(self.current_stream(torch.device("cpu")))

    def moment(self, stream: Stream | None) -> Moment:
        with self._lock:
            return self.now if stream is None else self._reached(stream)

    def spans(self, event: Event) -> tuple[Span, ...]:
        assert isinstance(event, SimulatedEvent)
        return () if event.copy is None else (event.copy,)

    def measure_link(self, device: torch.device) -> LinkRates:
        return LinkRates(*[Rate(self._bandwidths[way]) for way in Direction])

    def record(self, stream: Stream) -> SimulatedEvent:
        assert isinstance(stream, SimulatedStream)
        with self._lock:
            self._launch()
            event = SimulatedEvent(stream, self._reached(stream))
        if self._log is not None:
            self._log.write(Recorded(stream, event))
        return event

    def wait(self, stream: Stream, event: Event) -> None:
        assert isinstance(stream, SimulatedStream)
        assert isinstance(event, SimulatedEvent)
        if self._log is not None:
            self._log.write(Waited(stream, event))
        with self._lock:
            self._launch()
            stream.clear_from = max(stream.clear_from, event.time)
            if stream.is_transfer:
                stream.push(event)
                return
            if self._host_waits:
                self.now = max(self.now, event.time)
            self._carry_out(event.stream, event.position)
            event.raise_failure()

    def has_host_wait(self, event: Event) -> bool:
        return self._host_waits

    def query(self, event: Event) -> bool:
        assert isinstance(event, SimulatedEvent)
        with self._lock:
            self._launch()
            if self.now < event.time:
                return False
            self._carry_out(event.stream, event.position)
        if self._log is not None:
            self._log.write(Synchronized(event))
        return True

    def synchronize(self, event: Event) -> None:
        assert isinstance(event, SimulatedEvent)
        with self._lock:
            self._launch()
            self.timeline.host_wait_seconds += max(event.time - self.now, 0.0)
            self.now = max(self.now, event.time)
            self._carry_out(event.stream, event.position)
            event.raise_failure()
        if self._log is not None:
            self._log.write(Synchronized(event))

    def copy(
        self,
        dst: Tensor | Slot,
        src: Tensor | Slot,
        stream: Stream,
        after: Sequence[Event] = (),
        *,
        timed: bool = False,
    ) -> Event:
        assert isinstance(stream, SimulatedStream)
        for event in after:
            self.wait(stream, event)
        if isinstance(dst, Slot):
            assert isinstance(src, Tensor), "one end of a copy rests in a tier, the other does not"
            copy = self._move(dst, src, Direction.OUT, stream)
        else:
            assert isinstance(src, Slot), "one end of a copy rests in a tier, the other does not"
            copy = self._move(src, dst, Direction.IN, stream)
        over = self.record(stream)
        over.copy = copy
        return over

    def allocate(self, layout: Layout, device: torch.device, stream: Stream) -> Tensor:
        assert 0 <= layout.alignment_offset < ALIGNMENT
        with without_dispatch_modes(), torch.inference_mode(False), torch.no_grad():
            nbytes = layout.alignment_offset + layout.nbytes
            block = torch.full((nbytes,), POISON, dtype=torch.uint8, device="cpu")
            assert block.data_ptr() % ALIGNMENT == 0, "torch aligns CPU memory to 64 bytes"
            target = block[layout.alignment_offset :]
        if self._naming is not None:
            self._naming.allocated(target, stream, "reload target")
        return target

    def host_buffer(self, nbytes: int) -> Tensor:
        with without_dispatch_modes(), torch.inference_mode(False):
            buffer = torch.empty(nbytes + mmap.PAGESIZE - 1, dtype=torch.uint8, device="cpu")
            start = -buffer.data_ptr() % mmap.PAGESIZE
            return buffer[start : start + nbytes]

    # -- inside -------------------------------------------------------------------------------------------------------

    def _compute(self, stream: Stream, what: str, nbytes: int) -> None:
        self.advance(stream, nbytes / self.compute_rate, what, nbytes)

    def _launch(self) -> None:
        self.now += self.launch_seconds

    def _reached(self, stream: Stream) -> float:
        """When ``stream`` comes to what is enqueued next."""
        assert isinstance(stream, SimulatedStream)
        return max(stream.tail, stream.clear_from, self.now)

    def _occupy(self, stream: SimulatedStream, seconds: float, what: str, nbytes: int) -> float:
        """``stream`` is busy for ``seconds``; returns when it begins to be."""
        ready = max(stream.tail, self.now)
        start = max(ready, stream.clear_from)
        stream.tail = start + seconds
        if start > ready and not stream.is_transfer:
            self.timeline.spans.append(StreamSpan(stream, ready, start, "stall", 0, is_transfer=False))
        self.timeline.spans.append(StreamSpan(stream, start, stream.tail, what, nbytes, what in ("offload", "reload")))
        return start

    def _move(self, slot: Slot, tensor: Tensor, direction: Direction, stream: SimulatedStream) -> Span:
        """Enqueues a copy; returns when it runs."""
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
            self._launch()
            start = self._occupy(stream, slot.nbytes / self._bandwidths[direction], what, slot.nbytes)
            copy = Span("", start, stream.tail)
            stream.push(move)
            stream.fresh.append(move)
            if self._at_once or not stream.is_transfer:
                self._carry_out(stream, stream.enqueued)
        return copy

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
