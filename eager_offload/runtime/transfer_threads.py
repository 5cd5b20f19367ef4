"""A transfer stream of a CPU device is a thread with a queue; its events are places in that queue."""

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

#: Seconds without work after which a transfer thread ends; the next copy starts a new one.
_IDLE_SECONDS = 10.0
#: Seconds without work after which a transfer thread has what is over taken up, since no call of the library may ever
#: come again. Long beside the pauses between the reloads of a backward, which use the same memory again.
_PAUSE_SECONDS = 0.05
#: Seconds for which a transfer thread without work does not want to be woken; a small part of what a transfer takes
#: that is worth its while.
_DOZE_SECONDS = 2e-4
#: Seconds for which a process that ends waits for the copy that is under way.
_STOP_SECONDS = 10.0


class HostEvent:
    """Something that a transfer thread comes to, and how it ended; without work it only marks a place in the queue."""

    # Of the class: an `__init__` would be a call for each copy.
    thread: TransferThread | None = None
    work: Callable[[], None] | None = None
    done = False
    error: BaseException | None = None
    #: How long the work took from when it ``began``, if it succeeded.
    seconds: float | None = None
    began = 0.0
    #: What it took of the processor.
    processor_seconds = 0.0
    #: Whether it was carried out by a thread that computes, for want of one of its own.
    inline = False

    def carry_out(self) -> None:
        """Does the work; an error is carried to the threads that wait."""
        work, self.work, failure = self.work, None, None  # or the event would hold the copy's tensors
        if work is None:
            self.complete(None)
            return
        self.began, before = time.perf_counter(), time.thread_time()
        try:
            work()
            self.seconds = time.perf_counter() - self.began
        except BaseException as error:  # a transfer thread never dies of it
            # The lines of the traceback stay, for the report; the bytes that its frames held go.
            link: BaseException | None = error
            while link is not None:
                traceback.clear_frames(link.__traceback__)
                link = link.__cause__ or link.__context__
            # Without this frame, which holds the event, which holds the error.
            failure = error.with_traceback(error.__traceback__.tb_next if error.__traceback__ else None)
        finally:
            self.processor_seconds = time.thread_time() - before
            del work  # frames of the traceback lead back to this one
        self.complete(failure)

    def complete(self, error: BaseException | None) -> None:
        self.work = None
        self.error = error
        self.done = True
        # A thread that counts itself among the waiters only now looks at `done` afterwards: it is not missed.
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
        """Waits, then raises what made the transfer fail.

        Each thread that waits gets an error of its own: its traceback holds that thread's frames, and with them the
        bytes that they were about to use, while the event lives as long as the slot.
        """
        if not self.done:
            self.wait()
        error = self.error
        if isinstance(error, OffloadError):
            raise copy.copy(error) from error.__cause__
        if error is not None:
            raise error


