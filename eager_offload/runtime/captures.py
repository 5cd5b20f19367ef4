"""Captures of graphs that are under way in this process, and what they forbid meanwhile."""

from __future__ import annotations

import enum
import threading
from typing import Any

import torch

from eager_offload._torch import stream_is_capturing

#: How torch names device memory that graphs share.
MemoryPool = tuple[int, int]


class CaptureMode(enum.Enum):
    """Whose calls a driver refuses that it calls unsafe (to wait, to ask about an event, to pin) during a capture."""

    GLOBAL = "global"
    """Every thread of the process. torch's default."""
    THREAD_LOCAL = "thread_local"
    """The thread that captures. The default here: other threads need not know of the capture."""
    RELAXED = "relaxed"
    """No thread, but for calls about the streams that are captured."""


class Capture:
    """A capture, from its begin on; it is of the thread that has begun it.

    Args:
        graph: torch's, which it ends in.
        stream: on which it begins and ends.
        memory: of other graphs, which it is to share; ``None`` for its own.
    """

    def __init__(self, graph: Any, stream: torch.Stream, mode: CaptureMode, memory: MemoryPool | None) -> None:
        self.graph = graph
        self.stream = stream
        self.mode = mode
        self.memory = memory
        self.thread = threading.get_ident()
        #: The streams that are known to be captured: others come in by waiting for an event of these.
        self.streams = {stream}
        self.is_over = False


class Captures:
    """Those that this library has begun. One of the program's own is noticed by asking the stream."""

    def __init__(self) -> None:
        #: Replaced, never changed: read without a lock, and by everything that is about an event.
        self.under_way: tuple[Capture, ...] = ()

    def begin(self, capture: Capture) -> None:
        self.under_way = (*self.under_way, capture)

    def end(self, capture: Capture) -> None:
        capture.is_over = True
        self.under_way = tuple(one for one in self.under_way if one is not capture)

    def own(self) -> Capture | None:
        """That of the calling thread."""
        thread = threading.get_ident()
        return next((one for one in self.under_way if one.thread == thread), None)

    def forbid_queries(self) -> bool:
        """Whether the calling thread would invalidate a capture by asking the driver about an event.

        By waiting for one, pinning or unpinning it would as well.
        """
        thread = threading.get_ident()
        return any(one.thread == thread or one.mode is CaptureMode.GLOBAL for one in self.under_way)

    def of(self, stream: torch.Stream) -> Capture | None:
        """That which ``stream`` is captured in."""
        for one in self.under_way:
            if stream in one.streams:
                return one
        for one in self.under_way:  # there is one for each device at most
            if one.stream.device == stream.device and stream_is_capturing(stream):
                one.streams.add(stream)
                return one
        return None


#: Of this process, as drivers see it.
CAPTURES = Captures()
