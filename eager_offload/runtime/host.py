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
from collections import deque
from collections.abc import Callable, Sequence
from queue import Empty, SimpleQueue
from typing import Final, cast

import torch
from torch import Tensor

from eager_offload.errors import OffloadError, TransferError
from eager_offload.runtime.base import Direction, Event, Layout, Leg, Runtime, Stream
from eager_offload.tiers.arena import Arena
from eager_offload.tiers.base import Slot
from eager_offload.tiers.forking import ForkSafeLock, tell_after_fork
from eager_offload.tiers.memory import anonymous_slab, resident_slab

__all__ = ["HostEvent", "HostRuntime", "TransferThread", "carry", "host_runtime"]

#: Seconds without work after which a transfer thread ends; the next copy starts a new one.
_IDLE_SECONDS = 10.0
#: Seconds for which a transfer thread without work does not want to be woken; a small part of what a transfer takes
#: that is worth its while.
_DOZE_SECONDS = 2e-4
_SLAB_BYTES = 16 << 20
#: Reload targets that are kept for the next reload: filling fresh pages takes the system two to three times as long.
_IDLE_BYTES = 64 << 20
_PROBE_BYTES = 64 << 20


class HostEvent:
    """Something that a transfer thread comes to, and how it ended; without work it only marks a place in the queue."""

    __slots__ = ("_thread", "_work", "began", "done", "error", "seconds")

    def __init__(self, thread: TransferThread | None, work: Callable[[], None] | None = None) -> None:
        self._thread = thread
        self._work = work
        self.done = False
        self.error: BaseException | None = None
        #: When the work began, and how long it took if it succeeded.
        self.began: float | None = None
        self.seconds: float | None = None

    def carry_out(self) -> None:
        """Does the work; an error is carried to whoever waits."""
        self.finish(None if self._work is None else self._attempt())

    def _attempt(self) -> BaseException | None:
        work, self._work = self._work, None  # or the event would hold the copy's tensors
        assert work is not None
        self.began = began = time.perf_counter()
        try:
            work()
            self.seconds = time.perf_counter() - began
        except BaseException as error:  # a transfer thread never dies of it
            _forget_locals(error)
            # Without this frame, which holds the event, which holds the error.
            return error.with_traceback(error.__traceback__.tb_next if error.__traceback__ else None)
        else:
            return None
        finally:
            del work  # frames of the traceback lead back to this one

    def leg(self, name: str) -> Leg | None:
        """When the work ran, under ``name``; ``None`` where it never began."""
        return None if self.began is None else Leg(name, self.began, self.began + (self.seconds or 0.0))

    def finish(self, error: BaseException | None) -> None:
        self._work = None
        self.error = error
        self.done = True
        # Whoever counts itself among the waiters only now looks at `done` afterwards: it is not missed.
        thread = self._thread
        if thread is not None and thread.waiters:
            with thread.changed:
                thread.changed.notify_all()

    def wait(self) -> None:
        thread = self._thread
        if self.done or thread is None:
            return
        thread.hurry()
        with thread.changed:
            thread.waiters += 1
            try:
                while not self.done:
                    thread.changed.wait()
            finally:
                thread.waiters -= 1

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


class _Compute:
    """The stream that stands for every thread that computes: its work is over when the call returns."""

    def __repr__(self) -> str:
        return "compute"


_COMPUTE: Final = _Compute()
_OVER: Final = HostEvent(None)
_OVER.finish(None)


