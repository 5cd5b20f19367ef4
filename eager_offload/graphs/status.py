"""Whether a stream is being captured. A machine without an accelerator captures nothing, which is an answer too."""

from __future__ import annotations

import enum

import torch

from eager_offload._torch import accelerator_in_use, stream_is_capturing


class CaptureStatus(enum.Enum):
    """What becomes of work that is enqueued on a stream."""

    NONE = "none"
    """It runs."""
    ACTIVE = "active"
    """It becomes a part of a graph."""
    INVALIDATED = "invalidated"
    """It is an error: a call has made the capture void, which has yet to end."""

    @property
    def is_capturing(self) -> bool:
        return self is CaptureStatus.ACTIVE

    @property
    def is_invalidated(self) -> bool:
        return self is CaptureStatus.INVALIDATED


def capture_status(stream: torch.Stream | None = None) -> CaptureStatus:
    """Whether ``stream`` is being captured, by this library or by another.

    Args:
        stream: of the accelerator; that which the calling thread computes on, where it is left out.
    """
    if stream is None:
        if not accelerator_in_use():
            return CaptureStatus.NONE
        stream = torch.accelerator.current_stream()
    if stream.device.type == "cpu" or not stream_is_capturing(stream):
        return CaptureStatus.NONE
    try:
        # No node comes of this, and no edge that is not there: it asks the driver to go on with the capture.
        stream.wait_event(stream.record_event())
    except RuntimeError:
        return CaptureStatus.INVALIDATED
    return CaptureStatus.ACTIVE


def is_capturing(stream: torch.Stream | None = None) -> bool:
    """Whether what is enqueued on ``stream``, else on the current one, becomes a part of a graph."""
    return capture_status(stream).is_capturing
