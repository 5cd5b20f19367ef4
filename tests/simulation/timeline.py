"""What a simulated program did when, in seconds of its virtual clock."""

from __future__ import annotations

from dataclasses import dataclass, field

from eager_offload.runtime.base import Stream


@dataclass(frozen=True, slots=True)
class StreamSpan:
    """Something that took time on a stream."""

    stream: Stream
    #: Seconds since the clock began.
    start: float
    stop: float
    #: An operator's name, ``"offload"``, ``"reload"``, or ``"stall"``: compute had work and waited for an event.
    what: str
    nbytes: int
    is_transfer: bool

    @property
    def seconds(self) -> float:
        return self.stop - self.start

    @property
    def is_stall(self) -> bool:
        return self.what == "stall"


@dataclass(slots=True)
class Timeline:
    """Spans in the order in which the host issued the work."""

    spans: list[StreamSpan] = field(default_factory=list)
    #: How long the host itself waited in ``synchronize``; seconds.
    host_wait_seconds: float = 0.0

    @property
    def stall_seconds(self) -> float:
        """How long compute streams had work and waited for an event; seconds, summed over streams."""
        return sum(span.seconds for span in self.spans if span.is_stall)

    @property
    def end(self) -> float:
        """When the last of all that was issued is over; seconds."""
        return max((span.stop for span in self.spans), default=0.0)
