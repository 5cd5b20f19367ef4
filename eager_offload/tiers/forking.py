"""What objects with locks, threads or descriptors do in a child that was forked around them."""

from __future__ import annotations

import os
import threading
import weakref
from typing import Protocol

__all__ = ["ForkSafeLock", "Inheritable", "tell_after_fork"]


class Inheritable(Protocol):
    """Something that a forked child gets a copy of, in whatever state the parent's other threads left it."""

    def after_fork(self) -> None:
        """Runs in the child before ``os.fork`` returns there; takes no lock: its holder may not exist any more."""


_inheritable: weakref.WeakSet[Inheritable] = weakref.WeakSet()


def tell_after_fork(one: Inheritable) -> None:
    """Has ``one.after_fork()`` called in every forked child, for as long as ``one`` lives."""
    _inheritable.add(one)


class ForkSafeLock:
    """Has a ``lock`` for a ``with``, which is free in a forked child whoever held it in the parent.

    The ``with`` needs the lock itself: an interrupt on the way into an ``__exit__`` that is written in Python would
    leave it taken for ever.
    """

    __slots__ = ("__weakref__", "lock")

    def __init__(self) -> None:
        self.lock = threading.Lock()
        tell_after_fork(self)

    def after_fork(self) -> None:
        self.lock = threading.Lock()


def _after_fork() -> None:
    for one in list(_inheritable):
        one.after_fork()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
