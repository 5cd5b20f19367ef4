"""Work on a thread of its own."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")


def on_a_thread(work: Callable[[], T]) -> T:
    """What ``work`` returns or raises on a thread that has ended then."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(work).result()
