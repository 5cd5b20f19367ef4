"""A device of numbers: streams, two links and a clock that only work moves.

Time is arithmetic. Each call of the host takes ``launch_seconds``, each copy as long as its bytes take at its
direction's bandwidth, and a stream does one thing at a time. Tensors are CPU tensors, and no bytes move:
``simulated.py`` adds that.
"""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from eager_offload.runtime.base import ALIGNMENT, Direction, Event, Layout, Moment, Runtime, Span, Stream
from eager_offload.tiers.base import LinkRates, Rate, Slot
from eager_offload.torch_private.calls import without_dispatch_modes


@dataclass(eq=False, slots=True)
class ClockedStream:
    """Operations in order, and when they are over."""

    name: str
    is_transfer: bool = False
    #: Seconds: when its last operation is over, and before which the next one must not start.
    tail: float = 0.0
    clear_from: float = 0.0

    def __repr__(self) -> str:
        return self.name


class ClockedEvent:
    """A point on a stream; equal to itself only."""

    __slots__ = ("__weakref__", "copy", "stream", "time")

    def __init__(self, stream: ClockedStream, time: float) -> None:
        self.stream = stream
        #: Seconds: when it completes.
        self.time = time
        #: When the copy runs that it was recorded behind.
        self.copy: Span | None = None

    def __repr__(self) -> str:
        return f"event on {self.stream} at {self.time:.9f} s"


class ClockedRuntime(Runtime):
    """The device of one thread.

    Args:
        out_bandwidth, in_bandwidth: bytes a second from the device, and to it.
        launch_seconds: what each call costs the host.
        host_waits: the host waits for each operator, as where it computes itself.
    """

    def __init__(self, *, out_bandwidth: float, in_bandwidth: float, launch_seconds: float, host_waits: bool) -> None:
        super().__init__()
        self.launch_seconds = launch_seconds
        #: Seconds on the host's clock.
        self.now = 0.0
        self._bandwidths = {Direction.OUT: out_bandwidth, Direction.IN: in_bandwidth}
        self._host_waits = host_waits
        #: The one that computes.
        self.default_stream = self._new_stream("default")
        self._transfers = {d: self._new_stream(f"transfer-{d.value}", is_transfer=True) for d in Direction}

    def advance(self, stream: Stream, seconds: float, what: str = "compute", nbytes: int = 0) -> None:
        """Enqueues work of ``seconds`` on ``stream``."""
        assert isinstance(stream, ClockedStream)
        self._launch()
        self._occupy(stream, seconds, what, nbytes)
        if self._host_waits:
            self.now = max(self.now, stream.tail)

    def synchronize_all(self) -> None:
        """Waits for all that was enqueued."""
        self.now = max(self.now, *(stream.tail for stream in (self.default_stream, *self._transfers.values())))

    # -- the contract -------------------------------------------------------------------------------------------------

    def current_stream(self, device: torch.device) -> ClockedStream:
        return self.default_stream

    def transfer_stream(self, device: torch.device, direction: Direction) -> ClockedStream:
        assert device.type == "cpu", "the simulated device's tensors are CPU tensors"
        return self._transfers[direction]

    def timestamp(self) -> float:
        return self._reached(self.current_stream(torch.device("cpu")))

    def moment(self, stream: Stream | None) -> Moment:
        return self.now if stream is None else self._reached(stream)

    def spans(self, event: Event) -> tuple[Span, ...]:
        assert isinstance(event, ClockedEvent)
        return () if event.copy is None else (event.copy,)

    def measure_link(self, device: torch.device) -> LinkRates:
        return LinkRates(*[Rate(self._bandwidths[way]) for way in Direction])

    def record(self, stream: Stream) -> Event:
        assert isinstance(stream, ClockedStream)
        return self._new_event(stream)

    def wait(self, stream: Stream, event: Event) -> None:
        assert isinstance(stream, ClockedStream)
        assert isinstance(event, ClockedEvent)
        self._launch()
        stream.clear_from = max(stream.clear_from, event.time)
        if self._host_waits and not stream.is_transfer:
            self.now = max(self.now, event.time)

    def has_host_wait(self, event: Event) -> bool:
        return self._host_waits

    def query(self, event: Event) -> bool:
        assert isinstance(event, ClockedEvent)
        self._launch()
        return self.now >= event.time

    def synchronize(self, event: Event) -> None:
        assert isinstance(event, ClockedEvent)
        self._launch()
        self.now = max(self.now, event.time)

    def copy(
        self,
        dst: Tensor | Slot,
        src: Tensor | Slot,
        stream: Stream,
        after: Sequence[Event] = (),
        *,
        timed: bool = False,
    ) -> Event:
        assert isinstance(stream, ClockedStream)
        for event in after:
            self.wait(stream, event)
        if isinstance(dst, Slot):
            assert isinstance(src, Tensor), "one end of a copy rests in a tier, the other does not"
            copy = self._move(dst, src, Direction.OUT, stream)
        else:
            assert isinstance(src, Slot), "one end of a copy rests in a tier, the other does not"
            copy = self._move(src, dst, Direction.IN, stream)
        over = self._new_event(stream)
        over.copy = copy
        return over

    def allocate(self, layout: Layout, device: torch.device, stream: Stream) -> Tensor:
        assert 0 <= layout.alignment_offset < ALIGNMENT
        with without_dispatch_modes(), torch.inference_mode(False), torch.no_grad():
            block = torch.empty(layout.alignment_offset + layout.nbytes, dtype=torch.uint8, device="cpu")
            assert block.data_ptr() % ALIGNMENT == 0, "torch aligns CPU memory to 64 bytes"
            target = block[layout.alignment_offset :]
        return target

    def host_buffer(self, nbytes: int) -> Tensor:
        with without_dispatch_modes(), torch.inference_mode(False):
            buffer = torch.empty(nbytes + mmap.PAGESIZE - 1, dtype=torch.uint8, device="cpu")
            start = -buffer.data_ptr() % mmap.PAGESIZE
            return buffer[start : start + nbytes]

    # -- inside -------------------------------------------------------------------------------------------------------

    def _new_stream(self, name: str, *, is_transfer: bool = False) -> ClockedStream:
        return ClockedStream(name, is_transfer)

    def _new_event(self, stream: ClockedStream) -> ClockedEvent:
        self._launch()
        return ClockedEvent(stream, self._reached(stream))

    def _reached(self, stream: Stream) -> float:
        """When ``stream`` comes to what is enqueued next."""
        assert isinstance(stream, ClockedStream)
        return max(stream.tail, stream.clear_from, self.now)

    def _move(self, slot: Slot, tensor: Tensor, direction: Direction, stream: ClockedStream) -> Span:
        """Enqueues a copy; returns when it runs."""
        self._launch()
        what = "offload" if direction is Direction.OUT else "reload"
        start = self._occupy(stream, slot.nbytes / self._bandwidths[direction], what, slot.nbytes)
        return Span("", start, stream.tail)

    def _launch(self) -> None:
        self.now += self.launch_seconds

    def _occupy(self, stream: ClockedStream, seconds: float, what: str, nbytes: int) -> float:
        """``stream`` is busy for ``seconds``; returns when it begins to be."""
        start = max(stream.tail, self.now, stream.clear_from)
        stream.tail = start + seconds
        return start
