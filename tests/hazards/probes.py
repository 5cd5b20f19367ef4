"""What a runtime was asked to do, and ways to stand in its way."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Self, TypeAlias

import pytest
import torch
from torch import Tensor

from eager_offload.eager.handles import SavedStorage
from eager_offload.runtime.base import Event, Layout, Runtime, Stream
from eager_offload.runtime.host import HostEvent
from eager_offload.tiers.base import Slot

Storage: TypeAlias = weakref.ref[torch.UntypedStorage]


class Gone:
    """Which of the storages that it was shown live on, and a wait until all of them have gone."""

    def __init__(self) -> None:
        self._alive: dict[int, Storage] = {}
        self._changed = threading.Condition()
        self.seen = 0

    def see(self, tensor: Tensor) -> Tensor:
        number, self.seen = self.seen, self.seen + 1

        def gone(_: object) -> None:
            with self._changed:
                del self._alive[number]
                self._changed.notify_all()

        self._alive[number] = weakref.ref(tensor.untyped_storage(), gone)
        return tensor

    @property
    def alive(self) -> int:
        return len(self._alive)

    def wait(self) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: not self._alive, 60), f"{self.alive} of {self.seen} are held"


class Transfers:
    """Takes note of the storages that copies out read, gathered ones too, and of those that copies back fill."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self.sources: list[Storage] = []
        self.targets: list[Storage] = []

    def __enter__(self) -> Self:
        self._source_bytes, note = SavedStorage.source_bytes, self._note

        def noting(saved: SavedStorage) -> Tensor:
            note(self.sources, saved.aliases[0])
            return self._source_bytes(saved)

        def copy(dst: Any, src: Any, stream: Stream, after: Sequence[Event] = (), *, timed: bool = False) -> Event:
            note(*((self.sources, src) if isinstance(dst, Slot) else (self.targets, dst)))
            return type(self._runtime).copy(self._runtime, dst, src, stream, after, timed=timed)

        SavedStorage.source_bytes = noting
        self._runtime.copy = copy
        return self

    def __exit__(self, *_: object) -> None:
        SavedStorage.source_bytes = self._source_bytes
        del self._runtime.copy

    def read(self, storage: torch.UntypedStorage) -> bool:
        """Whether some byte of ``storage`` was read by a copy out."""
        return any(source() is storage for source in self.sources)

    @staticmethod
    def _note(storages: list[Storage], end: Tensor | torch.UntypedStorage) -> None:
        storages.append(weakref.ref(end.untyped_storage() if isinstance(end, Tensor) else end))


@contextmanager
def meanwhile(do: Callable[[], object], waiter: threading.Thread | None = None) -> Iterator[list[str]]:
    """Calls ``do`` once, where a thread begins to wait for a transfer; what was called is in the list.

    Args:
        waiter: which thread; the one that calls this by default.
    """
    waiter, wait = waiter or threading.current_thread(), HostEvent.wait
    done: list[str] = []

    def noticed(event: HostEvent) -> None:
        if threading.current_thread() is waiter and not event.done and not done:
            done.append("waits")
            do()
        wait(event)

    HostEvent.wait = noticed
    try:
        yield done
    finally:
        HostEvent.wait = wait


class Allocations:
    """Counts the reload targets that a runtime is asked for, and refuses those of which ``refuses`` says so.

    Args:
        refuses: is given the number of the call, from 1.
    """

    def __init__(self, runtime: Runtime, patch: pytest.MonkeyPatch, refuses: Callable[[int], bool]) -> None:
        self.calls = self.refused = 0
        self._allocate, self._refuses = runtime.allocate, refuses
        patch.setattr(runtime, "allocate", self)

    def __call__(self, layout: Layout, device: torch.device, stream: Stream) -> Tensor:
        self.calls += 1
        if self._refuses(self.calls):
            self.refused += 1
            raise torch.OutOfMemoryError("no room for a reload, on purpose")
        return self._allocate(layout, device, stream)
