"""What is left to do when an object dies, written down before it does: a captured graph alone has a ``__del__``.

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

import weakref
from collections import deque
from collections.abc import Iterator
from typing import Generic, TypeVar

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