class TransferThread:
    """A transfer stream: operations in order, carried out by one thread that starts when there is work.

    [Note: handing over]
    To wake a thread is a system call, and then it wants the interpreter's lock while the caller still computes: for a
    small tensor both cost more than everything else that is done for it. So a thread that has run out of work *dozes*
    for a moment before it sleeps. Whoever enqueues meanwhile does not wake it, and it carries out what has come
    together when the moment is over, or as soon as somebody waits for it.

    The thread is a daemon and ends by itself when it is idle, so an exiting process never waits for it, and a process
    that stopped offloading has no thread left.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._reset()

    def __repr__(self) -> str:
        return self.name

    def _reset(self) -> None:
        #: Those who wait for an event of this thread. Events are made often and waited for seldom: they share one.
        self.changed = threading.Condition()
        self.waiters = 0
        # What the thread is at or has not come to; only the thread itself takes out, when it is done. `None` ends it.
        self._items: deque[HostEvent | None] = deque()
        self._bell: SimpleQueue[None] = SimpleQueue()
        self._dozes = self._sleeps = False
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def submit(self, work: Callable[[], None]) -> HostEvent:
        """Enqueues an operation; the event is over when that is, and carries what it raised."""
        event = HostEvent(self, work)
        self._put(event)
        return event

    def record(self) -> HostEvent:
        """Enqueues a new event, which is over when everything enqueued before it is."""
        event = HostEvent(self)
        self._put(event)
        return event

    def hurry(self) -> None:
        """Somebody waits: has the thread go on at once if it rests."""
        if self._dozes or self._sleeps:
            self._ring()
        elif self._thread is None and self._items:  # whoever enqueued was interrupted before it came to start one
            self._start()

    def retire(self) -> None:
        """Has the thread carry out what is enqueued and end, and waits for that. Later work starts a new one."""
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            self._items.append(None)
            self._ring()
            thread.join()

    def after_fork(self) -> None:
        """In a forked child the thread does not exist: what it still had to do has failed there."""
        items = list(self._items)
        self._reset()
        for event in items:
            if event is not None and not event.done:
                event.finish(OffloadError("this transfer was under way in the parent process when it forked"))

    def _put(self, event: HostEvent) -> None:
        # Put first and look at the thread then; the thread says that it rests, or steps down, and looks for work then.
        # One of the two sees the other.
        self._items.append(event)
        if self._sleeps:
            self._ring()
        elif self._thread is None:
            self._start()

    def _start(self) -> None:
        with self._lock:
            if self._thread is None:
                self._begin_turn()

    def _ring(self) -> None:
        self._bell.put(None)  # one too many only makes the thread look once more

    def _begin_turn(self) -> None:
        thread = threading.Thread(target=self._run, name=self.name, daemon=True)
        thread.start()  # before it counts: where the system has no thread left, the next one to enqueue tries again
        self._thread = thread  # if an interrupt comes before this, the thread says so itself

    def _end_turn(self) -> None:
        """Another thread takes over if work has come meanwhile: somebody may be waiting for the end of this one."""
        with self._lock:
            self._thread = None
            if self._items:
                self._begin_turn()

    def _run(self) -> None:
        me = threading.current_thread()
        with self._lock:
            if self._thread is not me and self._thread is not None:
                return  # two were started, and two at the same queue would take an event for done that is not
            self._thread = me
        try:
            self._carry_out()
        except BaseException as bug:  # of ours: nothing else comes this far. Whoever waits must hear of it.
            while self._items:
                event = self._items.popleft()
                if event is not None and not event.done:
                    event.finish(bug)
            self._end_turn()
            raise

    def _carry_out(self) -> None:
        items = self._items
        while True:
            while items:
                event = items[0]
                if event is None:
                    items.popleft()
                    self._end_turn()
                    return
                event.carry_out()
                del event
                items.popleft()
            self._dozes = True
            self._rest(_DOZE_SECONDS)
            self._dozes = False
            if items:
                continue
            self._sleeps = True
            rung = self._rest(_IDLE_SECONDS)
            self._sleeps = False
            if not rung and not items:
                self._end_turn()
                return

    def _rest(self, seconds: float) -> bool:
        """Waits until someone rings, unless there is work; whether there was any reason to go on."""
        if self._items:
            return True
        try:
            self._bell.get(timeout=seconds)
        except Empty:
            return False
        return True


def _forget_locals(error: BaseException) -> None:
    """Keeps the lines of a traceback, for the report, and lets go of the bytes that its frames held."""
    link: BaseException | None = error
    while link is not None:
        traceback.clear_frames(link.__traceback__)
        link = link.__cause__ or link.__context__


class HostRuntime(Runtime):
    """The runtime of a CPU device."""

    def __init__(self) -> None:
        super().__init__()
        # The threads themselves start when there is work for them.
        self._out = TransferThread("eager_offload-out")
        self._in = TransferThread("eager_offload-in")
        self._bandwidth: float | None = None
        #: Reload targets: page-aligned, so that direct I/O can fill them, and used again without new page faults.
        self.arena = Arena(anonymous_slab, slab_bytes=_SLAB_BYTES, idle_bytes=_IDLE_BYTES)
        tell_after_fork(self)

    def current_stream(self, device: torch.device) -> Stream:
        return _COMPUTE

    def transfer_stream(self, device: torch.device, direction: Direction) -> Stream:
        return self._out if direction is Direction.OUT else self._in

    def _retire(self) -> None:
        self._out.retire()
        self._in.retire()

    def tidy(self) -> None:
        super().tidy()
        if self.arena.has_returns:
            self.arena.drain()

    def trim(self) -> None:
        super().trim()
        self.arena.trim()

    def seconds(self, event: Event) -> float | None:
        return cast(HostEvent, event).seconds

    def legs(self, event: Event) -> tuple[Leg, ...]:
        leg = cast(HostEvent, event).leg("")
        return () if leg is None else (leg,)

    def host_buffer(self, nbytes: int) -> Tensor:
        return resident_slab(nbytes)

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
            stream.submit(event.wait)

    def _query(self, event: Event) -> bool:
        return cast(HostEvent, event).done

    def _synchronize(self, event: Event) -> None:
        assert isinstance(event, HostEvent)
        event.result()

    def _copy(self, dst: Tensor | Slot, src: Tensor | Slot, stream: Stream, after: Sequence[Event]) -> Event:
        assert isinstance(stream, TransferThread)
        pending = [event for event in cast(Sequence[HostEvent], after) if not event.done]
        if type(dst) is Tensor:  # asked first: Slot is abstract, and asking it takes time
            slot = cast(Slot, src)
            return stream.submit(_Move(slot.read, dst, slot, pending))
        slot = cast(Slot, dst)
        return stream.submit(_Move(slot.write, cast(Tensor, src), slot, pending))

    def _allocate(self, layout: Layout, device: torch.device, stream: Stream) -> Tensor:
        # Pages are aligned to every phase; the bytes before it are slack.
        target = self.arena.lease(layout.phase + layout.nbytes)
        return target[layout.phase :] if layout.phase else target

    def after_fork(self) -> None:
        self._out.after_fork()
        self._in.after_fork()


class _Move:
    """A copy on a transfer thread. It owns its tensor and slot until it is done."""

    __slots__ = ("_after", "_call", "_slot", "_tensor")

    def __init__(self, call: Callable[[Tensor], None], tensor: Tensor, slot: Slot, after: Sequence[HostEvent]) -> None:
        self._call, self._tensor, self._slot, self._after = call, tensor, slot, after

    def __call__(self) -> None:
        for event in self._after:
            event.wait()
        carry(self._call, self._tensor, self._slot)


def carry(call: Callable[[Tensor], None], tensor: Tensor, slot: Slot) -> None:
    """Has ``slot`` written or read, on the thread that does it.

    Raises:
        OffloadError: whatever went wrong; a ``TransferError`` that tells its cause, where the tier raised another.
    """
    try:
        call(tensor)
    except OffloadError:
        raise
    except Exception as error:
        raise TransferError(
            f"moving {slot.nbytes} bytes to or from the {slot.tier} tier failed: {error}",
            errno=error.errno if isinstance(error, OSError) else None,
            tier=slot.tier,
            nbytes=slot.nbytes,
        ) from error


_runtime: HostRuntime | None = None
_runtime_lock = ForkSafeLock()


def host_runtime() -> HostRuntime:
    """The process's one runtime of the CPU device."""
    global _runtime
    with _runtime_lock.lock:
        if _runtime is None:
            _runtime = HostRuntime()
        return _runtime
