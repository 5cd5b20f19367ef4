"""What a runtime was asked to do, and ways to stand in its way."""

from __future__ import annotations

import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple, Self

import pytest
import torch
from torch import Tensor

from eager_offload.eager.handles import SavedStorage
from eager_offload.runtime.base import Event, Layout, Runtime, Stream
from eager_offload.runtime.host import HostEvent
from eager_offload.tiers.base import ByteRegion, Slot


class Gone:
    """Which of the storages that it was shown live on, and a wait until all of them have gone."""

    def __init__(self) -> None:
        self._alive: dict[int, weakref.ref[torch.UntypedStorage]] = {}
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


class Moved(NamedTuple):
    """One copy: its end on the device and its end in a tier."""

    storage: weakref.ref[torch.UntypedStorage]
    region: ByteRegion
    nbytes: int


class Transfers:
    """Takes note of every copy that a runtime is asked for, and of every storage that a copy out is taken from."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self.out: list[Moved] = []
        self.back: list[Moved] = []
        #: The storages that were read, gathered ones included.
        self.sources: list[weakref.ref[torch.UntypedStorage]] = []
        #: How many targets of one slot were alive together at most.
        self.most_targets_of_one_slot = 0

    def __enter__(self) -> Self:
        self._source_bytes = SavedStorage.source_bytes
        transfers, source_bytes = self, self._source_bytes

        def noting(saved: SavedStorage) -> Tensor:
            transfers._note(saved.aliases[0].untyped_storage())
            return source_bytes(saved)

        SavedStorage.source_bytes = noting
        self._runtime.copy = self._copy
        return self

    def __exit__(self, *_: object) -> None:
        SavedStorage.source_bytes = self._source_bytes
        del self._runtime.copy

    def read(self, storage: torch.UntypedStorage) -> bool:
        """Whether some byte of ``storage`` was read by a copy out."""
        return any(source() is storage for source in self.sources)

    def _note(self, storage: torch.UntypedStorage) -> None:
        self.sources.append(weakref.ref(storage))

    def _copy(
        self, dst: Tensor | Slot, src: Tensor | torch.UntypedStorage | Slot, stream: Stream, after: Sequence[Event] = ()
    ) -> Event:
        over = type(self._runtime).copy(self._runtime, dst, src, stream, after)
        if isinstance(dst, Slot):
            storage = src.untyped_storage() if isinstance(src, Tensor) else src
            self._note(storage)
            self.out.append(Moved(weakref.ref(storage), dst.region, dst.nbytes))
        else:
            self.back.append(Moved(weakref.ref(dst.untyped_storage()), src.region, dst.nbytes))
            alive = Counter(moved.region for moved in self.back if moved.storage() is not None)
            self.most_targets_of_one_slot = max(self.most_targets_of_one_slot, *alive.values())
        return over


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
    """Takes note of the reload targets that a runtime is asked for, and refuses those of which ``refuses`` says so.

    Args:
        refuses: is given the number of the call, from 1.
    """

    def __init__(
        self, runtime: Runtime, patch: pytest.MonkeyPatch, refuses: Callable[[int], bool] = lambda number: False
    ) -> None:
        self.calls = self.refused = 0
        self.targets: list[weakref.ref[torch.UntypedStorage]] = []
        self._allocate, self._refuses = runtime.allocate, refuses
        patch.setattr(runtime, "allocate", self)

    def __call__(self, layout: Layout, device: torch.device, stream: Stream) -> Tensor:
        self.calls += 1
        if self._refuses(self.calls):
            self.refused += 1
            raise torch.OutOfMemoryError("no room for a reload, on purpose")
        target = self._allocate(layout, device, stream)
        self.targets.append(weakref.ref(target.untyped_storage()))
        return target

    @property
    def alive(self) -> int:
        return sum(target() is not None for target in self.targets)
