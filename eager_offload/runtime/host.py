"""The device is the CPU: a transfer stream is a thread with a queue.

Compute on a CPU device is the calling thread itself, so an event recorded on it is over at once and a wait of compute
is a wait of the host. A copy runs on its stream's thread while compute goes on, since system calls and large memory
moves release the interpreter's lock.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from typing import Final

import torch
from torch import Tensor

from eager_offload.errors import OffloadError, TransferError
from eager_offload.runtime.base import Direction, Event, Layout, Runtime, Stream
from eager_offload.tiers.arena import Arena, anonymous_slab
from eager_offload.tiers.base import Slot

__all__ = ["HostEvent", "HostRuntime", "TransferThread", "host_runtime"]

#: Seconds without work after which a transfer thread ends; the next copy starts a new one.
_IDLE_SECONDS = 10.0
_SLAB_BYTES = 16 << 20
_PROBE_BYTES = 64 << 20


class HostEvent:
    """Completes when the thread that it was recorded on comes to it; carries what went wrong before."""

    __slots__ = ("_changed", "done", "error")

    def __init__(self, changed: threading.Condition | None) -> None:
        self._changed = changed
        self.done = changed is None
        self.error: BaseException | None = None

    def finish(self, error: BaseException | None) -> None:
        assert self._changed is not None
        with self._changed:
            self.error = error
            self.done = True
            self._changed.notify_all()

    def wait(self) -> None:
        if not self.done:
            assert self._changed is not None
            with self._changed:
                while not self.done:
                    self._changed.wait()

    def result(self) -> None:
        """Waits, then raises what made the transfer fail."""
        self.wait()
        if self.error is not None:
            raise self.error


class _Compute:
    """The stream that stands for every thread that computes: its work is over when the call returns."""

    def __repr__(self) -> str:
        return "compute"


_COMPUTE: Final = _Compute()
_OVER: Final = HostEvent(None)


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
        self._queue: deque[HostEvent | Callable[[], None]] = deque()
        self._outstanding: set[HostEvent] = set()
        self._work = threading.Condition()
        self._finished = threading.Condition()
        self._thread: threading.Thread | None = None
        self._retiring = False

    def submit(self, operation: Callable[[], None]) -> None:
        """Enqueues an operation; what it raises is carried by the next event."""
        self._enqueue(operation)

    def record(self) -> HostEvent:
        event = HostEvent(self._finished)
        self._outstanding.add(event)
        self._enqueue(event)
        return event

    def retire(self) -> None:
        """Ends the thread once the queue is empty, and waits for that. Work that comes later starts a new one."""
        with self._work:
            thread = self._thread
            self._retiring = True
            self._work.notify()
        if thread is not None and thread is not threading.current_thread():
            thread.join()

    def after_fork(self) -> None:
        """In a forked child the thread does not exist: what it still had to do has failed there."""
        outstanding = list(self._outstanding)
        self._reset()
        for event in outstanding:
            event._changed = self._finished
            event.finish(OffloadError("this transfer was under way in the parent process when it forked"))

    def _enqueue(self, item: HostEvent | Callable[[], None]) -> None:
        with self._work:
            self._queue.append(item)
            self._retiring = False
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name=self.name, daemon=True)
                self._thread.start()
            else:
                self._work.notify()

    def _next(self) -> HostEvent | Callable[[], None] | None:
        """The next item, or ``None`` when the thread is to end."""
        with self._work:
            while not self._queue:
                if self._retiring or not self._work.wait(_IDLE_SECONDS):
                    if self._queue:
                        break
                    self._thread = None
                    return None
            return self._queue.popleft()

    def _run(self) -> None:
        error: BaseException | None = None
        while (item := self._next()) is not None:
            if isinstance(item, HostEvent):
                self._outstanding.discard(item)
                item.finish(error)
                error = None
            elif error is None:
                try:
                    item()
                except BaseException as raised:  # carried to whoever waits; a transfer thread never dies of it
                    error = raised
            del item  # or the last copy's tensors would live until the next one comes


class HostRuntime(Runtime):
    """The runtime of a CPU device."""

    def __init__(self) -> None:
        super().__init__()
        self._lock = threading.Lock()
        self._streams: dict[Direction, TransferThread] = {}
        self._users: weakref.WeakSet[object] = weakref.WeakSet()
        self._bandwidth: float | None = None
        #: Reload targets: page-aligned, so that direct I/O can fill them, and used again without new page faults.
        self.arena = Arena(anonymous_slab, slab_bytes=_SLAB_BYTES, idle_bytes=2 * _SLAB_BYTES)
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._after_fork)

    def current_stream(self, device: torch.device) -> Stream:
        return _COMPUTE

    def transfer_stream(self, device: torch.device, direction: Direction) -> Stream:
        stream = self._streams.get(direction)
        if stream is None:
            with self._lock:
                stream = self._streams.setdefault(direction, TransferThread(f"eager_offload-{direction.value}"))
        return stream

    def attach_user(self, user: object) -> None:
        """Counts ``user`` among those for whom the threads are kept ready."""
        self._users.add(user)

    def detach_user(self, user: object) -> None:
        """The last user to go ends the threads."""
        self._users.discard(user)
        if not self._users:
            for stream in list(self._streams.values()):
                stream.retire()

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
        assert isinstance(event, HostEvent)
        if not isinstance(stream, TransferThread):
            event.result()
        elif not event.done:
            stream.submit(event.wait)

    def _query(self, event: Event) -> bool:
        assert isinstance(event, HostEvent)
        return event.done

    def _synchronize(self, event: Event) -> None:
        assert isinstance(event, HostEvent)
        event.result()

    def _copy(self, dst: Tensor | Slot, src: Tensor | Slot, stream: Stream) -> None:
        assert isinstance(stream, TransferThread)
        if isinstance(dst, Slot):
            assert isinstance(src, Tensor)
            stream.submit(_Move(dst.write, src, dst))
        else:
            assert isinstance(src, Slot)
            stream.submit(_Move(src.read, dst, src))

    def _allocate(self, layout: Layout, device: torch.device, stream: Stream) -> Tensor:
        # Pages are aligned to every phase; the bytes before it are slack.
        return self.arena.lease(layout.phase + layout.nbytes)[layout.phase :]

    def _after_fork(self) -> None:
        self._lock = threading.Lock()
        for stream in self._streams.values():
            stream.after_fork()


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
_runtime_lock = threading.Lock()


def host_runtime() -> HostRuntime:
    """The process's one runtime of the CPU device."""
    global _runtime
    with _runtime_lock:
        if _runtime is None:
            _runtime = HostRuntime()
        return _runtime
