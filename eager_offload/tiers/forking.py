"""Finalizers that are safe in signal handlers and garbage collection, and locks and threads that survive a fork.

[Note: finalizers]
An object may die at any point of a program: when its last reference goes, or when the garbage collector runs. If a
finalizer is a Python function and a signal handler raises in its frame, the exception is printed and ignored: Ctrl-C
does not end the program, and the finalizer does not finish.

Thus a finalizer's data are stored in a weak reference to the object, a *record*. The callback of the reference is the
``append`` of a deque, which is written in C: it runs no Python code, takes no lock and never waits. The owner polls the
deque and does the rest. The owner must also hold the records until then: the garbage collector skips the callback of a
record that it collects together with the object.

The weak containers of the standard library have Python callbacks, so ``Living`` replaces them.
"""

from __future__ import annotations

import ctypes
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from typing import Generic, Protocol, TypeVar, cast

from eager_offload.errors import OffloadError

T = TypeVar("T")


class FinalizerRecord(weakref.ref[T]):
    """A weak reference with data about a dead object; see [Note: finalizers]."""

    __slots__ = ()
    # By identity: weak references compare and hash their objects, which may be dead or unhashable.
    __hash__ = object.__hash__
    __eq__ = object.__eq__


class Living(Generic[T]):
    """A weak ordered set of objects, the oldest first, compared by identity."""

    def __init__(self) -> None:
        self._records: dict[FinalizerRecord[T], None] = {}
        self._gone: deque[FinalizerRecord[T]] = deque()

    def add(self, one: T) -> None:
        self._poll()
        if self._record_of(one) is None:
            self._records[FinalizerRecord(one, self._gone.append)] = None

    def discard(self, one: T) -> None:
        record = self._record_of(one)
        if record is not None:
            self._records.pop(record, None)

    def __iter__(self) -> Iterator[T]:
        self._poll()
        return iter([one for record in list(self._records) if (one := record()) is not None])

    def __bool__(self) -> bool:
        self._poll()
        return bool(self._records)

    def _record_of(self, one: T) -> FinalizerRecord[T] | None:
        for reference in weakref.getweakrefs(one):
            if isinstance(reference, FinalizerRecord) and reference in self._records:
                return reference
        return None

    def _poll(self) -> None:
        while self._gone:
            try:
                self._records.pop(self._gone.popleft(), None)
            except IndexError:  # another thread took the last record
                return


# -- forks ------------------------------------------------------------------------------------------------------------


class UnderWayAtFork(OffloadError):
    """A forked child waits for a transfer that only its parent can complete."""

    def __init__(self, text: str = "this transfer was under way in the parent process when it forked") -> None:
        super().__init__(text)


class Inheritable(Protocol):
    """An object that a forked child copies in whatever state the parent's other threads left it."""

    def after_fork(self) -> None:
        """Resets the object in the child before ``os.fork`` returns. Takes no lock, whose holder may not exist."""


_inheritable: Living[Inheritable] = Living()

#: Objects that a child neither uses nor frees, because only the parent can (e.g. memory that its driver has pinned).
#: They have to live as long as the process.
LEFT_TO_THE_PARENT: list[object] = []
ctypes.pythonapi.Py_IncRef(ctypes.py_object(LEFT_TO_THE_PARENT))  # never freed: the exiting interpreter clears modules


def tell_after_fork(one: Inheritable) -> None:
    """Registers ``one``, while alive, for a call of ``one.after_fork()`` in every forked child."""
    _inheritable.add(one)


class ReentrantLock(Protocol):
    """The type of ``threading.RLock()``, with ``_is_owned``, on which ``threading.Condition`` relies, too."""

    def acquire(self, blocking: bool = ...) -> bool: ...

    def release(self) -> None: ...

    def __enter__(self) -> object: ...

    def __exit__(self, *_: object) -> None: ...

    def _is_owned(self) -> bool: ...


def reentrant_lock() -> ReentrantLock:
    return cast(ReentrantLock, threading.RLock())


class ForkSafeLock:
    """Holds a reentrant ``lock``, replaced in a forked child because a thread of the parent may have held the lock.

    Not a context manager itself: an interrupt on the way into a Python ``__exit__`` would leave the lock held for ever.

    [Note: reentry]
    A signal handler, a ``__del__`` or a callback of the garbage collector may interrupt a thread that holds a lock, and
    call the library. Such a call must not wait for the lock, which its own thread holds, and must not change the
    guarded state, which may be inconsistent. Thus locks are reentrant, and calls that change state (public calls, pack,
    unpack, operators of graphs) first check whether their thread holds the lock, and then refuse.

    Args:
        shared: whether the lock guards state of several objects. A thread that holds such a lock is refused by all
            objects: see ``can_begin_nothing``.
    """

    __slots__ = ("__weakref__", "lock")

    def __init__(self, *, shared: bool = True) -> None:
        self.lock = reentrant_lock()
        tell_after_fork(self)
        if shared:
            _shared.add(self)

    def after_fork(self) -> None:
        self.lock = reentrant_lock()

    def is_held(self) -> bool:
        """Returns whether the calling thread holds the lock."""
        return self.lock._is_owned()


class OwnThread(threading.Thread):
    """A daemon thread of the library. The library refuses calls from callbacks of the garbage collector on this thread,
    since they would wait for the thread itself: see ``can_begin_nothing``."""

    def __init__(self, target: Callable[[], None], name: str) -> None:
        super().__init__(target=target, name=name, daemon=True)

    def start(self) -> None:
        _beginning.add(self)
        try:
            super().start()
        except RuntimeError:
            if self.ident is None:  # otherwise the thread runs, and a signal handler has raised this error
                _beginning.discard(self)
            raise

    def run(self) -> None:
        _thread.is_own = True
        _beginning.discard(self)
        super().run()


#: ``is_own`` is set on threads of the library.
_thread = threading.local()
#: Threads of the library that have not set ``is_own`` yet. Garbage collection may interrupt the Python code that runs
#: on them before ``run``, while the thread that started them waits.
_beginning: set[OwnThread] = set()


_shared: Living[ForkSafeLock] = Living()


def can_begin_nothing() -> bool:
    """Returns whether the calling thread is the library's or holds a shared lock: see [Note: reentry]."""
    if hasattr(_thread, "is_own") or True in [one.lock._is_owned() for one in _shared]:
        return True
    return bool(_beginning) and threading.get_ident() in [thread.ident for thread in list(_beginning)]


def _after_fork() -> None:
    _beginning.clear()
    vars(_thread).clear()  # the forking thread is the child's main thread, even if it was one of the library's
    for one in _inheritable:
        one.after_fork()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
