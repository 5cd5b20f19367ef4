"""Captures of the recording double: what CUDA refuses while a stream is being captured, call by call.

It follows "Stream capture" of CUDA's manual. What is refused raises, and makes the capture void:

- Calls that may be unsafe (to ask about an event, to wait for one, to pin, to unpin) in a thread that captures in
  another mode than ``relaxed``, and in every thread while some thread captures in mode ``global``.
- In every mode and thread, calls that cannot be right: to ask about or wait for an event that was recorded in a
  capture, to wait for a device of which a stream is being captured, and to order streams across the capture's edge.

What is enqueued meanwhile is kept as nodes, and nothing of it runs; the virtual device has graphs that do.
"""

from __future__ import annotations

import threading
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NoReturn

from tests.doubles.recording_streams import Key, Mark, RecordingEvent, Step

if TYPE_CHECKING:
    from tests.doubles.recording_accelerator import RecordingAccelerator

Pool = tuple[int, int]


@dataclass(eq=False)
class RecordingCapture:
    """A capture that is under way, as the driver sees it."""

    mode: str
    origin: Key
    #: The memory that its graph allocates.
    pool: Pool | None = None
    #: Whose memory its matrix products work in.
    workspaces: set[Pool | None] = field(default_factory=set)
    thread: int = field(default_factory=threading.get_ident)
    #: What was enqueued, in order: on which stream, what, and which nodes it comes after, by number.
    nodes: list[tuple[Key, Step, frozenset[int]]] = field(default_factory=list)
    #: By captured stream: what its next node comes after.
    tails: dict[Key, frozenset[int]] = field(default_factory=dict)
    #: The first call that made it void.
    invalidated_by: str | None = None

    def __post_init__(self) -> None:
        self.tails[self.origin] = frozenset()

    def add(self, key: Key, step: Step) -> None:
        self.nodes.append((key, step, self.tails[key]))
        self.tails[key] = frozenset({len(self.nodes) - 1})

    @property
    def unjoined(self) -> set[Key]:
        """Streams with work that the stream on which the capture began does not come after."""
        joined, pending = set[int](), list(self.tails[self.origin])
        while pending:
            node = pending.pop()
            if node not in joined:
                joined.add(node)
                pending.extend(self.nodes[node][2])
        return {key for number, (key, _, _) in enumerate(self.nodes) if number not in joined}


@dataclass(eq=False)
class CapturedMark(Mark):
    """A record of an event inside of a capture: a place in the graph, which never passes."""

    capture: RecordingCapture | None = None
    after: frozenset[int] = frozenset()