class TransferThread:
    """A transfer stream: operations in order, carried out by one thread that starts when there is work.

    [Note: handing over]
    To wake a thread is a system call, and then it wants the interpreter's lock while the caller still computes: for a
    small tensor both cost more than everything else that is done for it. So a thread that has run out of work *dozes*
    for a moment before it sleeps. A caller that enqueues meanwhile does not wake it, and it carries out what has come
    together when the moment is over, or as soon as some thread waits for it.

    [Note: no thread to be had]
    Where the system starts no thread (a limit of the user or of a container, or the interpreter shuts down), the thread
    that enqueues, or that waits, carries out itself what stands in the queue. That only takes its time.

    The thread is a daemon and ends by itself when it is idle, or in a pause when all that it served has gone. So a
    process that exits never waits for it, and one that stopped offloading has no thread left.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        #: Is called on the thread when there was no work for a moment, and before it ends; again after another moment
        #: if it returns ``False``. What it waits for must not wait for the thread.
        self.pauses: Callable[[], bool | None] = lambda: None
        #: The same, as soon as all that was enqueued is done: it may enqueue what was held back until then.
        self.runs_dry: Callable[[], bool | None] = lambda: None
        #: Whether anything may give it work again; asked in pauses.
        self.is_wanted: Callable[[], bool] = lambda: True
        #: For starting a thread. A signal handler that comes in the midst of that would wait for a thread that waits
        #: for the lock: so a thread that holds it can begin nothing, with no ``Offload``.
        self._lock = ForkSafeLock()
        self._reset()
        _threads.add(self)
        tell_after_fork(self)

    def __repr__(self) -> str:
        return self.name

    def _reset(self) -> None:
        #: Of the threads that wait for an event of this one. Events are many and waited for seldom: they share one.
        self.changed = threading.Condition()
        self.waiters = 0
        # What the thread is at or has not come to; only the thread itself takes out, when it is done. `None` ends it.
        self.items: deque[HostEvent | None] = deque()
        self.bell: SimpleQueue[FinalizerRecord[object] | None] = SimpleQueue()
        self._users: set[FinalizerRecord[object] | None] = set()
        self._dozes = self.sleeps = self._stops = False
        self._pausing = threading.Lock()
        #: The one that carries out what is enqueued: an `OwnThread` that was started for it, or a caller without one.
        self.thread: threading.Thread | None = None
        #: The one that stepped down last; for a moment it still runs.
        self._former: threading.Thread | None = None

    def submit(self, work: Callable[[], None] | None) -> HostEvent:
        """Enqueues an operation; the event is over when that is, and carries what it raised."""
        event = HostEvent()
        event.thread, event.work = self, work
        # Put first and look at the thread then; the thread says that it rests, or steps down, and looks for work then.
        # One of the two sees the other.
        self.items.append(event)
        if self.sleeps:
            self.bell.put(None)  # one too many only makes the thread look once more
        elif self.thread is None:
            self._start()
        return event

    def record(self) -> HostEvent:
        """Enqueues a new event, which is over when everything enqueued before it is."""
        return self.submit(None)

    def is_current(self) -> bool:
        """Whether the calling thread is the one that carries the operations out."""
        return self.thread is threading.current_thread()

    def serve(self, user: object) -> None:
        """Looks whether it is still wanted when ``user`` dies: see [Note: finalizers] in tiers/forking.py."""
        if self.thread is None:
            self._take_up_rings()
        if user not in [one() for one in list(self._users) if one is not None]:  # one may come again and again
            self._users.add(FinalizerRecord(user, self.bell.put))

    def hurry(self) -> None:
        """Has the thread go on at once if it rests: another one waits for it."""
        if self._dozes or self.sleeps:
            self.bell.put(None)
        elif self.thread is None and self.items:  # none was started yet, or an interrupt came before that
            self._start()

    def close(self) -> None:
        """Has the thread carry out what is enqueued and end, and waits for that. Later work starts a new one."""
        thread = self.thread
        if isinstance(thread, OwnThread) and not self.is_current():
            self.items.append(None)
            self.bell.put(None)
        else:
            thread = self._former
        if thread is not None and thread is not threading.current_thread():
            thread.join()

    def stop(self) -> None:
        """Calls nothing in pauses any more and ends the thread after what it is at: the process is about to end."""
        self.runs_dry = self.pauses = lambda: None
        thread = self.thread
        if isinstance(thread, OwnThread) and not self.is_current():
            self._stops = True  # what it has not come to stays: a later wait starts another one
            self.bell.put(None)
            thread.join(_STOP_SECONDS)
            self._stops = False
        with self._pausing:
            return

    def after_fork(self) -> None:
        """In a forked child the thread does not exist: what it still had to do has failed there."""
        items = list(self.items)
        self._reset()
        for event in items:
            if event is not None and not event.done:
                event.complete(UnderWayAtFork())

    # -- on the threads that enqueue ----------------------------------------------------------------------------------

    def _start(self) -> None:
        """See [Note: no thread to be had]."""
        while True:
            with self._lock.lock:
                if self.thread is not None or not self.items or self._begin_turn():
                    return
                self.thread = threading.current_thread()  # no second one takes the same event meanwhile
            try:
                self._carry_out_here()
            finally:
                self.thread = None  # and then look for what has come meanwhile

    def _carry_out_here(self) -> None:
        items = self.items
        while items:
            event = items[0]
            if event is not None and not event.done:
                event.inline = True
                event.carry_out()
                if isinstance(error := event.error, KeyboardInterrupt | SystemExit):  # it was meant for the caller
                    event.error = OffloadError("this transfer was interrupted")
                    items.popleft()
                    raise error
            items.popleft()

    def _begin_turn(self) -> bool:
        thread = OwnThread(self._run, self.name)
        try:
            thread.start()
        except RuntimeError:
            if thread.ident is not None:  # it runs: a signal handler has raised this
                raise
            return False
        self.thread = thread  # if an interrupt comes before this, the thread says so itself
        return True

    # -- on the thread itself -----------------------------------------------------------------------------------------

    def _run(self) -> None:
        me = threading.current_thread()
        with self._lock.lock:
            if self.thread is not me and self.thread is not None:
                return  # two were started, and two at the same queue would take an event for done that is not
            self.thread = me
        try:
            self._carry_out()
        except BaseException as bug:  # of ours: nothing else comes this far. The threads that wait must hear of it.
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
                if not event.done:  # else an interrupt ended the turn of a caller right after it
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
        """Dozes, then sleeps until there is work; ``False`` where there is, ``True`` where it is time to end."""
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
        """Waits until the bell rings, unless there is work; whether there was any reason to go on."""
        if self.items:
            return True
        try:
            user = self.bell.get(timeout=seconds)
        except Empty:
            return False
        self._users.discard(user)
        self._take_up_rings()
        return True

    def _take_up_rings(self) -> None:
        with suppress(Empty):
            while True:
                self._users.discard(self.bell.get_nowait())

    def _call(self, listener: Callable[[], bool | None]) -> bool | None:
        with self._pausing:
            return listener()

    def _end_turn(self) -> bool:
        """Another thread takes over if work has come meanwhile: its caller may be waiting for the end of this one.

        Returns:
            ``False`` where there is no other: this one goes on.
        """
        with self._lock.lock:
            self._former, self.thread = threading.current_thread(), None
            if self.items and not self._begin_turn():
                self.thread, self._former = self._former, None
                return False
        return True


#: All of the process.
_threads: Living[TransferThread] = Living()


@atexit.register
def _stop_all() -> None:
    """Ends them before the interpreter ends.

    The end of a copy frees tensors. Their destructors, in C++, give the interpreter's lock away and want it back; once
    the interpreter is gone, a daemon thread that wants it is taken down in their midst, and that aborts the process.
    """
    for thread in _threads:
        thread.stop()
