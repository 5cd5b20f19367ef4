"""Streams and events of an accelerator, named by identity."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

__all__ = ["AcceleratorEvent", "AcceleratorStream"]


@dataclass(frozen=True, slots=True)
class AcceleratorStream:
    """A stream by its identity: torch makes a new Python object at each question for the current one."""

    #: With its index.
    device: torch.device
    stream_id: int
    torch_stream: torch.Stream = field(compare=False, repr=False)

    @staticmethod
    def of(stream: torch.Stream) -> AcceleratorStream:
        """Names a stream of torch's."""
        return AcceleratorStream(stream.device, stream.stream_id, stream)

    def __str__(self) -> str:
        return f"{self.device}/{self.stream_id}"


class AcceleratorEvent:
    """A point on a stream, recorded once; equal to itself only.

    [Note: an event that was never recorded]
    To CUDA such an event is complete: waiting for it is a silent no-op and querying it says yes, so a missing record
    would pass for a finished copy. The event therefore knows where it was recorded, and every use asserts it.
    """

    __slots__ = ("__weakref__", "_done", "_event", "began", "recorded_on")

    def __init__(self, event: torch.Event) -> None:
        self._event = event
        self._done = False
        #: Before the copy that this one stands behind; both tell the time. ``None`` where nobody asked for it.
        self.began: AcceleratorEvent | None = None
        #: The stream it was recorded on (which names its device too); ``None`` before.
        self.recorded_on: AcceleratorStream | None = None

    def record(self, stream: AcceleratorStream) -> None:
        """Takes the place behind all that is enqueued on ``stream``."""
        assert self.recorded_on is None, "an event stands for one point of one stream: record a new one"
        stream.torch_stream.record_event(self._event)
        self.recorded_on = stream

    def hold_back(self, stream: AcceleratorStream) -> None:
        """Makes what is enqueued on ``stream`` from here on come after this event."""
        assert self.recorded_on is not None, "waiting for an event that was never recorded orders nothing"
        # A stream is in order by itself, and what is enqueued now comes after what is already over.
        if not self._done and stream != self.recorded_on:
            stream.torch_stream.wait_event(self._event)

    def seconds_until(self, other: AcceleratorEvent) -> float:
        """Device time from here to ``other``, both over, of one device, and made to tell the time."""
        return self._event.elapsed_time(other._event) / 1e3

    def query(self) -> bool:
        """Whether it is over; never blocks."""
        assert self.recorded_on is not None, "an event that was never recorded says that it is complete"
        if not self._done:
            self._done = self._event.query()
        return self._done

    def synchronize(self) -> None:
        """Makes the host wait until it is over."""
        assert self.recorded_on is not None, "waiting for an event that was never recorded orders nothing"
        if not self._done:
            self._event.synchronize()
            self._done = True
