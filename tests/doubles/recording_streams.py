"""The streams and events of the recording double: names for queues and places in them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch

if TYPE_CHECKING:
    from tests.doubles.recording_accelerator import RecordingAccelerator


class Key(NamedTuple):
    """A stream, by what stays the same."""

    device_index: int
    stream_id: int


@dataclass(eq=False)
class Mark:
    """One record of an event; a wait waits for the record that there was when it was called."""

    key: Key
    passed: bool = False
    seconds: float = 0.0


@dataclass(eq=False)
class Step:
    """What a stream does next: wait for a mark, set one, or run."""

    awaits: Mark | None = None
    marks: Mark | None = None
    run: Callable[[], object] | None = None


class RecordingEvent(torch.Event):
    """An event by its methods; nothing of torch's own is behind it."""

    def __new__(cls, machine: RecordingAccelerator, enable_timing: bool) -> RecordingEvent:
        return super().__new__(cls, device="cpu")

    def __init__(self, machine: RecordingAccelerator, enable_timing: bool) -> None:
        self._machine = machine
        self._enable_timing = enable_timing
        self.mark: Mark | None = None

    def query(self) -> bool:
        self._machine.note("query")
        self._machine.captures.check_event(self.mark, "query")
        passed = self.mark is None or self._machine.admits(self.mark)
        if passed:
            self._machine.on_over(self.mark or self)
        return passed

    def synchronize(self) -> None:
        self._machine.note("synchronize")
        self._machine.captures.check_event(self.mark, "synchronize")
        if self.mark is not None:
            self._machine.run_until(self.mark)
        self._machine.on_over(self.mark or self)

    def elapsed_time(self, other: torch.Event) -> float:
        assert isinstance(other, RecordingEvent)
        if not (self._machine.can_time and self._enable_timing and other._enable_timing):
            raise RuntimeError("these events do not tell the time")
        return (_passed(other.mark).seconds - _passed(self.mark).seconds) * 1e3


class RecordingStream(torch.Stream):
    """A stream by its name; its queue is the machine's, since torch has many objects for one stream."""

    def __new__(cls, machine: RecordingAccelerator, key: Key) -> RecordingStream:
        kind = {"cpu": 0, "cuda": 1}[machine.kind]  # torch's numbers
        return super().__new__(cls, stream_id=key.stream_id, device_index=key.device_index, device_type=kind)

    def __init__(self, machine: RecordingAccelerator, key: Key) -> None:
        self._machine = machine
        self.key = key

    def record_event(self, event: torch.Event | None = None) -> torch.Event:
        assert isinstance(event, RecordingEvent)
        self._machine.note(f"record_event {self.key.device_index}/{self.key.stream_id}")
        event.mark = self._machine.captures.mark(self.key)
        if self._machine.captures.of(self.key) is None:
            self._machine.on_record(self.key, event.mark)
            self._machine.enqueue(self.key, Step(marks=event.mark))
        return event

    def wait_event(self, event: torch.Event) -> None:
        assert isinstance(event, RecordingEvent)
        self._machine.note(f"wait_event {self.key.device_index}/{self.key.stream_id}")
        if self._machine.captures.takes_wait(self.key, event.mark or event):
            return
        self._machine.on_wait(self.key, event.mark or event)
        if event.mark is not None:
            self._machine.enqueue(self.key, Step(awaits=event.mark))

    def is_capturing(self) -> bool:
        return self._machine.captures.of(self.key) is not None

    def __enter__(self) -> RecordingStream:
        raise RuntimeError("a stream that is shared by threads must not be entered: the object keeps what to restore")


def _passed(mark: Mark | None) -> Mark:
    if mark is None or not mark.passed:
        raise RuntimeError("both events must be recorded and complete")
    return mark
