"""Work on a thread of its own, and Python's collector, which one thread at a time runs."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    import pytest  # GPU programs run without it

T = TypeVar("T")


def on_a_thread(work: Callable[[], T]) -> T:
    """What ``work`` returns or raises on a thread that has ended then."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(work).result()


def on_threads(count: int, work: Callable[[int], T]) -> list[T]:
    """Calls ``work`` on so many threads at once, with their numbers; raises what the first of them raised."""
    with ThreadPoolExecutor(count) as pool:
        return [done.result() for done in [pool.submit(work, number) for number in range(count)]]


def collect() -> None:
    """``gc.collect()`` that has run: it returns at once, and frees nothing, while another thread collects."""
    own, begun = threading.get_ident(), set[int]()

    def note(phase: str, info: dict[str, int]) -> None:
        if info["generation"] == 2:
            begun.add(threading.get_ident())

    gc.callbacks.append(note)
    try:
        while own not in begun:  # for ever inside of a collection of this very thread, where no test calls it
            gc.collect()
    finally:
        gc.callbacks.remove(note)


def refuse_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Has the system start none of the library's threads."""
    start = threading.Thread.start

    def refuse(thread: threading.Thread) -> None:
        if thread.name.startswith("eager_offload"):
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refuse)
