"""Work on threads of its own."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")


def on_a_thread(work: Callable[[], T]) -> T:
    """What ``work`` returns or raises on a thread that has ended then."""
    return on_threads(1, work)[0]


def on_threads(count: int, work: Callable[[], T]) -> list[T]:
    """The same on so many threads side by side."""
    with ThreadPoolExecutor(count) as pool:
        return [one.result() for one in [pool.submit(work) for _ in range(count)]]
