"""The device is the CPU: a transfer stream is a thread with a queue.

Compute on a CPU device is the calling thread itself, so an event recorded on it is over at once and a wait of compute
is a wait of the host. A copy runs on its stream's thread while compute goes on, since system calls and large memory
moves release the interpreter's lock.
"""

from __future__ import annotations

import copy
import threading
import time
import traceback
import weakref
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import Final, TypeAlias, cast

import torch
from torch import Tensor

from eager_offload.errors import OffloadError, TransferError
from eager_offload.runtime.base import Direction, Event, Layout, Runtime, Stream
from eager_offload.tiers.arena import Arena, anonymous_slab
from eager_offload.tiers.base import Slot
from eager_offload.tiers.forking import ForkSafeLock, tell_after_fork

__all__ = ["HostEvent", "HostRuntime", "TransferThread", "host_runtime"]

#: Seconds without work after which a transfer thread ends; the next copy starts a new one.
_IDLE_SECONDS = 10.0
_SLAB_BYTES = 16 << 20
#: Reload targets that are kept for the next reload: filling fresh pages takes the system two to three times as long.
_IDLE_BYTES = 64 << 20
_PROBE_BYTES = 64 << 20


class HostEvent:
    """Completes when the thread that it was recorded on comes to it; carries what went wrong before."""

    __slots__ = ("_waiters", "causes", "done", "error")

    def __init__(self, waiters: _Waiters) -> None:
        self._waiters = waiters
        #: The operations whose failure is this event's.
        self.causes: list[_Operation] = []
        self.done = False
        self.error: BaseException | None = None

    def finish(self, error: BaseException | None) -> None:
        self.error = error
        self.done = True
        # Whoever counts itself among the waiters only now looks at `done` afterwards: it is not missed.
        if self._waiters.count:
            with self._waiters.changed:
                self._waiters.changed.notify_all()

    def wait(self) -> None:
        if self.done:
            return
        waiters = self._waiters
        with waiters.changed:
            waiters.count += 1
            try:
                while not self.done:
                    waiters.changed.wait()
            finally:
                waiters.count -= 1

    def result(self) -> None:
        """Waits, then raises what made the transfer fail.

        Everyone who waits gets an error of their own: its traceback holds their frames, and with them the bytes that
        they were about to use, while the event lives as long as the slot.
        """
        self.wait()
        error = self.error
        if isinstance(error, OffloadError):
            raise copy.copy(error) from error.__cause__
        if error is not None:
            raise error


class _Waiters:
    """Those who wait for events of one thread; events are made often and waited for seldom."""

    __slots__ = ("changed", "count")

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.count = 0


class _Compute:
    """The stream that stands for every thread that computes: its work is over when the call returns."""

    def __repr__(self) -> str:
        return "compute"


_COMPUTE: Final = _Compute()
_OVER: Final = HostEvent(_Waiters())
_OVER.finish(None)


