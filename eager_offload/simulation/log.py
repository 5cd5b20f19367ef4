"""Writes down what a runtime is asked to do, in the form that the happens-before checker reads."""

# mypy: disable-error-code="safe-super"
# What is abstract in `Runtime` has a body in the class behind.

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from eager_offload.runtime.base import Event, Layout, Runtime, Stream
from eager_offload.tiers.base import Region, Slot

__all__ = ["Log", "LoggedRuntime", "Naming"]


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


class LoggedRuntime(Runtime):
    """Stands in front of a runtime: ``class Logged(LoggedRuntime, AcceleratorRuntime)`` logs the calls of that one."""

    _log: Log | None = None
    _naming: Naming | None = None

    def attach(self, log: Log | None, naming: Naming | None) -> None:
        """Starts (or, with ``None``, ends) writing a log of every call below."""
        self._log, self._naming = log, naming

    def record(self, stream: Stream) -> Event:
        event = super().record(stream)
        if self._log is not None:
            self._log.record(stream, event)
        return event

    def wait(self, stream: Stream, event: Event) -> None:
        if self._log is not None:
            self._log.wait(stream, event)
        super().wait(stream, event)

    def query(self, event: Event) -> bool:
        done = super().query(event)
        if done and self._log is not None:
            self._log.synchronize(event)
        return done

    def synchronize(self, event: Event) -> None:
        super().synchronize(event)
        if self._log is not None:
            self._log.synchronize(event)

    def copy(self, dst: Tensor | Slot, src: Tensor | Slot, stream: Stream, after: Sequence[Event] = ()) -> Event:
        log = self._log
        if log is not None:
            for event in after:
                log.wait(stream, event)
            what = "offload" if isinstance(dst, Slot) else "reload"
            log.access(stream, [self._region(src)], [self._region(dst)], what)
        over = super().copy(dst, src, stream, after)
        if log is not None:
            log.record(stream, over)
        return over

    def allocate(self, layout: Layout, device: torch.device, stream: Stream) -> Tensor:
        target = super().allocate(layout, device, stream)
        if self._naming is not None:
            self._naming.allocated(target, stream, "reload target")
        return target

    def _region(self, end: Tensor | Slot) -> Region:
        if isinstance(end, Slot):
            return end.region
        assert self._naming is not None
        return self._naming.region(end)
