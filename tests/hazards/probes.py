"""What a runtime was asked to do, and ways to stand in its way."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from eager_offload._torch import WeakStorage
from eager_offload.eager.handles import SavedStorage
from eager_offload.runtime.base import Runtime, Stream
from eager_offload.tiers.base import Slot

__all__ = ["Moved", "Transfers"]


class Moved(NamedTuple):
    """One copy: its end on the device and its end in a tier."""

    storage: WeakStorage
    slot: int
    nbytes: int


class Transfers:
    """Takes note of every copy that a runtime is asked for, and of every storage that a copy out is taken from."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self.out: list[Moved] = []
        self.back: list[Moved] = []
        #: Keys of the storages that were read, gathered ones included.
        self.sources: set[int] = set()
        self._sources: list[WeakStorage] = []
        #: How many targets of one slot were alive together at most.
        self.most_targets_of_one_slot = 0

    def __enter__(self) -> Self:
        self._source_bytes = SavedStorage.source_bytes
        transfers, source_bytes = self, self._source_bytes

        def noting(saved: SavedStorage) -> Tensor:
            transfers._note(saved.aliases[0].untyped_storage())
            return source_bytes(saved)

        SavedStorage.source_bytes = noting  # type: ignore[method-assign]
        self._runtime.copy = self._copy  # type: ignore[method-assign]
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        SavedStorage.source_bytes = self._source_bytes  # type: ignore[method-assign]
        del self._runtime.copy

    def _note(self, storage: torch.UntypedStorage) -> None:
        self._sources.append(WeakStorage(storage))  # or another storage could get the same key
        self.sources.add(storage._cdata)

    def _copy(self, dst: Tensor | Slot, src: Tensor | Slot, stream: Stream) -> None:
        type(self._runtime).copy(self._runtime, dst, src, stream)
        if isinstance(dst, Slot):
            assert isinstance(src, Tensor)
            self._note(src.untyped_storage())
            self.out.append(Moved(WeakStorage(src.untyped_storage()), id(dst), src.nbytes))
        else:
            assert isinstance(src, Slot)
            self.back.append(Moved(WeakStorage(dst.untyped_storage()), id(src), dst.nbytes))
            alive = Counter(moved.slot for moved in self.back if not moved.storage.expired())
            self.most_targets_of_one_slot = max(self.most_targets_of_one_slot, *alive.values())
