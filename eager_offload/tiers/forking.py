"""What outlives an object, and a fork: records of what has died, locks and threads.

[Note: finalizers]
An object may die in the midst of anything: where the last reference goes, or where the garbage collector runs. A
finalizer that is a Python function has a frame there, and whatever a signal handler raises in that frame is lost.
Python prints it and goes on: a Ctrl-C does not end the program, and what the finalizer was to hand over stays held.

So what a finalizer would say is kept in a weak reference to the object, a *record*, and the reference's callback is
``append`` of a deque, a method written in C. It runs no Python code, takes no lock and waits for nothing. The owner of
the deque does the rest when it polls that. It also holds the records until then: one that nothing holds but the object
itself is not called back if the garbage collector takes both.

The weak containers of the standard library have callbacks in Python, so ``Living`` is used in their place.
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
    """A weak reference that carries what is to be known once its object is gone; see [Note: finalizers]."""

    __slots__ = ()
    # By identity: a weak reference compares and hashes what it refers to, and that may be gone, or have no hash.
    __hash__ = object.__hash__
    __eq__ = object.__eq__


class Living(Generic[T]):
    """Those of the objects that were added which are alive, the oldest first; one that is added again counts once."""

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
            except IndexError:  # another thread was faster
                return


# -- forks ------------------------------------------------------------------------------------------------------------


class UnderWayAtFork(OffloadError):
    """A forked child asks for a transfer of its parent's, which ends there alone."""

    def __init__(self, text: str = "this transfer was under way in the parent process when it forked") -> None:
        super().__init__(text)


class Inheritable(Protocol):
    """Something that a forked child gets a copy of, in whatever state the parent's other threads left it."""

    def after_fork(self) -> None:
        """Runs in the child before ``os.fork`` returns there; takes no lock: its holder may not exist any more."""


_inheritable: Living[Inheritable] = Living()

#: What a child neither uses nor gives back: only the parent can talk to the driver that has pinned it, say. Nothing of
#: it may go before the process does.
LEFT_TO_THE_PARENT: list[object] = []
ctypes.pythonapi.Py_IncRef(ctypes.py_object(LEFT_TO_THE_PARENT))  # an interpreter that ends clears its modules


def tell_after_fork(one: Inheritable) -> None:
    """Has ``one.after_fork()`` called in every forked child, for as long as ``one`` lives."""
    _inheritable.add(one)


class ReentrantLock(Protocol):
    """What ``threading.RLock`` makes, with the method that says who owns it; conditions of ``threading`` rely on it."""

    def acquire(self, blocking: bool = ...) -> bool: ...

    def release(self) -> None: ...

    def __enter__(self) -> object: ...

    def __exit__(self, *_: object) -> None: ...

    def _is_owned(self) -> bool: ...


def reentrant_lock() -> ReentrantLock:
    return cast(ReentrantLock, threading.RLock())


class ForkSafeLock:
    """Has a ``lock`` for a ``with``, which is free in a forked child, even if a thread held it in the parent.

    The ``with`` needs the lock itself: an interrupt on the way into an ``__exit__`` that is written in Python would
    leave it taken for ever.

    [Note: reentry]
    A signal handler, a ``__del__`` and a callback of the garbage collector run in the midst of whatever their thread
    does. If that is inside of a lock and they call the library, they must not wait for the lock, which is theirs, nor
    change what the lock guards, which is half done. So a thread may take a lock that it holds, and what would change
    something asks first whether it does, and refuses: the public calls, pack, unpack and the operators of graphs.

    Args:
        shared: whether objects that know nothing of each other share what it guards. A thread that holds it can begin
            nothing, with whichever object.
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
        """Returns whether the calling thread holds it; see [Note: reentry]."""
        return self.lock._is_owned()


class OwnThread(threading.Thread):
    """A daemon thread of the library. What the garbage collector calls there would wait for the thread itself."""

    def __init__(self, target: Callable[[], None], name: str) -> None:
        super().__init__(target=target, name=name, daemon=True)

    def start(self) -> None:
        _beginning.add(self)
        try:
            super().start()
        except RuntimeError:
            if self.ident is None:  # else it runs: a signal handler has raised this
                _beginning.discard(self)
            raise

    def run(self) -> None:
        _thread.is_own = True
        _beginning.discard(self)
        super().run()


#: Whether a thread is one of the library's.
_thread = threading.local()
#: Threads of the library that do not say so yet. Python runs code of its own on them first, the collector may come in
#: the midst of it, and the thread that started them waits for them meanwhile.
_beginning: set[OwnThread] = set()


_shared: Living[ForkSafeLock] = Living()


def can_begin_nothing() -> bool:
    """Returns whether the calling thread is the library's, or holds a lock that objects share: see [Note: reentry]."""
    if hasattr(_thread, "is_own") or True in [one.lock._is_owned() for one in _shared]:
        return True
    return bool(_beginning) and threading.get_ident() in [thread.ident for thread in list(_beginning)]


def _after_fork() -> None:
    _beginning.clear()
    vars(_thread).clear()  # the thread that forked is the child's main thread, whatever it was
    for one in _inheritable:
        one.after_fork()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
