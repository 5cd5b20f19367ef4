"""Threads that lend a hand with the pieces of one transfer."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Any, Generic, TypeVar

from eager_offload.tiers.forking import tell_after_fork

__all__ = ["Crew"]

T = TypeVar("T")

#: Seconds without work after which a thread ends; the next transfer starts a new one.
_IDLE_SECONDS = 10.0


class _Job(Generic[T]):
    """Pieces to be carried out in any order, by whoever has a hand free.

    [Note: whose hands]
    The thread that brings a job works at it like the others, so it ends whether or not anybody helps: threads that
    could not be started, or that do not exist in a forked child, cost time and nothing else. It goes on to wait for
    those who are at a piece, since the pieces are its caller's memory. Who comes too late finds nothing to do.
    """

    def __init__(self, call: Callable[[T], None], pieces: Iterable[T]) -> None:
        self._call: Callable[[T], None] | None = call
        self._pieces = deque(pieces)
        self._changed = threading.Condition()
        self._helpers = 0
        self._error: BaseException | None = None

    def carry_out(self) -> None:
        """Returns when every piece is done; raises what the first that failed did, and then the rest is left out."""
        try:
            self._work()
        except BaseException:
            self._pieces.clear()
            raise
        finally:
            with self._changed:
                while self._helpers:
                    self._changed.wait()
            self._call = None  # who comes late holds nothing of the caller's
            error, self._error = self._error, None  # whose traceback leads back here
        if error is not None:
            try:
                raise error
            finally:
                del error

    def help(self) -> None:
        """Does pieces until there are none."""
        with self._changed:
            self._helpers += 1
        try:
            self._work()
        except BaseException as error:  # for the thread that brought the job
            self._pieces.clear()
            self._error = error.with_traceback(None)  # its frames hold what is being moved
        finally:
            with self._changed:
                self._helpers -= 1
                self._changed.notify_all()

    def _work(self) -> None:
        while True:
            try:
                piece = self._pieces.popleft()
            except IndexError:
                return
            call = self._call
            assert call is not None
            call(piece)


class Crew:
    """At most ``most`` daemon threads, which start when there is work for them and end when there was none for long."""

    def __init__(self, name: str, most: int) -> None:
        self._name, self._most = name, most
        self.after_fork()
        tell_after_fork(self)

    def carry_out(self, call: Callable[[T], None], pieces: Iterable[T], hands: int) -> None:
        """Calls ``call`` with each of ``pieces``, up to ``hands`` at a time, in this thread and in others.

        Raises:
            BaseException: what the first call that failed raised; none is under way any more then.
        """
        job = _Job(call, pieces)
        if hands == 1:
            job.carry_out()
            return
        with suppress(RuntimeError):  # the system has no thread left
            self._start(hands - 1)
        for _ in range(hands - 1):
            self._jobs.put(job)
        job.carry_out()

    def dismiss(self) -> None:
        """Has the threads end, without waiting for that. Takes no lock: finalizers call it."""
        for _ in range(len(self._threads)):
            self._jobs.put(None)

    def retire(self) -> None:
        """Has the threads end, and waits for that. Later work starts new ones."""
        threads = list(self._threads)
        self.dismiss()
        for thread in threads:
            if thread is not threading.current_thread():
                thread.join()

    def after_fork(self) -> None:
        """In a forked child the threads do not exist."""
        self._jobs: SimpleQueue[_Job[Any] | None] = SimpleQueue()
        self._lock = threading.Lock()
        self._threads: set[threading.Thread] = set()

    def _start(self, helpers: int) -> None:
        with self._lock:
            while len(self._threads) < min(helpers, self._most):
                thread = threading.Thread(target=self._run, name=f"{self._name}-{len(self._threads)}", daemon=True)
                thread.start()
                self._threads.add(thread)  # if an interrupt comes before this, the thread says so itself

    def _run(self) -> None:
        me, jobs = threading.current_thread(), self._jobs
        self._threads.add(me)
        try:
            while True:
                try:
                    job = jobs.get(timeout=_IDLE_SECONDS)
                except Empty:
                    return
                if job is None:
                    return
                job.help()
                del job
        finally:
            self._threads.discard(me)
