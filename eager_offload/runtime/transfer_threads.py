"""Transfer streams of a CPU device: each is a thread with a queue, and an event is an entry of the queue."""

from __future__ import annotations

import atexit
import copy
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from queue import Empty, SimpleQueue

from eager_offload.errors import OffloadError, reentered
from eager_offload.tiers.forking import (
    FinalizerRecord,
    ForkSafeLock,
    Living,
    OwnThread,
    UnderWayAtFork,
    tell_after_fork,
)

#: Seconds without work after which a transfer thread ends. The next copy starts a new one.
_IDLE_SECONDS = 10.0
#: Seconds without work after which a transfer thread polls, since the program may never call the library again. Longer
#: than the gaps between the reloads of a backward, which reuse memory.
_PAUSE_SECONDS = 0.05
#: Seconds that a transfer thread without work dozes, in which nobody wakes it; short compared to a worthwhile transfer.
_DOZE_SECONDS = 2e-4
#: Seconds for which an exiting process waits for the running copy.
_STOP_SECONDS = 10.0


class HostEvent:
    """An operation of a transfer thread and its result; without ``work``, a mark in the queue."""

    # Class attributes: an `__init__` would be a call for each copy.
    thread: TransferThread | None = None
    work: Callable[[], None] | None = None
    done = False
    error: BaseException | None = None
    #: The duration of the work from ``began`` on, if it succeeded.
    seconds: float | None = None
    began = 0.0
    processor_seconds = 0.0
    #: Whether a computing thread ran the work, because no transfer thread could be started.
    inline = False

    def carry_out(self) -> None:
        """Runs the work; its error is raised in the threads that wait."""
        work, self.work, failure = self.work, None, None  # otherwise the event would hold the copy's tensors
        if work is None:
            self.complete(None)
            return
        self.began, before = time.perf_counter(), time.thread_time()
        try:
            work()
            self.seconds = time.perf_counter() - self.began
        except BaseException as error:  # a transfer thread survives every error
            # Keep the lines of the traceback for the report, and release the locals of its frames.
            link: BaseException | None = error
            while link is not None:
                traceback.clear_frames(link.__traceback__)
                link = link.__cause__ or link.__context__
            # Without this frame, which holds the event, which holds the error: a cycle.
            failure = error.with_traceback(error.__traceback__.tb_next if error.__traceback__ else None)
        finally:
            self.processor_seconds = time.thread_time() - before
            del work  # frames of the traceback refer to this frame
        self.complete(failure)

    def complete(self, error: BaseException | None) -> None:
        self.work = None
        self.error = error
        self.done = True
        # No lost wake-up: a thread that registers as a waiter after this check reads `done` afterwards.
        thread = self.thread
        if thread is not None and thread.waiters:
            with thread.changed:
                thread.changed.notify_all()

    def wait(self) -> None:
        thread = self.thread
        if self.done or thread is None:
            return
        if thread.is_current():  # see [Note: reentry] in tiers/forking.py
            raise reentered()
        thread.hurry()
        with thread.changed:
            thread.waiters += 1
            try:
                while not self.done:
                    thread.changed.wait()
            finally:
                thread.waiters -= 1

    def result(self) -> None:
        """Waits, then raises the transfer's error.

        Each waiting thread gets a copy of the error: a traceback holds the thread's frames, and thereby the bytes that
        they were about to use, while the event lives as long as the slot.
        """
        if not self.done:
            self.wait()
        error = self.error
        if isinstance(error, OffloadError):
            raise copy.copy(error) from error.__cause__
        if error is not None:
            raise error