class TransferThread:
    """A transfer stream: operations in order, carried out by one thread that starts when there is work.

    The thread is a daemon and ends by itself when it is idle, so an exiting process never waits for it, and a process
    that stopped offloading has no thread left.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._reset()

    def __repr__(self) -> str:
        return self.name

    def _reset(self) -> None:
        self._queue: SimpleQueue[_Item] = SimpleQueue()
        self._outstanding: set[HostEvent] = set()
        self._waiters = _Waiters()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._mine = _Mine()

    def submit(self, call: Callable[[], None]) -> None:
        """Enqueues an operation; what it raises is carried by the event that the calling thread records next.

        Threads that enqueue side by side must not get each other's errors: a copy that failed would count as done.
        """
        operation = _Operation(call)
        self._mine.operations.append(operation)
        self._put(operation)

    def wait_for(self, event: HostEvent) -> None:
        """Has everything enqueued from here on come after ``event``, which belongs to another stream."""
        self._put(_Operation(event.wait))

    def record(self) -> HostEvent:
        """Enqueues a new event."""
        event = HostEvent(self._waiters)
        mine = self._mine
        event.causes, mine.operations = mine.operations, []
        self._outstanding.add(event)
        self._put(event)
        return event

    def retire(self) -> None:
        """Has the thread carry out what is enqueued and end, and waits for that. Later work starts a new one."""
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            self._queue.put(None)
            thread.join()

    def after_fork(self) -> None:
        """In a forked child the thread does not exist: what it still had to do has failed there."""
        outstanding = list(self._outstanding)
        self._reset()
        for event in outstanding:
            event._waiters = self._waiters
            event.finish(OffloadError("this transfer was under way in the parent process when it forked"))

    def _put(self, item: HostEvent | _Operation) -> None:
        self._queue.put(item)
        if self._thread is None:
            with self._lock:
                if self._thread is None:
                    self._begin_turn()

    def _begin_turn(self) -> None:
        thread = threading.Thread(target=self._run, name=self.name, daemon=True)
        thread.start()  # before it counts: where the system has no thread left, the next one to enqueue tries again
        self._thread = thread

    def _end_turn(self) -> None:
        """Another thread takes over if work has come meanwhile: somebody may be waiting for the end of this one.

        Whoever enqueues puts first and looks for a thread then; this one steps down first and looks for work then. One
        of the two sees the other.
        """
        with self._lock:
            self._thread = None
            if not self._queue.empty():
                self._begin_turn()

    def _run(self) -> None:
        try:
            self._carry_out()
        except BaseException as bug:  # of ours: nothing else comes this far. Whoever waits must hear of it.
            for event in list(self._outstanding):
                self._outstanding.discard(event)
                event.finish(bug)
            with self._lock:
                self._thread = None
            raise

    def _carry_out(self) -> None:
        while True:
            try:
                item = self._queue.get(timeout=_IDLE_SECONDS)
            except Empty:
                item = None
            if item is None:
                self._end_turn()
                return
            if isinstance(item, HostEvent):
                self._outstanding.discard(item)
                item.finish(next((cause.error for cause in item.causes if cause.error is not None), None))
                item.causes = []
            else:
                item.run()
            del item  # or the last copy's tensors would live until the next one comes


def _forget_locals(error: BaseException) -> None:
    """Keeps the lines of a traceback, for the report, and lets go of the bytes that its frames held."""
    link: BaseException | None = error
    while link is not None:
        traceback.clear_frames(link.__traceback__)
        link = link.__cause__ or link.__context__


class _Operation:
    """Something that a transfer thread does, and how it ended."""

    __slots__ = ("_call", "error")

    def __init__(self, call: Callable[[], None]) -> None:
        self._call: Callable[[], None] | None = call
        self.error: BaseException | None = None

    def run(self) -> None:
        call, self._call = self._call, None  # or the event would hold the copy's tensors
        assert call is not None
        try:
            call()
        except BaseException as error:  # carried to whoever waits; a transfer thread never dies of it
            _forget_locals(error)
            # Without this frame, which holds the operation, which holds the error.
            self.error = error.with_traceback(error.__traceback__.tb_next if error.__traceback__ else None)
        finally:
            del call  # frames of the traceback lead back to this one


class _Mine(threading.local):
    """What the calling thread has enqueued since it last recorded an event."""

    def __init__(self) -> None:
        self.operations: list[_Operation] = []


_Item: TypeAlias = HostEvent | _Operation | None


class HostRuntime(Runtime):
    """The runtime of a CPU device."""

    def __init__(self) -> None:
        super().__init__()
        # The threads themselves start when there is work for them.
        self._out = TransferThread("eager_offload-out")
        self._in = TransferThread("eager_offload-in")
        self._users: weakref.WeakSet[object] = weakref.WeakSet()
        self._bandwidth: float | None = None
        #: Reload targets: page-aligned, so that direct I/O can fill them, and used again without new page faults.
        self.arena = Arena(anonymous_slab, slab_bytes=_SLAB_BYTES, idle_bytes=_IDLE_BYTES)
        tell_after_fork(self)

    def current_stream(self, device: torch.device) -> Stream:
        return _COMPUTE

    def transfer_stream(self, device: torch.device, direction: Direction) -> Stream:
        return self._out if direction is Direction.OUT else self._in

    def attach_user(self, user: object) -> None:
        """Counts ``user`` among those for whom the threads are kept ready."""
        self._users.add(user)

    def detach_user(self, user: object) -> None:
        """The last user to go ends the threads."""
        self._users.discard(user)
        if not self._users:
            self._out.retire()
            self._in.retire()

    def tidy(self) -> None:
        super().tidy()
        if self.arena.has_returns:
            self.arena.drain()

    def trim(self) -> None:
        super().trim()
        self.arena.trim()

    def host_buffer(self, nbytes: int) -> Tensor:
        return anonymous_slab(nbytes)

    def bandwidth(self, device: torch.device, direction: Direction) -> float:
        """Of a copy within host memory, which is what the host tier of a CPU device does; see ``DiskTier.measure``."""
        if self._bandwidth is None:
            source, target = anonymous_slab(_PROBE_BYTES).fill_(1), anonymous_slab(_PROBE_BYTES).fill_(0)
            started = time.perf_counter()
            target.copy_(source)
            self._bandwidth = _PROBE_BYTES / (time.perf_counter() - started)
        return self._bandwidth

    def _record(self, stream: Stream) -> Event:
        return stream.record() if isinstance(stream, TransferThread) else _OVER

    def _wait(self, stream: Stream, event: Event) -> None:
        event = cast(HostEvent, event)
        if not isinstance(stream, TransferThread):
            event.result()
        elif not event.done:
            stream.wait_for(event)

    def _query(self, event: Event) -> bool:
        return cast(HostEvent, event).done

    def _synchronize(self, event: Event) -> None:
        assert isinstance(event, HostEvent)
        event.result()

    def _copy(self, dst: Tensor | Slot, src: Tensor | Slot, stream: Stream) -> None:
        assert isinstance(stream, TransferThread)
        if type(dst) is Tensor:  # asked first: Slot is abstract, and asking it takes time
            slot = cast(Slot, src)
            stream.submit(_Move(slot.read, dst, slot))
        else:
            slot = cast(Slot, dst)
            stream.submit(_Move(slot.write, cast(Tensor, src), slot))

    def _allocate(self, layout: Layout, device: torch.device, stream: Stream) -> Tensor:
        # Pages are aligned to every phase; the bytes before it are slack.
        target = self.arena.lease(layout.phase + layout.nbytes)
        return target[layout.phase :] if layout.phase else target

    def after_fork(self) -> None:
        self._out.after_fork()
        self._in.after_fork()


class _Move:
    """A copy on a transfer thread. It owns its tensor and slot until it is done."""

    __slots__ = ("_call", "_slot", "_tensor")

    def __init__(self, call: Callable[[Tensor], None], tensor: Tensor, slot: Slot) -> None:
        self._call, self._tensor, self._slot = call, tensor, slot

    def __call__(self) -> None:
        try:
            self._call(self._tensor)
        except OffloadError:
            raise
        except Exception as error:
            raise TransferError(
                f"moving {self._slot.nbytes} bytes to or from the {self._slot.tier} tier failed: {error}",
                errno=error.errno if isinstance(error, OSError) else None,
                tier=self._slot.tier,
                nbytes=self._slot.nbytes,
            ) from error


_runtime: HostRuntime | None = None
_runtime_lock = ForkSafeLock()


def host_runtime() -> HostRuntime:
    """The process's one runtime of the CPU device."""
    global _runtime
    with _runtime_lock:
        if _runtime is None:
            _runtime = HostRuntime()
        return _runtime
