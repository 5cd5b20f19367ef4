"""What a simulated program did when, in seconds of its virtual clock."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from eager_offload.runtime.base import Stream

__all__ = ["Span", "Timeline"]


@dataclass(frozen=True, slots=True)
class Span:
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

    spans: list[Span] = field(default_factory=list)
    #: How long the host itself waited in ``synchronize``; seconds.
    host_wait_seconds: float = 0.0

    @property
    def stall_seconds(self) -> float:
        """How long compute streams had work and waited for an event; seconds, summed over streams."""
        return sum(span.seconds for span in self.spans if span.is_stall)

    @property
    def overlap_seconds(self) -> float:
        """For how long both an operator and a transfer ran; seconds."""
        compute = _union(span for span in self.spans if not span.is_transfer and not span.is_stall)
        transfers = _union(span for span in self.spans if span.is_transfer)
        return sum(max(0.0, min(a.stop, b.stop) - max(a.start, b.start)) for a, b in _meeting(compute, transfers))

    @property
    def end(self) -> float:
        """When the last of all that was issued is over; seconds."""
        return max((span.stop for span in self.spans), default=0.0)


class _Busy(NamedTuple):
    start: float
    stop: float


def _union(spans: Iterable[Span]) -> list[_Busy]:
    """When at least one of them ran: intervals that do not meet, in order."""
    busy: list[_Busy] = []
    for span in sorted(spans, key=lambda span: span.start):
        if busy and span.start <= busy[-1].stop:
            busy[-1] = _Busy(busy[-1].start, max(busy[-1].stop, span.stop))
        else:
            busy.append(_Busy(span.start, span.stop))
    return busy


class _Pair(NamedTuple):
    first: _Busy
    second: _Busy


def _meeting(left: list[_Busy], right: list[_Busy]) -> list[_Pair]:
    """Each pair that may overlap, found in one pass."""
    pairs: list[_Pair] = []
    i = j = 0
    while i < len(left) and j < len(right):
        pairs.append(_Pair(left[i], right[j]))
        if left[i].stop <= right[j].stop:
            i += 1
        else:
            j += 1
    return pairs