class TransferThread:
    """A transfer stream: operations carried out in order by one thread, which starts when there is work.

    [Note: handing over]
    To wake a thread takes a system call, and the woken thread competes for the interpreter's lock while the caller
    computes: for a small tensor that costs more than all other work on it. So a thread without work *dozes* briefly
    before it sleeps. Callers that enqueue in the meantime do not wake the thread; it runs the accumulated operations
    after the doze, or as soon as another thread waits for one.

    [Note: no thread to be had]
    If the system cannot start a thread (a limit of the user or the container, or the interpreter shuts down), the
    thread that enqueues or waits runs the queued operations itself. That only costs time.

    The thread is a daemon. It ends by itself when it is idle, or in a pause once all its users have died, so an exiting
    process never waits for it, and a process that stopped offloading has no thread left.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        #: Called on the thread after a pause without work, and before it ends; called again after another pause if it
        #: returns ``False``. It must not wait for a lock whose holder may wait for the thread.
        self.pauses: Callable[[], bool | None] = lambda: None
        #: Likewise, as soon as the queue is empty; it may enqueue further operations.
        self.runs_dry: Callable[[], bool | None] = lambda: None
        #: Whether anyone may enqueue work again; checked in pauses.
        self.is_wanted: Callable[[], bool] = lambda: True
        #: Guards the start of a thread. A signal handler within that could wait for a thread that waits for this lock;
        #: `ForkSafeLock` refuses reentrant calls of every `Offload` meanwhile.
        self._lock = ForkSafeLock()
        self._reset()
        _threads.add(self)
        tell_after_fork(self)

    def __repr__(self) -> str:
        return self.name

    def _reset(self) -> None:
        #: For threads that wait for any event of this thread: events are many and waits few, so they share a condition.
        self.changed = threading.Condition()
        self.waiters = 0
        # Running and queued operations. Only the thread removes one, after it is done; `None` ends the thread.
        self.items: deque[HostEvent | None] = deque()
        self.bell: SimpleQueue[FinalizerRecord[object] | None] = SimpleQueue()
        self._users: set[FinalizerRecord[object] | None] = set()
        self._dozes = self.sleeps = self._stops = False
        self._pausing = threading.Lock()
        #: The thread that runs operations: an `OwnThread`, or a caller if none could be started.
        self.thread: threading.Thread | None = None
        #: The previous thread, which may still be running its last lines.
        self._former: threading.Thread | None = None

    def submit(self, work: Callable[[], None] | None) -> HostEvent:
        """Enqueues an operation; its event completes with it and carries its error."""
        event = HostEvent()
        event.thread, event.work = self, work
        # No lost wake-up: this appends first and then checks the thread's state; the thread first publishes that it
        # sleeps or ends, and then checks the queue. So at least one of the two sees the other.
        self.items.append(event)
        if self.sleeps:
            self.bell.put(None)
        elif self.thread is None:
            self._start()
        return event

    def record(self) -> HostEvent:
        return self.submit(None)

    def is_current(self) -> bool:
        return self.thread is threading.current_thread()

    def serve(self, user: object) -> None:
        """Wakes the thread when ``user`` dies, to check ``is_wanted``: see [Note: finalizers] in tiers/forking.py."""
        if self.thread is None:
            self._discard_dead_users()
        if user not in [one() for one in list(self._users) if one is not None]:  # may be registered repeatedly
            self._users.add(FinalizerRecord(user, self.bell.put))

    def hurry(self) -> None:
        """Ends a doze or a sleep of the thread: another thread waits for it."""
        if self._dozes or self.sleeps:
            self.bell.put(None)
        elif self.thread is None and self.items:  # not started yet, or interrupted before the start
            self._start()

    def close(self) -> None:
        """Has the thread finish the queued operations and end, and waits for that. Later work starts a new thread."""
        thread = self.thread
        if isinstance(thread, OwnThread) and not self.is_current():
            self.items.append(None)
            self.bell.put(None)
        else:
            thread = self._former
        if thread is not None and thread is not threading.current_thread():
            thread.join()

    def stop(self) -> None:
        """Ends the thread after its current operation, without further callbacks: the process is exiting."""
        self.runs_dry = self.pauses = lambda: None
        thread = self.thread
        if isinstance(thread, OwnThread) and not self.is_current():
            self._stops = True  # queued operations stay: a later wait starts another thread
            self.bell.put(None)
            thread.join(_STOP_SECONDS)
            self._stops = False
        with self._pausing:
            return

    def after_fork(self) -> None:
        items = list(self.items)
        self._reset()
        for event in items:
            if event is not None and not event.done:
                event.complete(UnderWayAtFork())

    def _start(self) -> None:
        """Starts the thread, or runs the operations here: see [Note: no thread to be had]."""
        while True:
            with self._lock.lock:
                if self.thread is not None or not self.items or self._begin_turn():
                    return
                self.thread = threading.current_thread()  # so that no second thread takes the same event
            try:
                self._carry_out_here()
            finally:
                self.thread = None  # then loop, for operations that were enqueued in between

    def _carry_out_here(self) -> None:
        items = self.items
        while items:
            event = items[0]
            if event is not None and not event.done:
                event.inline = True
                event.carry_out()
                if isinstance(error := event.error, KeyboardInterrupt | SystemExit):  # meant for the caller
                    event.error = OffloadError("this transfer was interrupted")
                    items.popleft()
                    raise error
            items.popleft()

    def _begin_turn(self) -> bool:
        thread = OwnThread(self._run, self.name)
        try:
            thread.start()
        except RuntimeError:
            if thread.ident is not None:  # the thread runs: a signal handler raised this
                raise
            return False
        self.thread = thread  # if an interrupt comes before this line, `_run` sets it
        return True

    def _run(self) -> None:
        me = threading.current_thread()
        with self._lock.lock:
            if self.thread is not me and self.thread is not None:
                return  # two were started: two threads on one queue would remove each other's events
            self.thread = me
        try:
            self._carry_out()
        except BaseException as bug:  # a bug of this module; waiting threads must learn of it
            while self.items:
                event = self.items.popleft()
                if event is not None and not event.done:
                    event.complete(bug)
            self._end_turn()
            raise

    def _carry_out(self) -> None:
        items, ends = self.items, False
        while True:
            while items and not self._stops:
                event = items[0]
                if event is None:
                    self._call(self.pauses)
                    items.popleft()
                    ends = True
                    break
                if not event.done:  # done if an interrupt ended a caller's turn right after the operation
                    event.carry_out()
                del event
                items.popleft()
            if self._stops:
                with self._lock.lock:
                    self._former, self.thread = threading.current_thread(), None
                return
            if not ends:
                ends = self._rest_until_idle()
            elif self._end_turn():
                return

    def _rest_until_idle(self) -> bool:
        """Dozes, then sleeps until there is work; returns whether it is time to end."""
        has_asked = self._call(self.runs_dry) is not False
        self._dozes = True
        self._rest(_DOZE_SECONDS)
        self._dozes = False
        if not has_asked:
            self._call(self.runs_dry)
        if self.items or self._stops:
            return False
        self.sleeps = True
        rung = self._rest(_PAUSE_SECONDS)
        while not rung and self._call(self.pauses) is False:
            rung = self._rest(_PAUSE_SECONDS)
        rung = rung or (self.is_wanted() and self._rest(_IDLE_SECONDS))
        self.sleeps = False
        return not rung and not self.items

    def _rest(self, seconds: float) -> bool:
        """Waits for the bell, unless there is work; returns whether there was a reason to go on."""
        if self.items:
            return True
        try:
            user = self.bell.get(timeout=seconds)
        except Empty:
            return False
        self._users.discard(user)
        self._discard_dead_users()
        return True

    def _discard_dead_users(self) -> None:
        with suppress(Empty):
            while True:
                self._users.discard(self.bell.get_nowait())

    def _call(self, listener: Callable[[], bool | None]) -> bool | None:
        with self._pausing:
            return listener()

    def _end_turn(self) -> bool:
        """Steps down; another thread takes over if there is work, whose caller may wait for this one's end.

        Returns:
            ``False`` if no other thread could be started: this one goes on.
        """
        with self._lock.lock:
            self._former, self.thread = threading.current_thread(), None
            if self.items and not self._begin_turn():
                self.thread, self._former = self._former, None
                return False
        return True


_threads: Living[TransferThread] = Living()


@atexit.register
def _stop_all() -> None:
    """Ends all transfer threads before the interpreter exits.

    The end of a copy frees tensors, whose C++ destructors release and reacquire the interpreter's lock. A daemon thread
    that tries to acquire it after the interpreter's end is terminated in a destructor, which aborts the process.
    """
    for thread in _threads:
        thread.stop()
