"""Captures of graphs: in which mode."""

from __future__ import annotations

import enum

__all__ = ["CaptureMode"]


class CaptureMode(enum.Enum):
    """Whom a driver refuses calls that it calls unsafe (to wait, to ask about an event, to pin) during a capture."""

    GLOBAL = "global"
    """Every thread of the process. torch's default."""
    THREAD_LOCAL = "thread_local"
    """The thread that captures. The default here: other threads need not know of the capture."""
    RELAXED = "relaxed"
    """Nobody, but for calls about the streams that are captured."""