class DriverCaptures:
    """All captures of the double's process, by whomever they were begun."""

    def __init__(self) -> None:
        self.under_way: list[RecordingCapture] = []
        #: Pools that torch's host allocator records to, to 2.12 for good where a capture fails.
        self.recorded_to: set[Pool | None] = set()
        #: Every call that was refused, with the mode of the capture that it has made void, or ``""``.
        self.refused: list[tuple[str, str]] = []

    def of(self, key: Key) -> RecordingCapture | None:
        """That which a stream is captured in."""
        return next((capture for capture in self.under_way if key in capture.tails), None)

    def check_unsafe(self, call: str) -> None:
        """Refuses a call that may be unsafe, as the mode of each capture has it."""
        thread = threading.get_ident()
        hit = [
            capture
            for capture in self.under_way
            if capture.mode == "global" or (capture.thread == thread and capture.mode == "thread_local")
        ]
        if hit:
            self._refuse(call, hit)

    def check_device(self, index: int, call: str) -> None:
        """Refuses to wait for a device of which a stream is being captured; else as ``check_unsafe``."""
        if hit := [capture for capture in self.under_way if any(key.device_index == index for key in capture.tails)]:
            self._refuse(call, hit)
        self.check_unsafe(call)

    def check_event(self, event: Mark | None, call: str) -> None:
        """Refuses to ask the host's questions about an event of a capture; else as ``check_unsafe``."""
        if isinstance(event, CapturedMark):
            self._refuse(call, [capture for capture in self.under_way if capture is event.capture])
        self.check_unsafe(call)

    def mark(self, key: Key) -> Mark:
        """A record on ``key``."""
        capture = self.of(key)
        if capture is None:
            return Mark(key)
        self._check_valid(capture)
        return CapturedMark(key, capture=capture, after=capture.tails[key])

    def takes_wait(self, key: Key, event: Mark | RecordingEvent) -> bool:
        """Whether the wait of the stream ``key`` for ``event`` is one inside of a capture, which has it then."""
        captured, call = self.of(key), "a stream's wait"
        if not isinstance(event, CapturedMark):
            if captured is not None and isinstance(event, Mark):
                self._refuse(f"{call} for an event from outside", [captured])
            return captured is not None
        capture = event.capture
        if capture not in self.under_way or captured not in (None, capture):
            self._refuse(f"{call} for an event of another capture", [] if captured is None else [captured])
        assert capture is not None
        if key.stream_id == 0 or key.device_index != event.key.device_index:
            self._refuse(f"{call} of one that cannot be captured", [capture])
        self._check_valid(capture)
        capture.tails[key] = capture.tails.get(key, frozenset()) | event.after
        return True

    def takes(self, key: Key, step: Step) -> bool:
        """Whether ``step`` has become a node of a capture."""
        capture = self.of(key)
        if capture is None:
            return False
        self._check_valid(capture)
        capture.add(key, step)
        return True

    def _refuse(self, call: str, hit: list[RecordingCapture]) -> NoReturn:
        for capture in hit:
            capture.invalidated_by = capture.invalidated_by or call
        self.refused.append((call, hit[0].mode if hit else ""))
        raise RuntimeError(f"operation not permitted when stream is capturing: {call}")

    def _check_valid(self, capture: RecordingCapture) -> None:
        if capture.invalidated_by is not None:
            raise RuntimeError(f"operation failed due to a previous error during capture: {capture.invalidated_by}")


class RecordingGraph:
    """What torch has for a graph; a replay does nothing."""

    def __init__(self, machine: RecordingAccelerator) -> None:
        self._machine = machine
        self._pool: Pool | None = None
        self.capture: RecordingCapture | None = None

    def capture_begin(self, pool: Pool | None, mode: str) -> None:
        machine = self._machine
        key = machine.selected(machine.current_device_index())
        machine.note(f"capture_begin {key.device_index}/{key.stream_id}")
        assert self.capture is None
        if key.stream_id == 0:
            raise RuntimeError("CUDA graphs must be captured on a non-default stream")
        if machine.captures.of(key) is not None:
            raise RuntimeError("the stream is already capturing")
        if pool in machine.captures.recorded_to:
            raise RuntimeError("beginAllocateToPool: already recording to mempool_id")
        self.capture, self._pool = RecordingCapture(mode, key, pool), pool
        machine.captures.under_way.append(self.capture)
        machine.captures.recorded_to.add(pool)

    def capture_end(self) -> None:
        machine, capture = self._machine, self.capture
        machine.note("capture_end")
        assert capture is not None
        if machine.selected(machine.current_device_index()) != capture.origin:
            raise RuntimeError("capture must end on the same stream it began on")
        if capture.mode != "relaxed" and capture.thread != threading.get_ident():
            raise RuntimeError("attempted to terminate a capture from a different thread")
        machine.captures.under_way.remove(capture)
        if capture.invalidated_by is not None:
            raise RuntimeError(f"operation failed due to a previous error during capture: {capture.invalidated_by}")
        if capture.unjoined:
            raise RuntimeError("capture has unjoined work")
        machine.captures.recorded_to.remove(self._pool)

    def reset(self) -> None:
        machine, capture = self._machine, self.capture
        machine.note("reset")
        if capture is not None:
            assert self._pool not in machine.workspaces.values(), "a workspace keeps the memory of the graph"
            machine.workspaces.pop(capture.origin, None)  # of what works there
        self.capture = None

    def replay(self) -> None:
        self._machine.note("replay")

    def pool(self) -> Pool | None:
        return self._pool

    def __del__(self) -> None:
        """As torch to 2.13, which does not exchange the mode of the thread for this call."""
        if self.capture is not None:
            self._machine.note("destroy")
            with suppress(RuntimeError):
                self._machine.captures.check_unsafe("to destroy a graph")
